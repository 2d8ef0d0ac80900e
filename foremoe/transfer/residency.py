"""Residency: what the slots of one rank hold during one use."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from foremoe.base.errors import TransferError
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.problem.schedule import Phase
from foremoe.transfer.base import Buffers, Tensors

# Letters: S slots of a rank, B base slots, C copies of the whole plan.


@dataclass(frozen=True, slots=True, eq=False)
class Residency:
    """What this rank's slots hold during one use."""

    expert_S: tuple[int, ...]  # logical expert in every slot, -1 where the slot serves nothing
    weights_S: tuple[Tensors | None, ...]  # its tensors; None where the slot serves nothing, or its replica did not arrive
    grads_S: tuple[Tensors | None, ...] | None  # where each slot's gradient is to be added; None but in backward
    complete: bool  # False if a replica did not arrive (in forward): the row must run at home placement on all ranks


class SlotContents:
    """Which expert each buffer of this rank holds, as far as known."""

    def __init__(self) -> None:
        self.expert_of = dict[int, tuple[int, int]]()  # buffer -> (layer, expert)
        self.buffer_of = dict[tuple[int, int], int]()  # the buffer that it landed in last

    def drop(self, buffer: int) -> None:
        """The buffer's contents are not known any more."""
        key = self.expert_of.pop(buffer, (-1, -1))
        if self.buffer_of.get(key) == buffer:  # a later copy may lie in another buffer
            del self.buffer_of[key]

    def take(self, t: TransferList, copies: Iterable[int], missing: Container[int]) -> None:
        """Copies to this rank have arrived in their buffers, all but the missing."""
        for c in copies:
            buffer, key = int(t.buffer_C[c]), (int(t.layer_C[c]), int(t.expert_C[c]))
            self.drop(buffer)
            self.buffer_of.pop(key, None)  # from here on the plan counts on this copy
            if c not in missing:
                self.expert_of[buffer], self.buffer_of[key] = key, buffer


def residency(
    plan: Plan, rank: int, buffers: Buffers, contents: SlotContents, m: int, layer: int, phase: int, at_home: bool
) -> Residency:
    """Reads off which tensors serve every slot in a use.

    Raises:
        TransferError: A backward or recomputation use lacks a replica that its forward used.
    """
    base, quota_S = plan.B, plan.quota_MLGS[m, layer, rank].tolist()
    expert_S, weights, grads = [], list[Tensors | None](), list[Tensors | None]()
    for s, e in enumerate(plan.expert_MLGS[m, layer, rank].tolist()):
        if s < base:
            expert_S.append(e)
            weights.append(buffers.home(layer, e))
            grads.append(buffers.main_grad(layer, e) if phase == Phase.BACKWARD else None)
        else:
            expert_S.append(e if quota_S[s] > 0 and not at_home else -1)
            buffer = contents.buffer_of.get((layer, expert_S[s]))
            weights.append(None if buffer is None else buffers.slot(buffer))
            grads.append(None if buffer is None or phase != Phase.BACKWARD else buffers.slot_grad(buffer))
    lacking = [e for s, e in enumerate(expert_S) if e >= 0 and weights[s] is None]
    if lacking and phase != Phase.FORWARD:
        lost = f"the weights of expert {lacking[0]} of layer {layer} for the backward of micro-step {m}"
        raise TransferError(f"{lost} cannot be had on rank {rank}; no rank may take this optimizer step: end the job.", (rank,))
    return Residency(tuple(expert_S), tuple(weights), tuple(grads) if phase == Phase.BACKWARD else None, not lacking)
