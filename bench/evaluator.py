"""What a placement does to ranks and links, counted from its slots and quotas alone: none of the planner's code judges it."""

from __future__ import annotations

import numpy as np

from foremoe.base.arrays import Array
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, E experts, C copies.


def rank_loads(problem: Problem, placement: Placement, n: int) -> Array:
    """int64 [G]: pairs on every rank of row `n`; checks that every pair is served and every home in its place."""
    expert_GS, quota_GS = placement.expert_NGS[n], placement.quotas_NGS[n].astype(np.int64)
    held = expert_GS >= 0
    if (np.bincount(expert_GS[held], quota_GS[held], problem.E) != problem.load_NE[n]).any() or quota_GS[~held].any():
        raise AssertionError(f"row {n} does not serve every pair once.")
    slot_E = problem.home_LE[n % problem.L]
    if (expert_GS[slot_E // problem.B, slot_E % problem.B] != np.arange(problem.E)).any():
        raise AssertionError(f"row {n} moves a home.")
    loads: Array = quota_GS.sum(axis=1)
    return loads


def skew_N(problem: Problem, placement: Placement) -> Array:
    """float64 [N]: largest over mean rank load."""
    loads = [rank_loads(problem, placement, n) for n in range(problem.N)]
    return np.array([load_G.max() / load_G.mean() for load_G in loads])


def copies_N3(problem: Problem, placement: Placement) -> Array:
    """int64 [N, 3]: replicas, those in another node than their home, most copies out of one home rank."""
    node_G = problem.cluster.node_of_rank_G
    out = np.zeros((problem.N, 3), np.int64)
    for n in range(problem.N):
        replica_GR = placement.expert_NGS[n][:, problem.B :]
        rank_C, slot_C = np.nonzero(replica_GR >= 0)
        home_C = problem.home_LE[n % problem.L][replica_GR[rank_C, slot_C]] // problem.B
        out[n, 0], out[n, 1] = len(rank_C), (node_G[home_C] != node_G[rank_C]).sum()
        out[n, 2] = np.bincount(home_C, minlength=problem.G).max()
    return out
