"""Grouped expert compute: what the slots of a rank do with the pairs they serve, forward and backward; keeps no weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from foremoe.base.errors import TransferError
from foremoe.problem.schedule import Phase
from foremoe.transfer.base import Tensors

if TYPE_CHECKING:
    from foremoe.runtime.stage import Stage

# Letters: Y pairs that a rank serves, sorted by slot; N pairs of one slot; S slots of a rank; H hidden size, F ffn size,
# D = 2F columns of gate and up.

_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()  # torch 2.8 and later, on GPUs


class ExpertMath(Protocol):
    """What an expert computes: one MLP, forward and backward by hand.

    Weights and gradients come as tensors of the shapes in `shapes`, in that order. Neither may be kept: after a call their memory
    may hold another expert.
    """

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        """Name -> shape of an expert's tensors; matrices are [in, out]."""

    def forward(self, x_NH: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        """The output y_NH, and the tensors besides x that backward needs: of its own making, never weights."""

    def backward(
        self, x_NH: torch.Tensor, saved: Tensors, grad_y_NH: torch.Tensor, weights: Tensors, grads: Tensors
    ) -> torch.Tensor:
        """The gradient of x; adds those of the weights to `grads`, which are float32 (float64 for float64 weights)."""


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """``(silu(x @ gate) * (x @ up)) @ down`` without biases; gate and up side by side in one matrix [H, 2F], gate first."""

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        return {"gate_up": (hidden_size, 2 * ffn_size), "down": (ffn_size, hidden_size)}

    def forward(self, x_NH: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        gate_up_HD, down_FH = weights
        pre_ND = x_NH @ gate_up_HD
        gate_NF, up_NF = pre_ND.chunk(2, dim=1)
        return (functional.silu(gate_NF) * up_NF) @ down_FH, (pre_ND,)

    def backward(
        self, x_NH: torch.Tensor, saved: Tensors, grad_y_NH: torch.Tensor, weights: Tensors, grads: Tensors
    ) -> torch.Tensor:
        gate_up_HD, down_FH = weights
        gate_NF, up_NF = saved[0].chunk(2, dim=1)
        sigmoid_NF = torch.sigmoid(gate_NF)
        silu_NF = gate_NF * sigmoid_NF
        add_product(grads[1], (silu_NF * up_NF).T, grad_y_NH)
        grad_act_NF = grad_y_NH @ down_FH.T
        slope_NF = sigmoid_NF * (1 + gate_NF * (1 - sigmoid_NF))
        grad_pre_ND = torch.cat([grad_act_NF * up_NF * slope_NF, grad_act_NF * silu_NF], dim=1)
        add_product(grads[0], x_NH.T, grad_pre_ND)
        return grad_pre_ND @ gate_up_HD.T


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``; where the total is wider than the factors, nothing is rounded to their dtype on the way."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and _WIDE_PRODUCTS:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class ComputeTime:
    """Seconds of expert compute in a stage: CPU time of the calling thread, so what intra-op threads and GPUs do is not in it."""

    def __init__(self) -> None:
        self.forward_s = self.backward_s = 0.0
        self.num_backward = 0

    def add(self, phase: Phase, seconds: float) -> None:
        """A re-forward counts as backward: that is the pass it belongs to."""
        if phase == Phase.FORWARD:
            self.forward_s += seconds
        else:
            self.backward_s += seconds


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row as a rank computes it: all that backward needs to find its weights again."""

    micro_step: int
    layer: int
    num_S: list[int]  # pairs of every slot; they lie one after the other
    shapes: Sequence[tuple[int, ...]]  # of an expert's tensors
    math: ExpertMath
    stage: Stage
    time: ComputeTime


class GroupedExperts(torch.autograd.Function):
    """x_YH -> y_YH, slot by slot. Saves its input, what the math wants, and the row's key; weights are asked for again."""

    @staticmethod
    def forward(ctx: Any, x_YH: torch.Tensor, row: Row, phase: Phase) -> torch.Tensor:
        residency = row.stage.weights(row.micro_step, row.layer, phase)
        begin_s = time.thread_time()
        y_YH = torch.empty_like(x_YH)
        saved: list[torch.Tensor] = []
        for s, pairs in _busy(row):
            y_YH[pairs], kept = row.math.forward(x_YH[pairs], _reshape(residency.weights_S[s], row, s))
            saved += kept
        ctx.row = row
        ctx.save_for_backward(x_YH, *saved)
        row.time.add(phase, time.thread_time() - begin_s)
        return y_YH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_YH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row: Row = ctx.row
        x_YH, *saved = ctx.saved_tensors
        residency = row.stage.weights(row.micro_step, row.layer, Phase.BACKWARD)
        assert residency.grads_S is not None
        begin_s = time.thread_time()
        busy = _busy(row)
        grad_x_YH = torch.empty_like(x_YH)
        each = len(saved) // max(len(busy), 1)
        for i, (s, pairs) in enumerate(busy):
            weights, grads = _reshape(residency.weights_S[s], row, s), _reshape(residency.grads_S[s], row, s)
            kept = saved[i * each : (i + 1) * each]
            grad_x_YH[pairs] = row.math.backward(x_YH[pairs], kept, grad_YH[pairs], weights, grads)
        row.time.add(Phase.BACKWARD, time.thread_time() - begin_s)
        row.time.num_backward += 1
        row.stage.gradients(row.micro_step, row.layer)
        row.stage.release(row.micro_step, row.layer, Phase.BACKWARD)
        return grad_x_YH, None, None


def _busy(row: Row) -> list[tuple[int, slice]]:
    """Slots with pairs, and where these lie."""
    found, end = [], 0
    for s, num in enumerate(row.num_S):
        if num:
            found.append((s, slice(end, end + num)))
        end += num
    return found


def _reshape(tensors: Tensors | None, row: Row, s: int) -> Tensors:
    if tensors is None:
        got = f"slot {s} got {row.num_S[s]} pairs in micro-step {row.micro_step}, layer {row.layer}"
        raise TransferError(f"{got}, but the plan leaves it empty; give begin() the split of the plan that runs.")
    return [tensor.view(shape) for tensor, shape in zip(tensors, row.shapes, strict=True)]
