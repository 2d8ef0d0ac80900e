"""Residency: what the slots of one rank hold during one use."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
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


class Residencies:
    """What the slots of a rank hold in the uses of one plan; what lies at home is looked up once.

    Attributes:
        replicas_ML: Whether a redundant slot of any rank serves pairs.
        homes: Tensors of base slots by layer, their gradients (True) or weights.
    """

    def __init__(self, plan: Plan, rank: int, buffers: Buffers, contents: SlotContents) -> None:
        self._rank, self._base, self._buffers, self._contents = rank, plan.B, buffers, contents
        served_MLGR = plan.quota_MLGS[:, :, :, plan.B :] > 0
        self.replicas_ML: Array = np.any(served_MLGR, axis=(2, 3))
        self._expert_MLS, self._served_MLR = plan.expert_MLGS[:, :, rank].tolist(), served_MLGR[:, :, rank].tolist()
        self.homes = dict[tuple[int, bool], tuple[Tensors, ...]]()

    def of(self, m: int, layer: int, phase: int, at_home: bool = False) -> Residency:
        """Reads off which tensors serve every slot in a use.

        Raises:
            TransferError: A backward or recomputation use lacks a replica that its forward used.
        """
        expert_S, served_R, rank = self._expert_MLS[m][layer], self._served_MLR[m][layer], self._rank
        expert_B, expert_R = expert_S[: self._base], expert_S[self._base :]
        expert_R = [e if served and not at_home else -1 for e, served in zip(expert_R, served_R, strict=True)]
        buffer_R = [self._contents.buffer_of.get((layer, e)) for e in expert_R]
        lacking = [e for e, buffer in zip(expert_R, buffer_R, strict=True) if e >= 0 and buffer is None]
        if lacking and phase != Phase.FORWARD:
            lost = f"the weights of expert {lacking[0]} of layer {layer} for the backward of micro-step {m}"
            raise TransferError(
                f"{lost} cannot be had on rank {rank}; no rank may take this optimizer step: end the job.", (rank,)
            )

        def tensors(gradients: bool) -> tuple[Tensors | None, ...]:
            of = self._buffers
            own, slot = (of.main_grad, of.slot_grad) if gradients else (of.home, of.slot)
            if (layer, gradients) not in self.homes:
                self.homes[layer, gradients] = tuple(own(layer, e) for e in expert_B)
            return *self.homes[layer, gradients], *(None if b is None else slot(b) for b in buffer_R)

        grads = tensors(True) if phase == Phase.BACKWARD else None
        return Residency((*expert_B, *expert_R), tensors(False), grads, not lacking)
