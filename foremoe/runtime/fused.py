"""Helpers for Triton kernels that replace several torch operations. They check the tensors and launch the kernels."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from typing import Any

import torch


def fuses(tensor: torch.Tensor) -> bool:
    """Returns True for bf16 and fp16 tensors on GPUs if Triton is installed."""
    return tensor.is_cuda and tensor.dtype in (torch.bfloat16, torch.float16) and _has_triton()


@functools.cache
def _has_triton() -> bool:
    """Returns whether Triton is installed. Cached, because a failing look-up searches the import path several times per layer."""
    return find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Runs a kernel, which assumes contiguous tensors. An empty grid does nothing."""
    if all(grid):
        kernel[grid](*arguments, **constants)
