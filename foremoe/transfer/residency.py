"""`Residency`: the content of a rank's slots during one use."""

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
    """Content of this rank's slots during one use."""

    expert_S: tuple[int, ...]  # logical expert in every slot, or -1 if the slot serves nothing
    weights_S: tuple[Tensors | None, ...]  # weights, or None if the slot serves nothing or its replica did not arrive
    grads_S: tuple[Tensors | None, ...] | None  # tensors to which each slot's gradient is added; None except in backward
    complete: bool  # False if a replica did not arrive in forward, so that the row must run at home on all ranks


class SlotContents:
    """The expert that each buffer of this rank holds, if known."""

    def __init__(self) -> None:
        self.expert_of = dict[int, tuple[int, int]]()  # buffer -> (layer, expert)
        self.buffer_of = dict[tuple[int, int], int]()  # (layer, expert) -> buffer of its latest copy

    def drop(self, buffer: int) -> None:
        """Marks the content of a buffer as unknown."""
        key = self.expert_of.pop(buffer, (-1, -1))
        if self.buffer_of.get(key) == buffer:  # a later copy may be in another buffer
            del self.buffer_of[key]

    def take(self, t: TransferList, copies: Iterable[int], missing: Container[int]) -> None:
        """Records that copies to this rank have arrived in their buffers, except for missing ones."""
        for c in copies:
            buffer, key = int(t.buffer_C[c]), (int(t.layer_C[c]), int(t.expert_C[c]))
            self.drop(buffer)
            self.buffer_of.pop(key, None)  # from here on, the plan relies on this copy
            if c not in missing:
                self.expert_of[buffer], self.buffer_of[key] = key, buffer


class Residencies:
    """Content of a rank's slots in the uses of one plan. The tensors of experts at home are looked up only once.

    Attributes:
        replicas_ML: For each row, whether a redundant slot of any rank serves pairs.
        homes: Tensors of the base slots, by layer and by kind (True for gradients, False for weights).
    """

    def __init__(self, plan: Plan, rank: int, buffers: Buffers, contents: SlotContents) -> None:
        self._rank, self._base, self._buffers, self._contents = rank, plan.B, buffers, contents
        served_MLGR = plan.quota_MLGS[:, :, :, plan.B :] > 0
        self.replicas_ML: Array = np.any(served_MLGR, axis=(2, 3))
        self._expert_MLS, self._served_MLR = plan.expert_MLGS[:, :, rank].tolist(), served_MLGR[:, :, rank].tolist()
        self.homes = dict[tuple[int, bool], tuple[Tensors, ...]]()

    def of(self, m: int, layer: int, phase: int, at_home: bool = False) -> Residency:
        """Returns the tensors of every slot in a use.

        Raises:
            TransferError: A replica that was used in forward is missing in backward or in recomputation.
        """
        expert_S, served_R, rank = self._expert_MLS[m][layer], self._served_MLR[m][layer], self._rank
        expert_B, expert_R = expert_S[: self._base], expert_S[self._base :]
        expert_R = [e if served and not at_home else -1 for e, served in zip(expert_R, served_R, strict=True)]
        buffer_R = [self._contents.buffer_of.get((layer, e)) for e in expert_R]
        lacking = [e for e, buffer in zip(expert_R, buffer_R, strict=True) if e >= 0 and buffer is None]
        if lacking and phase != Phase.FORWARD:
            lost = f"the weights of expert {lacking[0]} of layer {layer} for the backward of micro-step {m}"
            raise TransferError(
                f"{lost} are missing on rank {rank}; end the job, because no rank may take this optimizer step.", (rank,)
            )

        def tensors(gradients: bool) -> tuple[Tensors | None, ...]:
            of = self._buffers
            own, slot = (of.main_grad, of.slot_grad) if gradients else (of.home, of.slot)
            if (layer, gradients) not in self.homes:
                self.homes[layer, gradients] = tuple(own(layer, e) for e in expert_B)
            return *self.homes[layer, gradients], *(None if b is None else slot(b) for b in buffer_R)

        grads = tensors(True) if phase == Phase.BACKWARD else None
        return Residency((*expert_B, *expert_R), tensors(False), grads, not lacking)
