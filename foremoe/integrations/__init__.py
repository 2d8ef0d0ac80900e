"""Adapters: foremoe inside the frameworks that train, and readers of what rollout engines return.

Each adapter imports its framework on first use; the readers of rollout import none.
"""

import importlib
from typing import Any

_MODULES = ("megatron", "sglang", "vllm")
_HOME = {
    "ReadReport": "routed_experts", "Routed": "sequences", "count_workload": "routed_experts",
    "from_routed_experts": "routed_experts",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"foremoe.integrations.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(f"foremoe.integrations.{_HOME[name]}"), name)
    raise AttributeError(f"module 'foremoe.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES, *_HOME])
