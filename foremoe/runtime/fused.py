"""Triton's kernels, which stand in for several operations of torch: the tensors that take them, and their launch."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch


def fuses(tensor: torch.Tensor) -> bool:
    """True on GPUs with Triton, in dtypes that float32 is wide for."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Looked up once: without Triton every look-up walks the import path, several times a layer."""
    return find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs a kernel, which takes tensors for contiguous; an empty grid does nothing."""
    if all(grid):
        kernel[grid](*arguments, **constants)
