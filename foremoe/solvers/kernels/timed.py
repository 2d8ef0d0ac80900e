"""Row kernel of `Chain` under the objective ``"time"``: as much balance as pays, by the closed form of the cost model."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.problem.kernels.load_bound import bound_row
from foremoe.solvers.kernels.chain import FAILURES, level_goal, search_row
from foremoe.solvers.kernels.flow import split_row
from foremoe.solvers.kernels.nearest import settle_nearest
from foremoe.solvers.kernels.price import (
    COPY_PEER,
    COPY_RDMA,
    PAIR,
    PEER_PAIR,
    count_copies,
    exposed_s,
    fans_seconds,
    free_fans,
    price_row,
)
from foremoe.solvers.kernels.prune import clean_row, prune_row
from foremoe.solvers.kernels.settle import settle_on
from foremoe.solvers.kernels.shed import most_loaded_first, shed_row

# Letters: N rows, G ranks, S slots per rank, E experts, V nodes, C moves, K rates.

# Copies that no link forbids.
UNLIMITED = 2**31
# Targets tried by `shed_row` for one limit.
SHEDS = 6


@kernel
def _undo(log_C6, num_moves, home_E, node_G, num_base, rate_K, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Takes back the last moves of a settling that cost more than they save, dispatch aside; in place.

    Every move lowers the maximum or leaves it, and adds to copies or leaves them. The best number of moves is looked for from
    the end; the search stops where what all copies cost is less than what the maximum has risen.
    """
    G = load_G.size
    most = load_G.max()
    fan_4G = count_copies(home_E, node_G, num_base, expert_GS, quota_GS)
    copies_s = fans_seconds(fan_4G, rate_K)
    last_s = rate_K[PAIR] * most + copies_s
    best_s, best = last_s, num_moves
    kept_load_G = load_G.copy()
    for i in range(num_moves - 1, -1, -1):
        if rate_K[PAIR] * most >= best_s:
            num_moves = i + 1
            break
        g, b, r, slot, amount = log_C6[i, 0], log_C6[i, 1], log_C6[i, 2], log_C6[i, 3], log_C6[i, 4]
        quota_GS[g, b] += amount
        quota_GS[r, slot] -= amount
        load_G[g] += amount
        load_G[r] -= amount
        most = max(most, load_G[g])
        if log_C6[i, 5] == 1:
            link = 0 if node_G[g] == node_G[r] else 2
            fan_4G[link, g] -= 1
            fan_4G[link + 1, r] -= 1
            copies_s = fans_seconds(fan_4G, rate_K)
        if rate_K[PAIR] * most + copies_s < best_s:
            best_s, best = rate_K[PAIR] * most + copies_s, i
        num_moves = i
    for i in range(num_moves, best):
        g, b, r, slot, amount = log_C6[i, 0], log_C6[i, 1], log_C6[i, 2], log_C6[i, 3], log_C6[i, 4]
        quota_GS[g, b] -= amount
        quota_GS[r, slot] += amount
    load_G[:] = kept_load_G
    for g in range(G):
        load_G[g] = quota_GS[g].sum()


@kernel
def _wider(near, far, one_node, rate_K):  # type: ignore[no-untyped-def]
    """The next limits on copies out of a home, inside its node and to other nodes, and the seconds that they leave exposed."""
    more_near, more_far = near + 1 + near // 4, far + 1 + far // 4
    near_s, far_s = exposed_s(more_near, 0, rate_K), exposed_s(0, more_far, rate_K)
    if one_node or near_s <= far_s:
        return more_near, far, max(near_s, exposed_s(0, far, rate_K))
    return near, more_far, max(far_s, exposed_s(near, 0, rate_K))


@kernel
def _binds(near, far, one_node, num_slots):  # type: ignore[no-untyped-def]
    """Whether a limit on copies out of a home can be in the way: none leaves it for more than all redundant slots."""
    return near < num_slots or (far < num_slots and not one_node)


@kernel
def _own_pairs(redundant, load_GE):  # type: ignore[no-untyped-def]
    """At least as many pairs as replicas let ranks serve on their own; 0 if sources are not known."""
    most = np.int64(0)
    for g in range(load_GE.shape[0]):
        most += redundant * np.int64(load_GE[g].max())
    return most


