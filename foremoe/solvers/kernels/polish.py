"""Tabu search over the replicas of a row, judged by bounds: for rows so small that every change can be tried at every step."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.base.random import random_below
from foremoe.problem.rates import exposed_s
from foremoe.solvers.kernels.price import price_row
from foremoe.solvers.kernels.quota_flow import cheapest_quotas
from foremoe.solvers.kernels.replica_bounds import Bounds, Held, case_of, hold, renew, renew_two, replica_s
from foremoe.solvers.kernels.replica_changes import Change, Step, best_change, fans_s, make_change
from foremoe.solvers.kernels.rows import Placed, assign, copy_of, row_of

# Letters: G ranks, R redundant slots per rank, S slots per rank, E experts, I choices, K bounds.

# Bounds kept besides the G + 1 that every row starts with; the oldest gives way.
NUM_BOUNDS = 19
# Steps without a cheaper placement before the search goes on from elsewhere.
PATIENCE = 30


@kernel
def set_quotas(row, expert_GR, placed, price_s_G):
    """Writes replicas (-1: none) with their `cheapest_quotas` into a placement; `price_s_G` gets the prices."""
    placed.expert_GS[:, row.num_base :] = expert_GR
    cheapest_quotas(row, placed, price_s_G)


@kernel
def _price_s(case, held, bounds, num):
    """The largest bound and all copies."""
    price_s = bounds.total_s_K[:num].max() + fans_s(held.fan_4G, case.rates, 0.0)
    for r in range(held.expert_GR.shape[0]):
        for e in held.expert_GR[r]:
            price_s += replica_s(case, e, r)
    return price_s


@kernel
def _free_levels(rates, num_redundant):
    """Seconds of copies that restarts leave out of account: nothing, and what few copies through one rank leave exposed.

    A first copy may cost far more than it saves and make room for others at no price at all.
    """
    level_I = [0.0]
    for num in range(1, num_redundant + 2):
        for level_s in (exposed_s(num, 0, rates), exposed_s(0, num, rates)):
            if level_s not in level_I:
                level_I.append(level_s)
    return level_I


@kernel
def _begin(case, placed, num_base):
    """Replicas with a quota as `Held`, and `Bounds` with the G + 1 that every row starts with."""
    (G, S), E, pair_s = placed.expert_GS.shape, case.load_E.size, case.rates.pair_s
    R, most = S - num_base, G + 1 + NUM_BOUNDS
    bounds = Bounds(
        np.zeros((G, most)), np.zeros((E, most)), np.zeros((E + 1, G, most)), np.zeros((G * R + 1, G, most)), np.zeros(most)
    )  # fmt: skip
    bounds.price_s_GK[:, G] = pair_s / G
    for g in range(G):
        bounds.price_s_GK[g, g] = pair_s
    expert_GR = np.full((G, R), -1, np.int64)
    for r in range(G):
        for i in range(R):
            if placed.quota_GS[r, num_base + i] > 0:
                expert_GR[r, i] = placed.expert_GS[r, num_base + i]
    held = Held(expert_GR.copy(), np.zeros((E, G), np.bool_), np.zeros((4, G), np.int64))
    hold(case, expert_GR, held)
    renew(case, held, 0, G + 1, bounds)
    return held, bounds


@kernel
def _restart(case, held, bounds, num, best_GR, state_1):
    """Goes on from the best replicas with about half of them."""
    start_GR = best_GR.copy()
    for r in range(start_GR.shape[0]):
        for i in range(start_GR.shape[1]):
            if random_below(state_1, 2) == 0:
                start_GR[r, i] = -1
    hold(case, start_GR, held)
    renew(case, held, 0, num, bounds)


@kernel
def polish_row(steps, row, best):
    """Searches for cheaper replicas and quotas, in place. Returns the price reached, which is never above that of the start.

    Each step makes the change of one slot, or of two, that prices least by `Bounds`, better or not, and bars its return. What
    the bounds hold cheaper than the best so far gets its cheapest quotas and is priced for certain; the prices of ranks that
    come with them are one more bound, so no set of replicas is underrated twice. Where that has not helped for `PATIENCE` steps
    the search goes on from the best with about half of its replicas.
    """
    G, S = best.expert_GS.shape
    R, E, rates = S - row.num_base, row.load_E.size, row.rates
    best_s = price_row(row, rates, best)
    # A change has to save a hundred-thousandth of the row's balanced compute, far above rounding.
    least_s = 1e-5 * rates.pair_s * best.load_G.sum() / G
    if R == 0 or G == 1 or least_s == 0.0:
        return best_s
    case = case_of(row, S)
    held, bounds = _begin(case, best, row.num_base)
    num, oldest, best_GR = G + 1, G + 1, held.expert_GR.copy()
    tried, price_s_G, until_EG = copy_of(best), np.empty(G), np.zeros((E, G), np.int64)
    state_1 = np.array([88172645463325252], np.uint64)
    level_I = _free_levels(rates, R)
    waited, restarts = 0, 0
    for t in range(steps):
        if t == 0 or _price_s(case, held, bounds, num) < best_s - least_s:
            set_quotas(row, held.expert_GR, tried, price_s_G)
            if num < G + 1 + NUM_BOUNDS:
                oldest, num = num, num + 1
            else:
                oldest = oldest + 1 if oldest + 1 < num else G + 1
            bounds.price_s_GK[:, oldest] = price_s_G
            renew(case, held, oldest, oldest + 1, bounds)
            this_s = price_row(row, rates, tried)
            if this_s < best_s - least_s:
                best_s, waited = this_s, 0
                best_GR[:] = held.expert_GR
                assign(best, tried)
        waited += 1
        step = Step(t, num, level_I[restarts % len(level_I)], best_s - least_s, until_EG)
        change = best_change(case, held, bounds, step) if waited <= PATIENCE else Change(-1, -1, -1, -1, -1)
        if change.rank >= 0:
            old = make_change(case, held, change, step, state_1)
            renew_two(case, held, old, change.expert, num, bounds)
            continue
        waited, restarts = 0, restarts + 1
        _restart(case, held, bounds, num, best_GR, state_1)
        until_EG[:] = 0
    return best_s


@kernel
def polish_rows(low, high, rows, steps, expert_NGS, quota_NGS):
    """`polish_row` for rows [low, high)."""
    for n in range(low, high):
        load_G = np.zeros(expert_NGS.shape[1], np.int64)
        for g in range(load_G.size):
            load_G[g] = quota_NGS[n, g].sum()
        polish_row(steps, row_of(rows, n, expert_NGS[n]), Placed(expert_NGS[n], quota_NGS[n], load_G))
