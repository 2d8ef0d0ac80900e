"""Residency: what the slots of one rank hold during one use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from foremoe.base.errors import TransferError
from foremoe.plan.plan import Plan
from foremoe.problem.schedule import Phase
from foremoe.transfer.base import Buffers, Tensors

# Letters: S slots of a rank, B base slots.


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """What this rank's slots hold during one use.

    Attributes:
        expert_S: Logical expert in every slot, -1 where the slot serves nothing.
        weights_S: Its tensors; None where the slot serves nothing, or its replica did not arrive.
        grads_S: In a backward use, where each slot's gradient is to be added; None in a forward use.
        complete: False if a replica did not arrive (forward uses only): the row must run at home placement on all ranks.
    """

    expert_S: tuple[int, ...]
    weights_S: tuple[Tensors | None, ...]
    grads_S: tuple[Tensors | None, ...] | None
    complete: bool


class SlotContents:
    """Which expert each buffer of this rank holds, as far as known.

    Attributes:
        expert_of: Buffer -> (layer, expert).
        buffer_of: (layer, expert) -> the buffer that it landed in last.
    """

    def __init__(self, expert_of: Mapping[int, tuple[int, int]]) -> None:
        self.expert_of = dict(expert_of)
        self.buffer_of = {key: buffer for buffer, key in expert_of.items()}

    def drop(self, buffer: int) -> None:
        """The buffer's contents are not known any more."""
        self.buffer_of.pop(self.expert_of.pop(buffer, (-1, -1)), None)

    def land(self, buffer: int, layer: int, expert: int) -> None:
        """An expert has arrived in a buffer."""
        self.expert_of[buffer] = layer, expert
        self.buffer_of[layer, expert] = buffer


def residency(
    plan: Plan,
    rank: int,
    buffers: Buffers,
    buffer_of: Mapping[tuple[int, int], int],
    m: int,
    layer: int,
    phase: int,
    at_home: bool,
) -> Residency:  # fmt: skip
    """Reads off which tensors serve every slot.

    Args:
        plan: Plan that runs.
        rank: This rank.
        buffers: Its experts and slots.
        buffer_of: (layer, expert) -> the buffer that holds it now.
        m: Micro-step.
        layer: Layer of the plan.
        phase: `Phase` of the use.
        at_home: The row runs without replicas.

    Raises:
        TransferError: A backward or re-forward use lacks a replica that its forward used.
    """
    base, quota_S = plan.B, plan.quota_MLGS[m, layer, rank].tolist()
    expert_S = [
        e if s < base or (quota_S[s] > 0 and not at_home) else -1 for s, e in enumerate(plan.expert_MLGS[m, layer, rank].tolist())
    ]
    weights: list[Tensors | None] = []
    grads: list[Tensors | None] = []
    for s, e in enumerate(expert_S):
        buffer = buffer_of.get((layer, e)) if s >= base and e >= 0 else None
        if s < base:
            weights.append(buffers.home(layer, e))
        else:
            weights.append(None if buffer is None else buffers.slot(buffer))
        if phase == Phase.BACKWARD:
            grad = None if buffer is None else buffers.slot_grad(buffer)
            grads.append(buffers.main_grad(layer, e) if s < base else grad)
    lacking = [e for s, e in enumerate(expert_S) if e >= 0 and weights[s] is None]
    if lacking and phase != Phase.FORWARD:
        raise TransferError(
            f"the weights of expert {lacking[0]} of layer {layer} for the backward of micro-step {m} cannot be had on rank "
            f"{rank}; drop this optimizer step and restart the engine.",
            (rank,),
        )
    return Residency(tuple(expert_S), tuple(weights), tuple(grads) if phase == Phase.BACKWARD else None, not lacking)
