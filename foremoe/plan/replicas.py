"""Replicas: the slots of a plan that serve an expert away from its home."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan

# Letters: Z replicas of the whole plan.


class Replicas(NamedTuple):
    """Redundant slots with a quota, by row, then rank, then slot; all int64 [Z]."""

    micro_step_Z: Array
    layer_Z: Array
    rank_Z: Array  # that holds the replica
    slot_Z: Array  # redundant slot, from 0
    expert_Z: Array
    home_Z: Array  # home rank of the expert

    @staticmethod
    def of(plan: Plan, counted_ML: Array | None = None) -> Replicas:
        """The replicas of the rows that count (bool [M, L]; default: all)."""
        used_MLGR = plan.quota_MLGS[..., plan.B :] > 0
        if counted_ML is not None:
            used_MLGR &= counted_ML[..., None, None]
        m_Z, layer_Z, rank_Z, slot_Z = np.nonzero(used_MLGR)
        expert_Z = plan.expert_MLGS[m_Z, layer_Z, rank_Z, plan.B + slot_Z].astype(np.int64)
        home_Z = plan.home_LE[layer_Z, expert_Z].astype(np.int64) // plan.B
        return Replicas(m_Z, layer_Z, rank_Z, slot_Z, expert_Z, home_Z)
