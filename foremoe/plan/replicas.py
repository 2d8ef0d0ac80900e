"""Replicas: the slots of a plan that serve an expert away from its home."""

from typing import NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.problem.schedule import Phase
from foremoe.problem.slots import ResidentSlots

# Letters: Z replicas of the whole plan, N rows, C copies, U uses.


class Replicas(NamedTuple):
    """Slots with a quota off their expert's home rank, by row, then rank, then slot; all int64 [Z]."""

    row_Z: Array  # m*L + l
    rank_Z: Array  # that holds the replica
    slot_Z: Array  # redundant, unless the plan moves homes
    expert_Z: Array
    home_Z: Array  # home rank of the expert

    @classmethod
    def of(cls, plan: Plan, counted_ML: Array | None = None) -> Self:
        """The replicas of the rows that count (bool [M, L]; default: all)."""
        served_NGS = plan.quota_NGS > 0
        if counted_ML is not None:
            served_NGS &= counted_ML.reshape(-1, 1, 1)
        row_X, rank_X, slot_X = np.nonzero(served_NGS)
        expert_X = plan.expert_NGS[row_X, rank_X, slot_X].astype(np.int64)
        home_X = plan.home_LE[row_X % plan.L, expert_X].astype(np.int64) // plan.B
        return cls(*(column_X[home_X != rank_X] for column_X in (row_X, rank_X, slot_X, expert_X, home_X)))

    def take(self, index_Z: Array) -> Self:
        """The replicas that an index or mask selects."""
        return type(self)(*(column_Z[index_Z] for column_Z in self))


class Lives(NamedTuple):
    """Which replicas add up to one gradient: it goes home once, after the last backward before its weights are sent again.

    In shared slots every row's gradients go home; in resident slots those of several micro-steps are summed in the slot before.
    """

    replicas: Replicas  # of rows with a backward
    at_Z: Array  # position of that backward among the uses, int64
    end_Z: Array  # number of the replica with whose backward the gradient is complete, int64

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Those of a plan, by row, then rank, then slot."""
        uses = plan.header.schedule.uses(plan.L)
        at_N, backward_U = np.full(plan.N, -1, np.int64), uses.phase_U == Phase.BACKWARD
        row_U = plan.order_M[uses.micro_step_U].astype(np.int64) * plan.L + uses.layer_U
        at_N[row_U[backward_U]] = uses.use_U[backward_U]
        replicas = Replicas.of(plan, (at_N >= 0).reshape(plan.M, plan.L))
        at_Z, end_Z = at_N[replicas.row_Z], np.arange(len(replicas.row_Z))
        if isinstance(plan.header.slots, ResidentSlots) and len(end_Z):
            t, span = plan.transfers, len(row_U) + 1
            layer_Z = replicas.row_Z % plan.L
            key_C = ((t.dst_C.astype(np.int64) * plan.L + t.layer_C) * plan.E + t.expert_C) * span + t.need_C
            key_Z = (replicas.rank_Z * plan.L + layer_Z) * plan.E + replicas.expert_Z
            order_Z = np.argsort(key_Z * span + at_Z)
            key_I, sent_I = key_Z[order_Z], np.searchsorted(np.sort(key_C), (key_Z * span + at_Z)[order_Z], side="right")
            last_I = np.append((key_I[1:] != key_I[:-1]) | (sent_I[1:] != sent_I[:-1]), True)
            end_Z[order_Z] = order_Z[np.flatnonzero(last_I)[np.cumsum(last_I) - last_I]]
        return cls(replicas, at_Z, end_Z)

    def returned(self) -> Replicas:
        """The replicas after whose backward gradients go home."""
        return self.replicas.take(self.end_Z == np.arange(len(self.end_Z)))
