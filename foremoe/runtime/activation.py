"""Activation of SwiGLU experts and its gradient, computed either with torch operations or in one fused Triton kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from foremoe.runtime.fused import fuses, launch

# Letters: Y pairs, F ffn size, D = 2F columns of gate and up.

_COLUMNS = 1024  # columns per Triton program


def swiglu(pre_YD: torch.Tensor) -> torch.Tensor:
    """Returns act_YF = ``silu(gate) * up``."""
    if fuses(pre_YD):
        act_YF = pre_YD.new_empty(len(pre_YD), pre_YD.shape[1] // 2)
        _run(_kernels()[0], act_YF.shape, pre_YD.contiguous(), act_YF)
        return act_YF
    gate_YF, up_YF = pre_YD.chunk(2, dim=1)
    return functional.silu(gate_YF) * up_YF


def swiglu_backward(pre_YD: torch.Tensor, grad_act_YF: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Recomputes act_YF and returns it together with the gradient of pre_YD."""
    grad_pre_YD = torch.empty_like(pre_YD, memory_format=torch.contiguous_format)
    if fuses(pre_YD):
        act_YF = torch.empty_like(grad_act_YF, memory_format=torch.contiguous_format)
        _run(_kernels()[1], act_YF.shape, pre_YD.contiguous(), grad_act_YF.contiguous(), act_YF, grad_pre_YD)
        return act_YF, grad_pre_YD
    gate_YF, up_YF = pre_YD.chunk(2, dim=1)
    silu_YF = functional.silu(gate_YF)
    grad_gate_YF, grad_up_YF = grad_pre_YD.chunk(2, dim=1)
    torch.mul(grad_act_YF, silu_YF, out=grad_up_YF)
    torch.ops.aten.silu_backward.grad_input(grad_act_YF * up_YF, gate_YF, grad_input=grad_gate_YF)
    return silu_YF * up_YF, grad_pre_YD


def _run(kernel: Any, shape: torch.Size, *tensors: torch.Tensor) -> None:
    """Launches a kernel with one program per pair and block of columns."""
    launch(kernel, (shape[0], -(-shape[1] // _COLUMNS)), *tensors, shape[1], COLUMNS=_COLUMNS)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Returns the forward and the backward kernel. They compute in float32 and round once, when storing."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def forward(pre, act, num_columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        gate = tl.load(pre + row * 2 * num_columns + column, mask=inside).to(tl.float32)
        up = tl.load(pre + row * 2 * num_columns + num_columns + column, mask=inside).to(tl.float32)
        tl.store(act + row * num_columns + column, gate * tl.sigmoid(gate) * up, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def backward(pre, grad_act, act, grad_pre, num_columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        first = row * 2 * num_columns + column
        gate = tl.load(pre + first, mask=inside).to(tl.float32)
        up = tl.load(pre + first + num_columns, mask=inside).to(tl.float32)
        grad = tl.load(grad_act + row * num_columns + column, mask=inside).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        tl.store(act + row * num_columns + column, silu * up, mask=inside)
        tl.store(grad_pre + first, grad * up * (sigmoid + silu * (1 - sigmoid)), mask=inside)
        tl.store(grad_pre + first + num_columns, grad * silu, mask=inside)

    return forward, backward
