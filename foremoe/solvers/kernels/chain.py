"""Row kernels of `Chain`: settle, split exactly, prune.

A placement is the state: ``quota_GS[g, :num_base]`` is what is left of rank g's own experts, and -1 in a redundant slot is a
free slot.
"""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.problem.kernels.load_bound import bound_row
from foremoe.solvers.kernels.flow import split_row
from foremoe.solvers.kernels.prune import clean_row, count_row, home_of_experts, prune_row
from foremoe.solvers.kernels.settle import settle_on
from foremoe.solvers.kernels.shed import most_loaded_first, shed_row

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.

# Vain tries after which `prune_row` stops.
FAILURES = 4


@kernel
def level_goal(slack, node_only, node_G, load_G):  # type: ignore[no-untyped-def]
    """ceil((1 + slack) * ceil(mean load)), of the most loaded node if replicas stay inside nodes."""
    num_domains = node_G.max() + 1 if node_only else 1
    goal = np.int64(0)
    for domain in range(num_domains):
        total, num = np.int64(0), 0
        for g in range(load_G.size):
            if not node_only or node_G[g] == domain:
                total += load_G[g]
                num += 1
        goal = max(goal, -(-total // num))
    return np.int64(np.ceil(goal * (1.0 + slack)))


@kernel
def _bound(goal, node_only, node_G, num_base, quota_GS):  # type: ignore[no-untyped-def]
    """`bound_row` over all ranks, or over every node by itself."""
    if not node_only:
        return bound_row(goal, np.ones(node_G.size, np.bool_), num_base, quota_GS)
    for node in range(node_G.max() + 1):
        goal = bound_row(goal, node_G == node, num_base, quota_GS)
    return goal


@kernel
def search_row(load_E, goal, limit, params, node_G, home_quota_GS, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """The best of several settlings that start from the given placement, in place; only maxima up to `limit` count.

    First the goal is tried. If ranks stay above it, the goal rises to the lower bound and the target is bisected between that
    and the best maximum so far; the exact split makes the most of every failure. When the interval is used up, it starts again
    with givers weighted at random (xorshift: the same numbers in every row). Relays are tried first and, at the best maximum,
    last: as much balance with fewer replicas across nodes.

    Args:
        params: as `chain_row`; without tries the goal is tried once and not split.
    """
    node_only, tries, spread = params[0] != 0.0, np.int64(params[1]), params[2]
    near_limit, far_limit = np.int64(params[4]), np.int64(params[5])
    most = load_G.max()
    if most <= goal:
        return
    limit = limit if limit < most else most - 1
    relays = params[6] != 0.0 and not node_only and node_G.min() != node_G.max()
    first_expert_GS, first_quota_GS, first_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
    try_expert_GS, try_quota_GS, try_load_G = np.empty_like(expert_GS), np.empty_like(quota_GS), np.empty_like(load_G)
    weight_G, near_G, far_G = np.ones(load_G.size), np.zeros(load_G.size, np.int64), np.zeros(load_G.size, np.int64)
    none_C6, thrifty = np.empty((0, 6), np.int64), params[3] > 0.0
    order_G = most_loaded_first(first_load_G) if thrifty else np.empty(0, np.int64)
    state = np.uint64(88172645463325252)
    bottom = target = goal
    relayed = found = False
    for t in range(tries + 1):
        last = t >= tries > 0 or limit < goal
        if last:
            if relayed or not relays or not found:
                break
            limit += 1
            target = limit
            weight_G[:] = 1.0
        relay = relays if t == 0 or last else False
        try_expert_GS[:], try_quota_GS[:], try_load_G[:] = first_expert_GS, first_quota_GS, first_load_G
        near_G[:], far_G[:] = 0, 0
        if thrifty:
            shed_row(
                target, near_limit, far_limit, node_only, order_G, node_G, num_base, near_G, far_G, try_expert_GS, try_quota_GS,
                try_load_G,
            )  # fmt: skip
            if try_load_G.max() > target:
                near_G[:], far_G[:] = 0, 0
                try_expert_GS[:], try_quota_GS[:], try_load_G[:] = first_expert_GS, first_quota_GS, first_load_G
        settle_on(
            target, relay, near_limit, far_limit, node_only, False, thrifty, weight_G, node_G, num_base,
            near_G, far_G, none_C6, 0, try_expert_GS, try_quota_GS, try_load_G,
        )  # fmt: skip
        reached = try_load_G.max()
        if reached > goal and tries > 0 and not (last and reached <= limit):
            reached = split_row(goal, limit, load_E.size, try_expert_GS, try_quota_GS, try_load_G)
        if 0 <= reached <= limit:
            limit, relayed, found = reached - 1, relay, True
            expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
        if last or tries == 0:
            break
        if t == 0 and limit >= goal:
            goal = bottom = _bound(goal, node_only, node_G, num_base, home_quota_GS)
        elif reached < 0 or reached > target:
            bottom = target if target > bottom else bottom
        if limit - bottom <= goal // 4096:
            bottom = goal
            for g in range(weight_G.size):
                state ^= state << np.uint64(13)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                weight_G[g] = 1.0 + spread * (np.float64(state >> np.uint64(11)) / 9007199254740992.0 - 0.5)
        target = max(goal, (bottom + limit) // 2)


@kernel
def chain_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `Chain`; see `RowSolver.edit` for the arguments.

    Args:
        params: stay inside nodes (0 or 1), tries, spread, slack, most copies out of a home inside its node and to other nodes,
            relays (0 or 1), start's replicas too (0 or 1).
    """
    node_only, slack = params[0] != 0.0, params[3]
    G = quota_GS.shape[0]
    load_G = np.empty(G, np.int64)
    clean_row(num_base, expert_GS, quota_GS, load_G)
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    goal = level_goal(slack, node_only, node_G, load_G)
    far, num = count_row(home_E, node_G, num_base, expert_GS)
    best = max(goal, load_G.max())
    start_expert_GS, start_quota_GS, start_far, replicated = expert_GS.copy(), quota_GS.copy(), far, num > 0
    home_quota_GS = np.zeros_like(quota_GS)
    for e in range(load_E.size):
        home_quota_GS[home_E[e] // quota_GS.shape[1], home_E[e] % quota_GS.shape[1]] = load_E[e]
    params = params.copy()
    for keep in (False, True):
        if keep and not (replicated and params[7] != 0.0):
            break
        try_expert_GS = start_expert_GS.copy()
        try_quota_GS = start_quota_GS.copy() if keep else home_quota_GS.copy()
        clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
        if keep and best == goal:
            if far <= start_far:
                break  # nothing to gain: the start's replicas across nodes would all stay
            params[1] = 0.0
        search_row(load_E, goal, best, params, node_G, home_quota_GS, num_base, try_expert_GS, try_quota_GS, load_G)
        clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
        reached = max(load_G.max(), goal)
        prune_row(reached, load_E, FAILURES, num_base, try_expert_GS, try_quota_GS, load_G)
        try_far, try_num = count_row(home_E, node_G, num_base, try_expert_GS)
        if (reached, try_far, try_num) < (best, far, num):
            best, far, num = reached, try_far, try_num
            expert_GS[:], quota_GS[:] = try_expert_GS, try_quota_GS


@kernel
def inside_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of ``Chain(inside=True)``: settles ranks inside nodes from a placement whose replicas across nodes stay."""
    load_G = np.empty(quota_GS.shape[0], np.int64)
    clean_row(num_base, expert_GS, quota_GS, load_G)
    goal = level_goal(params[3], True, node_G, load_G)
    params = params.copy()
    params[0] = 1.0
    # What is at home now, not what was before load crossed: whole loads would lift the bound back to that of bare homes.
    home_quota_GS = quota_GS.copy()
    home_quota_GS[:, num_base:] = 0
    limit = max(goal, load_G.max())
    search_row(load_E, goal, limit, params, node_G, home_quota_GS, num_base, expert_GS, quota_GS, load_G)
    clean_row(num_base, expert_GS, quota_GS, load_G)
    prune_row(max(goal, load_G.max()), load_E, FAILURES, num_base, expert_GS, quota_GS, load_G)


@kernel
def chain_rows(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`chain_row` for rows [low, high)."""
    for n in range(low, high):
        chain_row(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])


@kernel
def inside_rows(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`inside_row` for rows [low, high)."""
    for n in range(low, high):
        inside_row(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])
