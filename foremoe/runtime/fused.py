"""Helpers for Triton kernels that each replace several torch operations. They check tensors and launch the kernels."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch


def fuses(tensor: torch.Tensor) -> bool:
    """Returns True if Triton is installed and the tensor is a bf16 or fp16 tensor on a GPU."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Returns whether Triton is installed. Cached, because a failing look-up searches the import path several times per layer."""
    return find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs a kernel that assumes contiguous tensors. Does nothing if the grid is empty."""
    if all(grid):
        kernel[grid](*arguments, **constants)
