"""Kernels of `Transitions`: plan a layer's micro-steps one after the other, each with what those before left in the buffers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.problem.rates import Rates, row_rates
from foremoe.solvers.order.keep import Buffers, Keeping, fill_row, held_of, level_row, may_serve, price_kept, put, use_buffers
from foremoe.solvers.rows import Placed, Rows, assign, copy_of, row_of
from foremoe.solvers.search.level import level_goal

# Letters: M micro-steps, L layers, N rows, G ranks, S slots per rank, R redundant slots, E experts, P buffers of a rank, X hints,
# O options of a slot.


class Walk(NamedTuple):
    """What the walk of every layer reads."""

    rows: Rows
    free: Rates  # rates with copies, gradients and replicas for nothing
    peer_s: float  # what its weights add to the price of a replica on peer links
    rdma_s: float  # the same on RDMA links
    invest: bool  # whether the first row takes the experts of the last hint whatever they cost, and nothing is taken back
    hint_XNGR: Array  # int16, experts that may be worth a slot, -1 none
    expert_NGS: Array  # int16, given placements
    quota_NGS: Array  # int32, their quotas


@kernel
def descend_row(best_s, keeping, buffer_GP, hint_XGR, best):
    """Gives one redundant slot after the other what its rank holds or a hint names, or nothing, where that is cheaper; in place.

    Returns the seconds of `best` after it; `best_s` are those before.
    """
    row, (G, S) = keeping.row, best.expert_GS.shape
    R, P = S - row.num_base, buffer_GP.shape[1]
    num_options = P + hint_XGR.shape[0] * R + 1
    tried, tried_O = copy_of(best), np.empty(num_options, np.int64)
    for g in range(G):
        for s in range(row.num_base, S):
            num = 0
            for o in range(num_options):
                e = np.int64(-1)
                if o < P:
                    e = np.int64(buffer_GP[g, o])
                elif o < num_options - 1:
                    e = np.int64(hint_XGR[(o - P) // R, g, (o - P) % R])
                if (tried_O[:num] == e).any() or (best.expert_GS[g, row.num_base :] == e).any():
                    continue
                if e >= 0 and not may_serve(g, e, row, S):
                    continue
                tried_O[num] = e
                num += 1
                assign(tried, best)
                put(g, s, e, row, row.located, tried)
                level_row(keeping.goal, row.num_base, tried)
                this_s = price_kept(keeping, buffer_GP, tried)
                if this_s < best_s:
                    best_s = this_s
                    assign(best, tried)
    return best_s


@kernel
def _plan_row(given_s, keeping, forced, buffer_GP, hint_XGR, best):
    """The cheapest of the given placement, what the buffers hold, and what `descend_row` makes of the cheaper one; in place.

    With `forced`, the last hint's experts are taken whatever they cost. Returns the seconds reached.
    """
    row, (G, S) = keeping.row, best.expert_GS.shape
    pick_GR, tried, best_s = np.empty((G, S - row.num_base), np.int64), copy_of(best), given_s
    if forced:
        pick_GR[:], best_s = hint_XGR[-1], np.inf
    else:
        held_of(row, S, buffer_GP, pick_GR)
    if (pick_GR >= 0).any():
        for nearer in (False, True):
            if nearer and not row.located:
                break
            fill_row(keeping, nearer, pick_GR, tried)
            this_s = price_kept(keeping, buffer_GP, tried)
            if this_s < best_s:
                best_s = this_s
                assign(best, tried)
    # What was forced costs more than nothing in this row, so it would be taken back.
    return best_s if forced else descend_row(best_s, keeping, buffer_GP, hint_XGR, best)


@kernel
def row_keeping(walk, n):
    """The `Keeping` of row `n`."""
    row = row_of(walk.rows, n, walk.expert_NGS[n])
    home_load_G = np.zeros(row.node_G.size, np.int64)
    for e in range(row.load_E.size):
        home_load_G[row.home_E[e] // walk.expert_NGS.shape[2]] += row.load_E[e]
    goal = level_goal(row.node_only, row.node_G, home_load_G)
    return Keeping(row, row_rates(walk.free, walk.rows.times, n), walk.peer_s, walk.rdma_s, goal)


@kernel
def walk_layer(row_M, start_GP, walk, expert_NGS, quota_NGS):
    """Plans the rows of one layer in their order.

    Where all rows so far cost more than as given, each with what the given ones before it leave, they are taken back. `start_GP`,
    int64, are the experts in a rank's buffers before the first row, -1 none; `expert_NGS` and `quota_NGS` are written.
    """
    num_base = walk.rows.num_base
    # What the given placements would leave in the buffers, and what those chosen leave.
    given_buffers = Buffers(start_GP.copy(), np.full(start_GP.shape, -1, np.int64))
    buffers = Buffers(start_GP.copy(), given_buffers.last_GP.copy())
    given_total_s, total_s = 0.0, 0.0
    for t in range(row_M.size):
        n = row_M[t]
        keeping = row_keeping(walk, n)
        given = Placed(walk.expert_NGS[n], walk.quota_NGS[n], walk.quota_NGS[n].astype(np.int64).sum(axis=1))
        given_total_s += price_kept(keeping, given_buffers.expert_GP, given)
        given_s = price_kept(keeping, buffers.expert_GP, given)
        best = Placed(expert_NGS[n], quota_NGS[n], given.load_G.copy())
        best.expert_GS[:], best.quota_GS[:] = given.expert_GS, given.quota_GS
        forced = walk.invest and t == 0 and (walk.hint_XNGR[-1, n] >= 0).any()
        total_s += _plan_row(given_s, keeping, forced, buffers.expert_GP, walk.hint_XNGR[:, n], best)
        use_buffers(t, num_base, given.expert_GS, given.quota_GS, given_buffers)
        use_buffers(t, num_base, best.expert_GS, best.quota_GS, buffers)
        if total_s > given_total_s and not walk.invest:
            for i in range(t + 1):
                expert_NGS[row_M[i]], quota_NGS[row_M[i]] = walk.expert_NGS[row_M[i]], walk.quota_NGS[row_M[i]]
            total_s = given_total_s
            buffers.expert_GP[:], buffers.last_GP[:] = given_buffers


@kernel
def distances(load_MLE, out_MM):
    """Fills `out_MM`: by how much the shares of experts differ between two micro-steps, summed over layers."""
    M, L, E = load_MLE.shape
    share_MLE = np.zeros((M, L, E))
    for m in range(M):
        for l in range(L):  # noqa: E741
            share_MLE[m, l] = load_MLE[m, l] / max(1, load_MLE[m, l].sum())
    for m in range(M):
        for k in range(m):
            total = 0.0
            for l in range(L):  # noqa: E741
                for e in range(E):
                    total += abs(share_MLE[m, l, e] - share_MLE[k, l, e])
            out_MM[m, k] = out_MM[k, m] = total


@kernel
def shortest_path(apart_MM):
    """int64 [M]: an order with little distance from each micro-step to the next: nearest neighbours from the best start, then
    stretches reversed while that helps (2-opt)."""
    M = apart_MM.shape[0]
    best_M, this_M, left_M = np.arange(M), np.arange(M), np.empty(M, np.bool_)
    least = np.inf
    for start in range(M):
        left_M[:] = True
        left_M[start], this_M[0], total = False, start, 0.0
        for t in range(1, M):
            nearest = -1
            for m in range(M):
                if left_M[m] and (nearest < 0 or apart_MM[this_M[t - 1], m] < apart_MM[this_M[t - 1], nearest]):
                    nearest = m
            total += apart_MM[this_M[t - 1], nearest]
            left_M[nearest], this_M[t] = False, nearest
        if total < least:
            least = total
            best_M[:] = this_M
    margin = 1e-9 * least
    improved = True
    while improved:
        improved = False
        for i in range(M):
            for j in range(i + 1, M):
                gain = 0.0
                if i > 0:
                    gain += apart_MM[best_M[i - 1], best_M[i]] - apart_MM[best_M[i - 1], best_M[j]]
                if j + 1 < M:
                    gain += apart_MM[best_M[j], best_M[j + 1]] - apart_MM[best_M[i], best_M[j + 1]]
                if gain > margin:
                    best_M[i : j + 1] = best_M[i : j + 1][::-1].copy()
                    improved = True
    return best_M
