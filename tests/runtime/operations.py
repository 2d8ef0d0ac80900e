"""Counting what a device is asked to do, and what the host waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "bincount", "equal", "is_nonzero")


class Work(TorchDispatchMode):
    """Counts operations that are no views; those of them that copy (messages between threads do), that sort, and those whose
    result or its shape the host waits for. A launch is an operation that does more than ask for memory, or one of
    `kernels_at_once`; its bytes are those of the tensors that it takes and gives."""

    running: Work | None = None

    def __init__(self) -> None:
        super().__init__()
        self.num = self.num_copies = self.num_sorts = self.num_waits = self.num_launches = self.num_bytes = 0
        self.reads = Reads()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        self.num_copies += func.__name__.startswith("copy_")
        self.num_sorts += func.__name__.startswith(("sort", "argsort"))
        self.num_waits += func.__name__.startswith(WAITS)
        found = func(*args, **(kwargs or {}))
        if not func.is_view and not func.__name__.startswith(("empty", "new_empty", "detach")):
            self.launched(args, kwargs, found)
        return found

    def launched(self, *tensors: Any) -> None:
        """Counts a launch."""
        self.num_launches += 1
        self.num_bytes += sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))

    def __enter__(self) -> Work:
        Work.running = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Work.running = None


class Reads(TorchFunctionMode):
    """Counts what a host reads."""

    num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += getattr(func, "__name__", "") in ("cpu", "item", "tolist", "__bool__", "__int__", "__index__", "equal")
        return func(*args, **(kwargs or {}))


class AtOnce:
    """A Triton kernel that returns at once."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **constants: _launched(arguments)


def _launched(*tensors: Any) -> None:
    if Work.running is not None:
        Work.running.launched(*tensors)


@contextlib.contextmanager
def kernels_at_once() -> Iterator[None]:
    """Within, the runtime's layers in bf16 take the branches of a GPU that has Triton, whose kernels, grouped products among
    them, return at once: results mean nothing, and what is left is the host's part."""
    from foremoe.runtime import activation, outer, pairs, products

    def grouped(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        found = rows.new_empty(len(rows), weights.shape[2])
        _launched(rows, weights, offs, found)
        return found

    with contextlib.ExitStack() as stack:
        for module in (activation, pairs, products):
            stack.enter_context(patch.object(module, "fuses", lambda tensor: tensor.dtype == torch.bfloat16))
        for module in (activation, pairs):
            stack.enter_context(patch.object(module, "_kernels", lambda: (AtOnce(), AtOnce())))
        stack.enter_context(patch.object(outer, "_kernel", AtOnce))
        stack.enter_context(patch.object(functional, "grouped_mm", grouped))
        yield
