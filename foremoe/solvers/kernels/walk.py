"""Kernels of `Transitions`: plan a layer's micro-steps one after the other, each with what those before left in the buffers."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.chain import level_goal
from foremoe.solvers.kernels.keep import fill_row, held_of, level_row, may_serve, price_kept, put, use_buffers
from foremoe.solvers.kernels.price import COPY_PEER, REPLICA_RDMA, demand_row

# Letters: M micro-steps, N rows, G ranks, S slots per rank, R redundant slots, E experts, V nodes, P buffers of a rank, X hints,
# O options of a slot, K rates.


@kernel
def descend_row(  # type: ignore[no-untyped-def]
    start_s, goal, load_E, load_GE, demand_VE, node_G, node_only, num_base, rate_K, free_K, weight_2, home_E, busy_G, buffer_GP,
    hint_XGR, expert_GS, quota_GS, load_G,
):  # fmt: skip
    """Gives one redundant slot after the other what its rank holds or a hint names, or nothing, where that is cheaper; in place.

    Returns:
        the price reached.
    """
    G, S = expert_GS.shape
    R, P = S - num_base, buffer_GP.shape[1]
    num_options = P + hint_XGR.shape[0] * R + 1
    try_expert_GS, try_quota_GS, try_load_G = np.empty_like(expert_GS), np.empty_like(quota_GS), np.empty_like(load_G)
    tried_O = np.empty(num_options, np.int64)
    best_s = start_s
    for g in range(G):
        for s in range(num_base, S):
            num = 0
            for o in range(num_options):
                e = np.int64(-1)
                if o < P:
                    e = np.int64(buffer_GP[g, o])
                elif o < num_options - 1:
                    e = np.int64(hint_XGR[(o - P) // R, g, (o - P) % R])
                if (tried_O[:num] == e).any() or (expert_GS[g, num_base:] == e).any():
                    continue
                if e >= 0 and not may_serve(g, e, load_E, node_only, node_G, S, home_E):
                    continue
                tried_O[num] = e
                num += 1
                try_expert_GS[:], try_quota_GS[:], try_load_G[:] = expert_GS, quota_GS, load_G
                put(g, s, e, demand_VE, node_G, home_E, try_expert_GS, try_quota_GS, try_load_G)
                level_row(goal, num_base, try_expert_GS, try_quota_GS, try_load_G)
                this_s = price_kept(
                    load_GE, demand_VE, node_G, num_base, rate_K, free_K, weight_2, home_E, busy_G, buffer_GP, try_expert_GS,
                    try_quota_GS, try_load_G,
                )  # fmt: skip
                if this_s < best_s:
                    best_s = this_s
                    expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
    return best_s


@kernel
def walk_layer(  # type: ignore[no-untyped-def]
    row_M, invest, load_NE, load_NGE, located, node_G, node_only, num_base, rate_NK, weight_2, start_GP, hint_XNGR,
    given_expert_NGS, given_quota_NGS, expert_NGS, quota_NGS,
):  # fmt: skip
    """Plans the rows of one layer in their order; writes them to `expert_NGS` and `quota_NGS`.

    Each row takes the cheapest of its given placement, what the buffers hold, and what `descend_row` makes of the cheaper one.
    Where all rows so far cost more than as given, each with what the given ones before it leave, they are taken back.

    Args:
        row_M: int64, the layer's rows in their order.
        invest: the first row takes the experts of the last hint whatever they cost, and nothing is taken back.
        rate_NK: see `price`.   weight_2: see `price_kept`.
        start_GP: int64, the experts in a rank's buffers before the first row, -1 none.
        hint_XNGR: int16, experts that may be worth a slot, -1 none.
    """
    G, S = given_expert_NGS.shape[1], given_expert_NGS.shape[2]
    R, E, P = S - num_base, load_NE.shape[1], start_GP.shape[1]
    home_E, busy_G, home_load_G = np.empty(E, np.int64), np.empty(G, np.int64), np.empty(G, np.int64)
    # What the given placements would leave in the buffers, and what those found leave.
    given_buffer_GP, given_last_GP = start_GP.copy(), np.full((G, P), -1, np.int64)
    buffer_GP, last_GP = start_GP.copy(), np.full((G, P), -1, np.int64)
    given_total_s, total_s = 0.0, 0.0
    none_GE = np.empty((0, 0), np.int32)
    none_VE, demand_VE = np.empty((0, E), np.int64), np.empty((node_G.max() + 1 if located else 0, E), np.int64)
    pick_GR, load_G, given_load_G = np.empty((G, R), np.int64), np.empty(G, np.int64), np.empty(G, np.int64)
    try_expert_GS, try_quota_GS, try_load_G = np.empty((G, S), np.int16), np.empty((G, S), np.int32), np.empty(G, np.int64)
    for t in range(row_M.size):
        n = row_M[t]
        rate_K, load_E, expert_GS, quota_GS = rate_NK[n], load_NE[n], expert_NGS[n], quota_NGS[n]
        given_expert_GS, given_quota_GS = given_expert_NGS[n], given_quota_NGS[n]
        free_K = rate_K.copy()
        free_K[COPY_PEER : REPLICA_RDMA + 1] = 0.0
        load_GE = none_GE
        if located:
            load_GE = load_NGE[n]
            demand_row(load_GE, node_G, demand_VE)
        busy_G[:], home_load_G[:] = 0, 0
        for g in range(G):
            given_load_G[g] = given_quota_GS[g].sum()
            for b in range(num_base):
                e = given_expert_GS[g, b]
                home_E[e] = g * S + b
                busy_G[g] += load_E[e] > 0
                home_load_G[g] += load_E[e]
        goal = level_goal(0.0, node_only, node_G, home_load_G)
        given_total_s += price_kept(
            load_GE, demand_VE, node_G, num_base, rate_K, free_K, weight_2, home_E, busy_G, given_buffer_GP, given_expert_GS,
            given_quota_GS, given_load_G,
        )  # fmt: skip
        given_s = price_kept(
            load_GE, demand_VE, node_G, num_base, rate_K, free_K, weight_2, home_E, busy_G, buffer_GP, given_expert_GS,
            given_quota_GS, given_load_G,
        )  # fmt: skip
        forced = invest and t == 0 and (hint_XNGR[-1, n] >= 0).any()
        best_s = np.inf if forced else given_s
        expert_GS[:], quota_GS[:], load_G[:] = given_expert_GS, given_quota_GS, given_load_G
        if forced:
            pick_GR[:] = hint_XNGR[-1, n]
        else:
            held_of(load_E, node_only, node_G, S, home_E, buffer_GP, pick_GR)
        if (pick_GR >= 0).any():
            for nearer in range(2 if located else 1):
                try_expert_GS[:] = given_expert_GS
                wish_VE = demand_VE if nearer == 1 else none_VE
                fill_row(goal, load_E, wish_VE, node_G, num_base, home_E, pick_GR, try_expert_GS, try_quota_GS, try_load_G)
                this_s = price_kept(
                    load_GE, demand_VE, node_G, num_base, rate_K, free_K, weight_2, home_E, busy_G, buffer_GP, try_expert_GS,
                    try_quota_GS, try_load_G,
                )  # fmt: skip
                if this_s < best_s:
                    best_s = this_s
                    expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
        best_s = descend_row(
            best_s, goal, load_E, load_GE, demand_VE, node_G, node_only, num_base, rate_K, free_K, weight_2, home_E, busy_G,
            buffer_GP, hint_XNGR[:, n], expert_GS, quota_GS, load_G,
        )  # fmt: skip
        total_s += best_s
        use_buffers(t, num_base, given_expert_GS, given_quota_GS, given_buffer_GP, given_last_GP)
        use_buffers(t, num_base, expert_GS, quota_GS, buffer_GP, last_GP)
        if total_s > given_total_s and not invest:
            for i in range(t + 1):
                expert_NGS[row_M[i]], quota_NGS[row_M[i]] = given_expert_NGS[row_M[i]], given_quota_NGS[row_M[i]]
            total_s = given_total_s
            buffer_GP[:], last_GP[:] = given_buffer_GP, given_last_GP


@kernel
def distances(load_MLE, out_MM):  # type: ignore[no-untyped-def]
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
def shortest_path(apart_MM):  # type: ignore[no-untyped-def]
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
