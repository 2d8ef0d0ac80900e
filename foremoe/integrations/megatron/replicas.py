"""`Replicas`: forward and backward pass of a rank's redundant slots in one layer. Megatron itself computes the base slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from foremoe.base.errors import TransferError
from foremoe.problem.schedule import Phase
from foremoe.transfer.base import Tensors

if TYPE_CHECKING:
    from foremoe.integrations.megatron.experts import ExpertKind
    from foremoe.integrations.megatron.stage import MegatronStage

# Letters: Y pairs that a rank serves, sorted by slot; H hidden size; R redundant slots of a rank, B base slots.


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One layer of one micro-step on this rank, with all information that the backward pass needs to find the weights again.

    Attributes:
        num_R: Number of pairs of every redundant slot. The pairs of a slot are contiguous.
        settle: Whether gradients must be home after this row's backward pass, because they are reduced next.
    """

    stage: MegatronStage
    kind: ExpertKind
    micro_step: int
    layer: int
    phase: Phase
    num_R: list[int]
    settle: Callable[[], bool]

    def weights(self, phase: Phase) -> list[Tensors]:
        """Returns the tensors of the redundant slots. If a slot has no pairs, its tensors are arbitrary or missing."""
        found = self.stage.weights(self.micro_step, self.layer, phase).weights_S
        return self._filled(found[len(found) - len(self.num_R) :])

    def gradients(self) -> list[Tensors]:
        """Returns the tensors that accumulate the gradients of the redundant slots."""
        grads_S = self.stage.weights(self.micro_step, self.layer, Phase.BACKWARD).grads_S
        assert grads_S is not None
        return self._filled(grads_S[len(grads_S) - len(self.num_R) :])

    def _filled(self, tensors_R: Sequence[Tensors | None]) -> list[Tensors]:
        for r, (num, tensors) in enumerate(zip(self.num_R, tensors_R, strict=True)):
            if num and tensors is None:
                raise TransferError(
                    f"redundant slot {r} got {num} pairs in micro-step {self.micro_step}, layer {self.layer}, but the plan "
                    "leaves it empty; give every rank the split of the plan that runs."
                )
        return [tensors or () for tensors in tensors_R]


class Replicas(torch.autograd.Function):
    """Computes the outputs of the redundant slots and returns them together with the given outputs of the base slots.

    The forward pass keeps the replicas' autograd graph but not their weights. By the time of the backward pass, a slot may hold
    another expert. The graph therefore stores (slot, index), and the backward pass looks the weights up again. The output of the
    base slots is an input here, so the backward pass of the replicas runs first. With `Row.settle`, the replicas' gradients are
    home before autograd adds the base slots' gradients to the same parameters. Otherwise they are sent after the layer's last
    exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, base_YH: torch.Tensor, x_YH: torch.Tensor, probs_Y: torch.Tensor, anchor: torch.Tensor, row: Row, wanted: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.row, ctx.inner, output_YH = row, None, base_YH.new_empty(0, *base_YH.shape[1:])
        # autograd may save views of one tensor, so a copy is used, which does not change.
        if sum(row.num_R):
            weights_R = row.weights(row.phase)
            keys = _Keys(weights_R)
            x = x_YH.detach().requires_grad_(wanted)
            probs = probs_Y.detach().requires_grad_(wanted)
            leaves_R = [[w.detach().requires_grad_(wanted) for w in weights] for weights in weights_R]
            hooks = torch.autograd.graph.saved_tensors_hooks(keys.pack, lambda saved: _unpack(saved, row))
            # The buffers of the gradients are known only in backward, which sets these tensors then.
            sums_R = [[w.new_empty(0, dtype=torch.float32) for w in weights] for weights in weights_R]
            sums_R = sums_R if wanted and row.kind.fused else []
            with torch.set_grad_enabled(wanted), hooks:
                y = row.kind.compute(leaves_R, x, probs, row.num_R, sums_R or None)
            if wanted:
                ctx.inner = y, x, probs, leaves_R, sums_R
            output_YH = y.detach()
        return base_YH.view_as(base_YH), output_YH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_base_YH: torch.Tensor, grad_YH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        row: Row = ctx.row
        stage = row.stage
        stage.weights(row.micro_step, row.layer, Phase.BACKWARD)  # also without replicas here, to stay in step
        grad_x = grad_probs = None
        if ctx.inner is not None:
            y, x, probs, leaves_R, sums_R = ctx.inner
            ctx.inner = None
            busy, gradients_R = [r for r, num in enumerate(row.num_R) if num], row.gradients()
            for r in busy if sums_R else ():
                for total, gradient, shape in zip(sums_R[r], gradients_R[r], row.kind.shapes(), strict=True):
                    total.data = gradient.view(shape)
            leaves = [w for r in busy for w in leaves_R[r]]
            grad_x, grad_probs, *grads = torch.autograd.grad(y, [x, probs, *leaves], grad_YH.to(y.dtype), allow_unused=True)
            for total, grad in zip([g for r in busy for g in gradients_R[r]], grads, strict=True):
                if grad is not None:
                    total.add_(grad.reshape(-1))
        stage.gradients(row.micro_step, row.layer)
        if row.settle():
            stage.settle(row.layer)
        stage.release(row.micro_step, row.layer, Phase.BACKWARD)
        return grad_base_YH, grad_x, grad_probs, None, None, None


@dataclass(frozen=True, slots=True)
class _Saved:
    """Location of a slot's weights or a view of them. It is saved for backward in place of the tensor."""

    slot: int
    tensor: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Keys:
    """Identifies the weights of a row's redundant slots by their memory."""

    def __init__(self, weights_R: Sequence[Tensors]) -> None:
        self._known = [
            (w.untyped_storage().data_ptr(), int(w.storage_offset()), w.numel(), slot, i)
            for slot, weights in enumerate(weights_R)
            for i, w in enumerate(weights)
        ]

    def pack(self, saved: torch.Tensor) -> torch.Tensor | _Saved:
        pointer, offset = saved.untyped_storage().data_ptr(), saved.storage_offset()
        for known, begin, num, slot, i in self._known:
            if pointer == known and begin <= offset < begin + num:
                return _Saved(slot, i, saved.size(), saved.stride(), int(offset) - begin)
        return saved


def _unpack(saved: torch.Tensor | _Saved, row: Row) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    weight = row.weights(Phase.BACKWARD)[saved.slot][saved.tensor]
    return weight.as_strided(saved.size, saved.stride, weight.storage_offset() + saved.offset)
