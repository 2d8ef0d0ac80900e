"""Counting what a device is asked to do, and what the host waits for."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "bincount", "equal", "is_nonzero")


class Work(TorchDispatchMode):
    """Counts operations that are no views; those of them that copy (messages between threads do), that sort, and those whose
    result or its shape the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.num = self.num_copies = self.num_sorts = self.num_waits = 0
        self.reads = Reads()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        self.num_copies += func.__name__.startswith("copy_")
        self.num_sorts += func.__name__.startswith(("sort", "argsort"))
        self.num_waits += func.__name__.startswith(WAITS)
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts what a host reads."""

    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += getattr(func, "__name__", "") in ("cpu", "item", "tolist", "__bool__", "__int__", "__index__", "equal")
        return func(*args, **(kwargs or {}))