@kernel
def _settled(  # type: ignore[no-untyped-def]
    goal, blind, node_only, thrifty, place_G, demand_XE, node_G, num_base, rate_K, load_E, home_E, expert_GS, quota_GS, load_G
):
    """Settles from bare homes: first with copies that hide, then with more per link as long as balance may pay for them."""
    G, S = expert_GS.shape
    log_C6, num_moves = np.empty((2 * G * S + load_E.size, 6), np.int64), 0
    near_G, far_G = np.zeros(G, np.int64), np.zeros(G, np.int64)
    want_XE, weight_G = demand_XE.copy(), np.ones(G)
    one_node = node_only or node_G.min() == node_G.max()
    free = free_fans(rate_K)
    near, far = free[0], np.int64(0) if one_node else free[1]
    node_goal = goal if one_node else level_goal(0.0, True, node_G, load_G)
    while True:
        this_goal = goal if far > 0 else node_goal
        if blind and want_XE.size > 0:
            num_moves = settle_nearest(
                this_goal, near, far, thrifty, node_G, num_base, place_G, want_XE, near_G, far_G, log_C6, num_moves, expert_GS,
                quota_GS, load_G,
            )  # fmt: skip
        else:
            num_moves = settle_on(
                this_goal, not blind, near, far, node_only, blind, thrifty, weight_G, node_G, num_base, near_G, far_G, log_C6,
                num_moves, expert_GS, quota_GS, load_G,
            )  # fmt: skip
        over = load_G.max() - goal
        if over <= 0 or not _binds(near, far, one_node, G * (S - num_base)):
            break
        near, far, least_s = _wider(near, far, one_node, rate_K)
        if least_s >= rate_K[PAIR] * over:
            break
    _undo(log_C6, num_moves, home_E, node_G, num_base, rate_K, expert_GS, quota_GS, load_G)
    clean_row(num_base, expert_GS, quota_GS, load_G)


