"""Forward and backward computation of all experts in a rank's slots, without keeping references to their weights."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch.autograd.function import once_differentiable

from foremoe.base.errors import TransferError
from foremoe.problem.schedule import Phase
from foremoe.runtime.activation import swiglu, swiglu_backward
from foremoe.runtime.products import OneExpert, Products, Run, SlotProducts, find_runs
from foremoe.transfer.base import Tensors
from foremoe.transfer.residency import Residency

if TYPE_CHECKING:
    from foremoe.runtime.bank import ExpertBank
    from foremoe.runtime.stage import Stage

# Letters: Y pairs that a rank serves, sorted by slot; N pairs of one slot; S slots of a rank; H hidden size, F ffn size,
# D = 2F columns of gate and up.

MOST_KEPT = 4096  # maximum number of entries that a bank caches


class ExpertMath(Protocol):
    """Computation of an expert, which is an MLP with a hand-written backward pass.

    Weights and gradients are passed as sequences of tensors, in the order and with the shapes that `shapes` returns.
    Implementations must not keep references to the tensors, because their memory may hold another expert after the call.
    """

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of an expert's tensors by name. A matrix has the shape [in, out]."""

    def forward(self, x_NH: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Returns y_NH and the tensors that backward needs in addition to x. These tensors must be new ones, never weights."""

    def backward(
        self, x_NH: torch.Tensor, saved: Tensors, grad_y_NH: torch.Tensor, weights: Tensors, grads: Tensors
    ) -> torch.Tensor:
        """Returns the gradient of x and adds the weights' gradients to `grads` (float32, or float64 for float64 weights)."""


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """SwiGLU expert ``(silu(x @ gate) * (x @ up)) @ down`` without biases. One matrix [H, 2F] holds `gate` followed by `up`.

    The runtime computes SwiGLU for all slots at once if torch has a grouped product. All other expert types are computed slot by
    slot.
    """

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        return {"gate_up": (hidden_size, 2 * ffn_size), "down": (ffn_size, hidden_size)}

    def forward(self, x_NH: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        return self._forward_by(OneExpert(weights), x_NH)

    def backward(
        self, x_NH: torch.Tensor, saved: Tensors, grad_y_NH: torch.Tensor, weights: Tensors, grads: Tensors
    ) -> torch.Tensor:
        return self._backward_by(OneExpert(weights, grads), x_NH, saved, grad_y_NH)

    def _forward_by(self, products: Products, x_YH: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Computes `forward` for the pairs of one or many experts."""
        pre_YD = products.times(x_YH, 0)
        return products.times(swiglu(pre_YD), 1), (pre_YD,)

    def _backward_by(self, products: Products, x_YH: torch.Tensor, saved: Tensors, grad_y_YH: torch.Tensor) -> torch.Tensor:
        """Computes `backward` for the pairs of one or many experts."""
        act_YF, grad_pre_YD = swiglu_backward(saved[0], products.times_transposed(grad_y_YH, 1))
        products.add(1, act_YF, grad_y_YH)
        products.add(0, x_YH, grad_pre_YD)
        return products.times_transposed(grad_pre_YD, 0)


class ComputeTime:
    """CPU seconds that the calling thread spends on expert compute in a stage. Intra-op threads and GPU work do not count."""

    def __init__(self) -> None:
        self.forward_s = self.backward_s = 0.0
        self.num_backward = 0

    def add(self, phase: Phase, seconds: float) -> None:
        """Adds time to a phase. Activation recomputation counts as backward, because it runs in the backward pass."""
        if phase == Phase.FORWARD:
            self.forward_s += seconds
        else:
            self.backward_s += seconds


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One row as seen by a rank, with all information that the backward pass needs to find the weights again."""

    micro_step: int
    layer: int
    num_S: list[int]  # pairs of every slot, which are contiguous
    shapes: tuple[tuple[int, ...], ...]  # shapes of an expert's tensors
    math: ExpertMath
    stage: Stage
    time: ComputeTime
    end_S: torch.Tensor  # int32 on the device, end of each slot's pairs
    num_base: int = 0  # number of base slots, whose memory belongs to the layer
    kept: dict[tuple[int, ...], list[Run]] = field(default_factory=dict)  # cached runs of slots

    @classmethod
    def of(
        cls, bank: ExpertBank, stage: Stage, time: ComputeTime, micro_step: int, layer: int, num_S: list[int],
        end_S: torch.Tensor | None = None,
    ) -> Self:  # fmt: skip
        """Returns the row of one layer of a bank. If `end_S` is None, it is computed from `num_S`."""
        ends = end_of_slots(num_S, bank.device) if end_S is None else end_S
        own = bank.num_base, bank.runs
        return cls(micro_step, layer, num_S, tuple(bank.shapes.values()), bank.math, stage, time, ends, *own)

    def runs(self, kind: int, tensors_S: Sequence[Tensors | None]) -> list[Run]:
        """Returns runs of slots for weights (kind 0) or gradients (kind 1), cached under the addresses of the redundant slots."""
        key = self.layer, kind, *(0 if tensors is None else tensors[0].data_ptr() for tensors in tensors_S[self.num_base :])
        if key not in self.kept:
            if len(self.kept) >= MOST_KEPT:  # many slots have more positions in a ring than are worth caching
                self.kept.clear()
            self.kept[key] = find_runs(tensors_S, self.shapes)
        return self.kept[key]


def end_of_slots(num_S: list[int], device: torch.device) -> torch.Tensor:
    """Returns the end position of each slot's pairs among all pairs sorted by slot, int32 [S]."""
    return torch.tensor(list(itertools.accumulate(num_S)), dtype=torch.int32).to(device)


class GroupedExperts(torch.autograd.Function):
    """Maps x_YH to y_YH, for all slots at once if possible and otherwise slot by slot.

    The forward pass saves its input, the tensors that the expert math returns, and the row's key, but no weights. The backward
    pass requests the weights again.
    """

    @staticmethod
    def forward(ctx: Any, x_YH: torch.Tensor, row: Row, phase: Phase) -> torch.Tensor:
        residency = row.stage.weights(row.micro_step, row.layer, phase)
        begin_s = time.thread_time()
        saved: list[torch.Tensor] = []
        if (products := _products(row, residency, x_YH)) is not None:
            y_YH, kept = SwiGLU()._forward_by(products, x_YH)
            saved += kept
        else:
            y_YH = torch.empty_like(x_YH)
            for s, pairs in _busy(row, residency):
                y_YH[pairs], kept = row.math.forward(x_YH[pairs], _reshape(residency.weights_S[s], row))
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
        if (products := _products(row, residency, x_YH)) is not None:
            grad_x_YH = SwiGLU()._backward_by(products, x_YH, saved, grad_YH.contiguous())
        else:
            grad_x_YH, busy = torch.empty_like(x_YH), _busy(row, residency)
            each = len(saved) // max(len(busy), 1)
            for i, (s, pairs) in enumerate(busy):
                weights, grads = _reshape(residency.weights_S[s], row), _reshape(residency.grads_S[s], row)
                kept = saved[i * each : (i + 1) * each]
                grad_x_YH[pairs] = row.math.backward(x_YH[pairs], kept, grad_YH[pairs], weights, grads)
        row.time.add(Phase.BACKWARD, time.thread_time() - begin_s)
        row.time.num_backward += 1
        row.stage.gradients(row.micro_step, row.layer)
        row.stage.release(row.micro_step, row.layer, Phase.BACKWARD)
        return grad_x_YH, None, None


def _busy(row: Row, residency: Residency) -> list[tuple[int, slice]]:
    """Returns the slots that have pairs, and the slices of these pairs."""
    found, end = [], 0
    for s, num in enumerate(row.num_S):
        if num:
            if residency.weights_S[s] is None:
                got = f"slot {s} got {num} pairs in micro-step {row.micro_step}, layer {row.layer}"
                raise TransferError(f"{got}, but the plan leaves it empty; give begin() the split of the plan that runs.")
            found.append((s, slice(end, end + num)))
        end += num
    return found


def _products(row: Row, residency: Residency, x_YH: torch.Tensor) -> SlotProducts | None:
    """Returns the products of all slots for `SwiGLU`, or None if they are not available."""
    if type(row.math) is not SwiGLU:
        return None
    return SlotProducts.of(residency, row, x_YH)


def _reshape(tensors: Tensors | None, row: Row) -> Tensors:
    assert tensors is not None
    return [tensor.view(shape) for tensor, shape in zip(tensors, row.shapes, strict=True)]
