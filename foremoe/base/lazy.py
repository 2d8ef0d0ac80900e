"""Lazy loading of a package's names, which are imported on first use."""

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy(package: str, names: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` for a package. They load the given names and submodules on first use."""
    home = {name: module for module, its in names.items() for name in its} | {name: "" for name in names if "." not in name}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{home[name] or name}")
        value = getattr(module, name) if home[name] else module
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *home})
