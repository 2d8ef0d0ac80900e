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


Homes = dict[tuple[int, bool], tuple[Tensors, ...]]  # (layer, gradients or weights) -> those of its base slots


def residency(
    plan: Plan, rank: int, buffers: Buffers, contents: SlotContents, m: int, layer: int, phase: int, at_home: bool, homes: Homes
) -> Residency:
    """Reads off which tensors serve every slot in a use.

    Args:
        homes: Base slots that were looked up in an earlier use of the plan, to which this one's are added.

    Raises:
        TransferError: A backward or recomputation use lacks a replica that its forward used.
    """
    expert_S, quota_R = plan.expert_MLGS[m, layer, rank].tolist(), plan.quota_MLGS[m, layer, rank, plan.B :].tolist()
    expert_B, backward = expert_S[: plan.B], phase == Phase.BACKWARD
    expert_R = [e if quota > 0 and not at_home else -1 for e, quota in zip(expert_S[plan.B :], quota_R, strict=True)]
    buffer_R = [contents.buffer_of.get((layer, e)) for e in expert_R]
    lacking = [e for e, buffer in zip(expert_R, buffer_R, strict=True) if e >= 0 and buffer is None]
    if lacking and phase != Phase.FORWARD:
        lost = f"the weights of expert {lacking[0]} of layer {layer} for the backward of micro-step {m}"
        raise TransferError(f"{lost} cannot be had on rank {rank}; no rank may take this optimizer step: end the job.", (rank,))

    def tensors(gradients: bool) -> tuple[Tensors | None, ...]:
        at_home, in_buffer = (buffers.main_grad, buffers.slot_grad) if gradients else (buffers.home, buffers.slot)
        if (layer, gradients) not in homes:
            homes[layer, gradients] = tuple(at_home(layer, e) for e in expert_B)
        return *homes[layer, gradients], *(None if buffer is None else in_buffer(buffer) for buffer in buffer_R)

    return Residency((*expert_B, *expert_R), tensors(False), tensors(True) if backward else None, not lacking)