@kernel
def timed_row(load_E, load_GE, demand_VE, node_G, num_base, params, rate_K, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `Chain` under ``"time"``, in place: the cheapest of the start, bare homes, and several settlings.

    Args:
        load_GE, demand_VE: int32, pairs by source rank and by source node; [0, 0] if not known.
        params: as `chain_row`.   rate_K: see `price`.
    """
    G, S = expert_GS.shape
    node_only, tries = params[0] != 0.0, np.int64(params[1])
    num_nodes = node_G.max() + 1
    load_G, busy_G, home_E = np.empty(G, np.int64), np.zeros(G, np.int64), np.empty(load_E.size, np.int64)
    home_expert_GS, home_quota_GS, home_load_G = expert_GS.copy(), np.zeros_like(quota_GS), np.zeros(G, np.int64)
    home_expert_GS[:, num_base:] = -1
    clean_row(num_base, expert_GS, quota_GS, load_G)
    for g in range(G):
        for b in range(num_base):
            e = expert_GS[g, b]
            home_E[e] = g * S + b
            home_quota_GS[g, b] = load_E[e]
            home_load_G[g] += load_E[e]
            busy_G[g] += load_E[e] > 0
    best_s = price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G)
    most = load_G.max()
    if (expert_GS[:, num_base:] >= 0).any():
        home_s = price_row(
            load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, home_expert_GS, home_quota_GS, home_load_G
        )  # fmt: skip
        if home_s < best_s:
            best_s, most = home_s, home_load_G.max()
            expert_GS[:], quota_GS[:] = home_expert_GS, home_quota_GS
    goal = level_goal(params[3], node_only, node_G, home_load_G)
    if home_load_G.max() <= goal:
        return
    try_expert_GS, try_quota_GS = np.empty_like(expert_GS), np.empty_like(quota_GS)
    # Where tokens come from counts by node, or by rank if there is one node.
    place_G, demand_XE = node_G.astype(np.int64), demand_VE
    if num_nodes == 1 and load_GE.size > 0:
        place_G, demand_XE = np.arange(G), load_GE
    for blind in (True, False):
        if blind and (node_only or (num_nodes == 1 and load_GE.size == 0)):
            continue
        if not blind and best_s <= rate_K[PAIR] * goal:
            break  # tokens come nearer by more than all copies cost: staying inside nodes cannot be cheaper
        try_expert_GS[:], try_quota_GS[:], load_G[:] = home_expert_GS, home_quota_GS, home_load_G
        _settled(
            goal, blind, node_only, params[3] > 0.0, place_G, demand_XE, node_G, num_base, rate_K, load_E, home_E, try_expert_GS,
            try_quota_GS, load_G,
        )  # fmt: skip
        reached = split_row(goal, UNLIMITED, load_E.size, try_expert_GS, try_quota_GS, load_G)
        clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
        prune_row(reached, load_E, FAILURES, num_base, try_expert_GS, try_quota_GS, load_G)
        this_s = price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, try_expert_GS, try_quota_GS, load_G)
        if this_s < best_s:
            best_s, most = this_s, load_G.max()
            expert_GS[:], quota_GS[:] = try_expert_GS, try_quota_GS
    if tries == 0 or (most - goal) * 1000 <= goal:
        return
    # Links or experts too small leave some load above the goal. With few copies out of a home, which ones matters: search anew
    # for every limit, from copies that all hide to as many as less load could pay for.
    bound = bound_row(goal, np.ones(G, np.bool_), num_base, home_quota_GS)
    free, search_K, near_G, far_G = free_fans(rate_K), params.copy(), np.empty(G, np.int64), np.empty(G, np.int64)
    search_K[1], order_G = max(1, tries // 4), most_loaded_first(home_load_G)
    for inside in (True, False):
        if not inside and (node_only or num_nodes == 1):
            break
        this_goal = level_goal(0.0, True, node_G, home_load_G) if inside and not node_only else goal
        if inside and not node_only:
            nearer_s = rate_K[PEER_PAIR] * _own_pairs(S - num_base, load_GE)
            if best_s <= rate_K[PAIR] * this_goal - nearer_s:
                continue  # nodes differ by more than tokens that come nearer inside them can save
        near, far, vain = free[0], np.int64(0), 0
        if not inside:
            far = max(free[1], np.int64(1))
            near = max(near, np.int64(far * rate_K[COPY_RDMA] / rate_K[COPY_PEER]))
        while (most - bound) * 1000 > goal and vain < 3:
            search_K[0], search_K[4], search_K[5] = inside, near, far
            try_expert_GS[:], try_quota_GS[:], load_G[:] = home_expert_GS, home_quota_GS, home_load_G
            search_row(
                load_E, this_goal, home_load_G.max(), search_K, node_G, home_quota_GS, num_base, try_expert_GS, try_quota_GS,
                load_G,
            )  # fmt: skip
            clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
            prune_row(load_G.max(), load_E, FAILURES, num_base, try_expert_GS, try_quota_GS, load_G)
            this_s = price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, try_expert_GS, try_quota_GS, load_G)
            vain += 1
            if this_s < best_s:
                best_s, most, vain = this_s, load_G.max(), 0
                expert_GS[:], quota_GS[:] = try_expert_GS, try_quota_GS
            over_s = rate_K[PAIR] * (load_G.max() - max(bound, this_goal))
            low, high = max(bound, this_goal), home_load_G.max()
            for _ in range(SHEDS):
                target = (low + high) // 2
                try_expert_GS[:], try_quota_GS[:], load_G[:] = home_expert_GS, home_quota_GS, home_load_G
                near_G[:], far_G[:] = 0, 0
                shed_row(
                    target, near, far, inside, order_G, node_G, num_base, near_G, far_G, try_expert_GS, try_quota_GS, load_G
                )  # fmt: skip
                if load_G.max() <= target:
                    high = target
                else:
                    low = target
                this_s = price_row(
                    load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, try_expert_GS, try_quota_GS, load_G
                )  # fmt: skip
                if this_s < best_s:
                    best_s, most, vain = this_s, load_G.max(), 0
                    expert_GS[:], quota_GS[:] = try_expert_GS, try_quota_GS
            if not _binds(near, far, inside, G * (S - num_base)):
                break
            near, far, least_s = _wider(near, far, inside, rate_K)
            if least_s >= over_s:
                break


@kernel
def timed_rows(  # type: ignore[no-untyped-def]
    low, high, load_NE, load_NGE, demand_NVE, located, node_G, num_base, params, rate_NK, expert_NGS, quota_NGS
):
    """`timed_row` for rows [low, high)."""
    none = np.empty((0, 0), np.int32)
    for n in range(low, high):
        load_GE, demand_VE = (load_NGE[n], demand_NVE[n]) if located else (none, none)
        timed_row(
            load_NE[n], load_GE, demand_VE, node_G, num_base, params, rate_NK[n], expert_NGS[n], quota_NGS[n]
        )  # fmt: skip
