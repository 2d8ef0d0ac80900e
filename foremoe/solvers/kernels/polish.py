"""Tabu search over the replicas of a row, judged by bounds: for rows so small that every change can be tried at every step."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.price import PAIR, SLOT, demand_row, exposed_s, price_row
from foremoe.solvers.kernels.quota_flow import cheapest_flow
from foremoe.solvers.kernels.replica_bounds import Bounds, Held, hold, renew, renew_two, replica_s, row_of
from foremoe.solvers.kernels.replica_changes import best_change, fans_s, make_change, random

# Letters: G ranks, R redundant slots per rank, S slots per rank, E experts, J experts with replicas, V nodes, I choices,
# K bounds (rate_K: rates).

# Bounds kept beside the G + 1 that every row starts with; the oldest gives way.
NUM_BOUNDS = 19
# Steps without a cheaper placement before the search goes on from elsewhere.
PATIENCE = 30


@kernel
def set_quotas(row, expert_GR, slot_E, expert_GS, quota_GS, load_G, price_s_G):  # type: ignore[no-untyped-def]
    """Writes replicas with their cheapest quotas, in whole pairs, into a placement; a replica without pairs leaves it.

    Args:
        price_s_G: filled with the prices of `cheapest_flow`.
    """
    G, R = expert_GR.shape
    S = expert_GS.shape[1]
    slot = row.rate_K[SLOT] / row.rate_K[PAIR]
    expert_J, at_JG, num = np.empty(G * R, np.int64), np.zeros((G * R, G), np.bool_), 0
    index_E = np.full(row.home_E.size, -1, np.int64)
    flow_load_G = slot * row.busy_G
    load_G[:] = 0
    for e in range(row.home_E.size):
        load_G[row.home_E[e]] += row.load_E[e]
        quota_GS[slot_E[e] // S, slot_E[e] % S] = row.load_E[e]
    flow_load_G += load_G
    for r in range(G):
        for e in expert_GR[r]:
            if e < 0:
                continue
            if index_E[e] < 0:
                index_E[e], expert_J[num] = num, e
                at_JG[num, row.home_E[e]] = True
                flow_load_G[row.home_E[e]] -= row.load_E[e]
                num += 1
            at_JG[index_E[e], r] = True
            flow_load_G[r] += slot
    flow_JGG = np.empty((num, G, G))
    cheapest_flow(
        row.pairs_EG, row.link_GG, row.rate_K[PAIR], row.home_E, expert_J[:num], at_JG[:num], flow_JGG, flow_load_G, price_s_G
    )  # fmt: skip
    for r in range(G):
        for i in range(R):
            e, s = expert_GR[r, i], S - R + i
            expert_GS[r, s], quota_GS[r, s] = -1, 0
            if e < 0:
                continue
            h, b = slot_E[e] // S, slot_E[e] % S
            amount = min(np.int64(np.round(flow_JGG[index_E[e], :, r].sum())), np.int64(quota_GS[h, b]))
            if amount > 0:
                expert_GS[r, s], quota_GS[r, s] = e, amount
                quota_GS[h, b] -= amount
                load_G[h] -= amount
                load_G[r] += amount


@kernel
def _price_s(row, held, bounds, num):  # type: ignore[no-untyped-def]
    """The largest bound and all copies."""
    price_s = bounds.total_s_K[:num].max() + fans_s(held.fan_4G, row.rate_K, 0.0)
    for r in range(held.expert_GR.shape[0]):
        for e in held.expert_GR[r]:
            price_s += replica_s(row.home_E, row.node_G, row.rate_K, e, r)
    return price_s


@kernel
def _free_levels(row, num_redundant):  # type: ignore[no-untyped-def]
    """Seconds of copies that restarts leave out of account: nothing, and what few copies through one rank leave exposed.

    A first copy may cost far more than it saves and make room for others at no price at all.
    """
    level_I = [0.0]
    for num in range(1, num_redundant + 2):
        for level_s in (exposed_s(num, 0, row.rate_K), exposed_s(0, num, row.rate_K)):
            if level_s not in level_I:
                level_I.append(level_s)
    return level_I


@kernel
def polish_row(  # type: ignore[no-untyped-def]
    steps, load_E, load_GE, demand_VE, node_G, node_only, num_base, rate_K, slot_E, busy_G, expert_GS, quota_GS, load_G
):
    """Searches for cheaper replicas and quotas, in place. Returns the price reached, which is never above that of the start.

    Each step makes the change of one slot, or of two, that prices least by `Bounds`, better or not, and bars its return. What
    the bounds hold cheaper than the best so far gets its cheapest quotas and is priced for certain; the prices of ranks that
    come with them are one more bound, so no set of replicas is underrated twice. Where that has not helped for `PATIENCE` steps
    the search goes on from the best with about half of its replicas.
    """
    G, S = expert_GS.shape
    R, E = S - num_base, load_E.size
    best_s = price_row(load_GE, demand_VE, node_G, num_base, rate_K, slot_E, busy_G, expert_GS, quota_GS, load_G)
    row = row_of(load_E, load_GE, node_G, S, rate_K, slot_E, busy_G)
    # A change has to save a hundred-thousandth of the row's balanced compute, far above rounding.
    least_s = 1e-5 * rate_K[PAIR] * load_G.sum() / G
    if R == 0 or G == 1 or least_s == 0.0:
        return best_s
    most = G + 1 + NUM_BOUNDS
    bounds = Bounds(
        np.zeros((G, most)), np.zeros((E, most)), np.zeros((E + 1, G, most)), np.zeros((G * R + 1, G, most)), np.zeros(most)
    )  # fmt: skip
    bounds.price_s_GK[:, G] = rate_K[PAIR] / G
    for g in range(G):
        bounds.price_s_GK[g, g] = rate_K[PAIR]
    num, oldest = G + 1, G + 1
    best_GR = np.full((G, R), -1, np.int64)
    for r in range(G):
        for i in range(R):
            if quota_GS[r, num_base + i] > 0:
                best_GR[r, i] = expert_GS[r, num_base + i]
    held = Held(best_GR.copy(), np.zeros((E, G), np.bool_), np.zeros((4, G), np.int64))
    hold(row, best_GR, held)
    renew(row, held, 0, num, bounds)
    try_expert_GS, try_quota_GS, try_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
    price_s_G, until_EG, choice_5 = np.empty(G), np.zeros((E, G), np.int64), np.empty(5, np.int64)
    state_1 = np.array([88172645463325252], np.uint64)
    level_I = _free_levels(row, R)
    waited, restarts = 0, 0
    for t in range(steps):
        if t == 0 or _price_s(row, held, bounds, num) < best_s - least_s:
            set_quotas(row, held.expert_GR, slot_E, try_expert_GS, try_quota_GS, try_load_G, price_s_G)
            if num < most:
                oldest, num = num, num + 1
            else:
                oldest = oldest + 1 if oldest + 1 < most else G + 1
            bounds.price_s_GK[:, oldest] = price_s_G
            renew(row, held, oldest, oldest + 1, bounds)
            this_s = price_row(
                load_GE, demand_VE, node_G, num_base, rate_K, slot_E, busy_G, try_expert_GS, try_quota_GS, try_load_G
            )  # fmt: skip
            if this_s < best_s - least_s:
                best_s, waited = this_s, 0
                best_GR[:] = held.expert_GR
                expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
        waited += 1
        choice_5[0] = -1
        if waited <= PATIENCE:
            free_s = level_I[restarts % len(level_I)]
            best_change(row, held, bounds, num, node_only, free_s, best_s - least_s, until_EG, t, choice_5)
        if choice_5[0] >= 0:
            old = make_change(row, held, choice_5, t, state_1, until_EG)
            renew_two(row, held, old, choice_5[2], num, bounds)
            continue
        waited, restarts = 0, restarts + 1
        start_GR = best_GR.copy()
        for r in range(G):
            for i in range(R):
                if random(state_1, 2) == 0:
                    start_GR[r, i] = -1
        hold(row, start_GR, held)
        renew(row, held, 0, num, bounds)
        until_EG[:] = 0
    return best_s


@kernel
def polish_rows(  # type: ignore[no-untyped-def]
    low, high, steps, load_NE, load_NGE, located, node_G, node_only, num_base, rate_NK, expert_NGS, quota_NGS
):
    """`polish_row` for rows [low, high)."""
    G, S = expert_NGS.shape[1], expert_NGS.shape[2]
    slot_E, busy_G = np.empty(load_NE.shape[1], np.int64), np.empty(G, np.int64)
    none_GE, none_VE = np.empty((0, 0), np.int32), np.empty((0, 0), np.int64)
    for n in range(low, high):
        load_G = np.zeros(G, np.int64)
        busy_G[:] = 0
        for g in range(G):
            for s in range(S):
                load_G[g] += quota_NGS[n, g, s]
                if s < num_base:
                    slot_E[expert_NGS[n, g, s]] = g * S + s
                    busy_G[g] += load_NE[n, expert_NGS[n, g, s]] > 0
        load_GE, demand_VE = none_GE, none_VE
        if located:
            load_GE, demand_VE = load_NGE[n], np.empty((node_G.max() + 1, load_NE.shape[1]), np.int64)
            demand_row(load_GE, node_G, demand_VE)
        polish_row(
            steps, load_NE[n], load_GE, demand_VE, node_G, node_only, num_base, rate_NK[n], slot_E, busy_G, expert_NGS[n],
            quota_NGS[n], load_G,
        )  # fmt: skip
