"""Explains why rows have no copies, by the predicted saving and cost of the best single copy for each row."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import price
from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, E experts, S slots, W rows without replicas.

HOTTEST = 2  # number of experts of the busiest rank to try


class BestCopies(NamedTuple):
    """The best copy for every row without copies. The destination is the least loaded rank of the same node or of all nodes.

    Rows in which no pairs could move are left out.
    """

    row_W: Array
    expert_W: Array
    from_W: Array  # home rank
    to_W: Array
    quota_W: Array  # pairs that would move
    saved_s_W: Array  # seconds of dispatch, experts and combine
    cost_s_W: Array  # seconds of exposed weights and gradients


def best_copies(problem: Problem, plan: Plan) -> BestCopies:
    """Returns the best copy for every row of `plan` without replicas. The result is empty if no copies are possible."""
    idle_N = ~(plan.quota_NGS[:, :, plan.B :] > 0).any(axis=(1, 2))
    none = BestCopies(*np.zeros((5, 0), np.int64), *np.zeros((2, 0)))
    if not plan.executable or plan.S == plan.B or plan.G == 1 or not idle_N.any():
        return none
    static = problem.static()
    load_NG, rows_N = static.load_NG(), np.arange(problem.N)
    from_N, before = load_NG.argmax(axis=1), price(problem, static)
    node_G = problem.cluster.node_of_rank_G
    near_NG = np.where(node_G[from_N][:, None] == node_G, load_NG, np.iinfo(np.int64).max)
    base_NB = static.quotas_NGS[rows_N, from_N, : plan.B]
    tried = []
    for slot_N in np.argsort(-base_NB, axis=1, kind="stable")[:, :HOTTEST].T:
        for to_N in (near_NG.argmin(axis=1), load_NG.argmin(axis=1)):
            spare_N = (load_NG[rows_N, from_N] - load_NG[rows_N, to_N]) // 2
            quota_N = np.minimum(spare_N, base_NB[rows_N, slot_N])
            expert_N = static.expert_NGS[rows_N, from_N, slot_N]
            copied = _copied(static, plan.B, (from_N, slot_N, to_N, expert_N, quota_N))
            after = price(problem, copied)
            saved_N = sum(before.parts()[name] - after.parts()[name] for name in ("dispatch_s", "compute_s", "combine_s"))
            cost_N = after.transfer_s + after.gradient_s - before.transfer_s - before.gradient_s
            tried.append((expert_N, from_N, to_N, quota_N, saved_N, cost_N))
    columns = [np.stack(column) for column in zip(*tried, strict=True)]
    best_N = np.where(columns[3] > 0, columns[4] - columns[5], -np.inf).argmax(axis=0)
    picked = [column[best_N, rows_N] for column in columns]
    kept_N = idle_N & (picked[3] > 0)
    return BestCopies(rows_N[kept_N], *(column[kept_N] for column in picked))


def _copied(static: Placement, B: int, copies: tuple[Array, Array, Array, Array, Array]) -> Placement:
    """Returns the placement with one copy in every row that moves pairs, in the first redundant slot of its rank."""
    from_N, slot_N, to_N, expert_N, quota_N = copies
    rows_N = np.flatnonzero(quota_N > 0)
    expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
    expert_NGS[rows_N, to_N[rows_N], B] = expert_N[rows_N]
    quota_NGS[rows_N, to_N[rows_N], B] = quota_N[rows_N]
    quota_NGS[rows_N, from_N[rows_N], slot_N[rows_N]] -= quota_N[rows_N].astype(np.int32)
    return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
