"""Adapters for training frameworks. Each adapter imports its framework on first use."""

from foremoe.base.lazy import lazy

__all__ = ["megatron", "nemo_rl", "slime", "transformers", "verl"]

__getattr__, __dir__ = lazy(__name__, dict.fromkeys(__all__, ()))
