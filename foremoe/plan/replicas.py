"""Replicas: slots of a plan that serve an expert on a rank other than its home."""

from typing import NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan

# Letters: Z replicas of the whole plan.


class Replicas(NamedTuple):
    """Slots that serve an expert whose home is on another rank, ordered by row, rank and slot. All arrays are int64 [Z]."""

    row_Z: Array  # m*L + l
    rank_Z: Array  # rank that holds the replica
    slot_Z: Array  # slot of the replica, which is redundant unless the plan moves homes
    expert_Z: Array
    home_Z: Array  # home rank of the expert

    @classmethod
    def of(cls, plan: Plan, counted_ML: Array | None = None) -> Self:
        """Returns the replicas of the rows that `counted_ML` (bool) selects, or of all rows by default."""
        served_NGS = plan.quota_NGS > 0
        if counted_ML is not None:
            served_NGS &= counted_ML.reshape(-1, 1, 1)
        row_X, rank_X, slot_X = np.nonzero(served_NGS)
        expert_X = plan.expert_NGS[row_X, rank_X, slot_X].astype(np.int64)
        home_X = plan.home_LE[row_X % plan.L, expert_X].astype(np.int64) // plan.B
        return cls(*(column_X[home_X != rank_X] for column_X in (row_X, rank_X, slot_X, expert_X, home_X)))
