"""Adapters: foremoe inside the frameworks that train. Each imports its framework on first use."""

import importlib
from typing import Any

_MODULES = ("megatron",)


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"foremoe.integrations.{name}")
    raise AttributeError(f"module 'foremoe.integrations' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
