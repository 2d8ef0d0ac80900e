"""Row kernels of `Chain` and `NodeChain`: replicas by settling ranks one after the other, then the exact split.

A replica is an edge from its home rank (the giver) to the rank that holds it (the taker), whose capacity is what is left of
the expert's load. With one redundant slot per rank the edges of a best placement form a forest, and what flows over an edge
is what the subtree below it lacks; so a taker can be filled exactly to the target and closed, one rank per edge.

All kernels live in this one file: numba's disk cache does not notice an edit of a callee in another file. A placement is the
state: ``quota_GS[g, :num_base]`` is what is left of rank g's own experts, and -1 in a redundant slot is a free slot.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.

# How `settle_row` looks at nodes: not at all; a giver of the taker's own node first; and relays inside the node as well.
IGNORE, NEAR, RELAY = 0, 1, 2
# Which placements `chain_row` searches from: the start's replicas and the bare homes, or one of them.
BOTH, KEEP, SCRATCH = 0, 1, 2


@njit(nogil=True, cache=True)
def bound_row(target, member_G, num_base, quota_GS):  # type: ignore[no-untyped-def]
    """The least maximum load that the ranks of `member_G` can have among themselves, or `target` if that is more.

    The k most loaded ranks can only give into the slots of the others: those n = R * (number of others) slots take at most the
    n largest experts at home on the k ranks. What is left has a mean, and the maximum is no smaller.

    Args:
        member_G: bool; ranks outside take no part.
        quota_GS: int32, every expert's whole load at home.
    """
    G, S = quota_GS.shape
    load_G = np.zeros(G, np.int64)
    for g in range(G):
        for b in range(num_base):
            load_G[g] += quota_GS[g, b]
    inside_G = member_G.copy()
    total, num_inside, num_slots = np.int64(0), 0, 0
    for g in range(G):
        if inside_G[g]:
            total += load_G[g]
            num_inside += 1
    hot_I = np.argsort(-quota_GS[:, :num_base].copy().reshape(-1).astype(np.int64), kind="mergesort")
    for g in np.argsort(load_G, kind="mergesort"):
        if not inside_G[g]:
            continue
        if load_G[g] > target or num_inside == 1:
            break
        inside_G[g] = False
        total -= load_G[g]
        num_inside -= 1
        num_slots += S - num_base
        given, used = np.int64(0), 0
        for i in hot_I:
            if used == num_slots:
                break
            if inside_G[i // num_base]:
                given += quota_GS[i // num_base, i % num_base]
                used += 1
        target = max(target, -((given - total) // num_inside))
    return target


@njit(nogil=True, cache=True)
def _top(g, num_base, quota_GS):  # type: ignore[no-untyped-def]
    """What is left of the largest expert at home on rank g."""
    top = quota_GS[g, 0]
    for b in range(1, num_base):
        top = max(top, quota_GS[g, b])
    return top


@njit(nogil=True, cache=True)
def settle_row(target, nodes, near_limit, far_limit, node_only, weight_G, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Fills takers to `target`, the emptiest first, until no rank is above it or no taker is left; in place.

    The giver is the most loaded rank above the target that has an expert with enough left to fill the taker alone; of its
    experts the smallest that does. It may fall below the target if it has a free slot: then it becomes a taker itself, and its
    deficit is smaller than the one it filled, so large experts are used where only they will do. If no expert is large enough,
    the largest of all gives what it has.

    With ``nodes >= NEAR`` a giver of the taker's node goes first. With `RELAY`, if there is none, a node mate that is itself
    below the target fills the taker: its deficit grows, and one larger replica from another node will fill both.

    Args:
        weight_G: float64, favours givers; all 1.0 but for repeated tries.
        load_G: int64, kept up to date.
    """
    G, S = quota_GS.shape
    giver_I, taker_I = np.empty(G, np.int64), np.empty(G, np.int64)
    top_G, free_G = np.empty(G, np.int64), np.zeros(G, np.int64)
    near_G, far_G = np.zeros(G, np.int64), np.zeros(G, np.int64)
    num_givers = num_takers = 0
    for g in range(G):
        top_G[g] = _top(g, num_base, quota_GS)
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
        if load_G[g] > target:
            giver_I[num_givers] = g
            num_givers += 1
        elif load_G[g] < target and free_G[g] > 0:
            taker_I[num_takers] = g
            num_takers += 1
    while num_givers > 0 and num_takers > 0:
        t = 0
        for i in range(1, num_takers):
            g, r = taker_I[i], taker_I[t]
            if load_G[g] < load_G[r] or (load_G[g] == load_G[r] and g < r):
                t = i
        r = taker_I[t]
        need = target - load_G[r]

        # Rank the givers: 0 fills partly; 1 and up fill the taker, those with a free slot before those without, own node first.
        chosen, tier, key, reach = -1, -1, 0.0, np.int64(0)
        for i in range(num_givers):
            g = giver_I[i]
            near = node_G[g] == node_G[r]
            if top_G[g] == 0 or (node_only and not near):
                continue
            if (near and near_G[g] >= near_limit) or (not near and far_G[g] >= far_limit):
                continue
            reach = max(reach, top_G[g])
            if top_G[g] >= need and (free_G[g] > 0 or load_G[g] - target >= need):
                this_tier = 1 + (free_G[g] > 0) + 2 * (nodes >= NEAR and near)
                this = (load_G[g] - target) * weight_G[g]
            else:
                this_tier = 0
                this = (top_G[g] if free_G[g] > 0 else min(top_G[g], load_G[g] - target)) * weight_G[g]
            if this_tier > tier or (this_tier == tier and (this > key or (this == key and g < giver_I[chosen]))):
                chosen, tier, key = i, this_tier, this
        if chosen < 0:  # nobody may give to this node
            num_takers -= 1
            taker_I[t] = taker_I[num_takers]
            continue
        g = giver_I[chosen]
        relayed = False
        if nodes == RELAY and tier < 3:
            for i in range(num_takers):
                mate = taker_I[i]
                if mate == r or node_G[mate] != node_G[r] or top_G[mate] < need or need + target - load_G[mate] > reach:
                    continue
                if near_G[mate] >= near_limit:
                    continue
                if not relayed or load_G[mate] > load_G[g] or (load_G[mate] == load_G[g] and mate < g):
                    g, tier, relayed = mate, 1, True

        best = -1
        for b in range(num_base):
            left = quota_GS[g, b]
            if (tier == 0 and (best < 0 or left > quota_GS[g, best])) or (tier > 0 and left >= need and (best < 0 or left < quota_GS[g, best])):
                best = b
        amount = min(need, np.int64(quota_GS[g, best]))
        if free_G[g] == 0:
            amount = min(amount, load_G[g] - target)
        slot = -1
        for s in range(num_base, S):
            if expert_GS[r, s] == expert_GS[g, best]:
                slot = s
                break
            if expert_GS[r, s] < 0 and slot < 0:
                slot = s
        if expert_GS[r, slot] < 0:
            expert_GS[r, slot] = expert_GS[g, best]
            free_G[r] -= 1
            if node_G[g] == node_G[r]:
                near_G[g] += 1
            else:
                far_G[g] += 1
        quota_GS[r, slot] += amount
        quota_GS[g, best] -= amount
        load_G[r] += amount
        load_G[g] -= amount
        top_G[g] = _top(g, num_base, quota_GS)
        if load_G[r] == target or free_G[r] == 0:
            num_takers -= 1
            taker_I[t] = taker_I[num_takers]
        if not relayed and load_G[g] <= target:
            num_givers -= 1
            giver_I[chosen] = giver_I[num_givers]
            if load_G[g] < target:
                taker_I[num_takers] = g
                num_takers += 1


@njit(nogil=True, cache=True)
def split_row(target, limit, num_experts, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """The split with the least maximum rank load that is at least `target`, in place; returns that maximum.

    Overloaded ranks push load along residual paths (out of a slot into another slot of the same expert, again and again) to
    ranks below the target, all paths of one breadth-first search at a time. Where no path is left, the ranks that were reached
    hold only experts that have no slot elsewhere, so no split does better than ceil(their load / their number): that is the
    new target (Newton's method on the minimum cut). A target above `limit` ends the search with -1 and an unfinished split.

    Args:
        quota_GS: int32, any split of every expert's load over its slots; changed only where it must be.
        load_G: int64, kept up to date.
    """
    G, S = quota_GS.shape
    first_E = np.full(num_experts, -1, np.int64)
    next_P = np.empty(G * S, np.int64)
    for p in range(G * S - 1, -1, -1):
        e = expert_GS[p // S, p % S]
        if e >= 0:
            next_P[p] = first_E[e]
            first_E[e] = p
    queue_I, out_G, in_G = np.empty(G, np.int64), np.empty(G, np.int64), np.empty(G, np.int64)
    seen_G, seen_E = np.empty(G, np.bool_), np.empty(num_experts, np.bool_)
    while True:
        seen_G[:] = False
        seen_E[:] = False
        num_reached = 0
        for g in range(G):
            if load_G[g] > target:
                seen_G[g] = True
                out_G[g] = -1
                queue_I[num_reached] = g
                num_reached += 1
        num_sources, head = num_reached, 0
        if num_sources == 0:
            return target
        while head < num_reached:
            g = queue_I[head]
            head += 1
            for s in range(S):
                e = expert_GS[g, s]
                if e < 0 or quota_GS[g, s] == 0 or seen_E[e]:
                    continue
                seen_E[e] = True
                p = first_E[e]
                while p >= 0:
                    r = p // S
                    if not seen_G[r]:
                        seen_G[r] = True
                        out_G[r], in_G[r] = g * S + s, p
                        queue_I[num_reached] = r
                        num_reached += 1
                    p = next_P[p]
        moved = False
        for i in range(num_sources, num_reached):
            sink = queue_I[i]
            amount = target - load_G[sink]
            r = sink
            while out_G[r] >= 0 and amount > 0:
                amount = min(amount, np.int64(quota_GS[out_G[r] // S, out_G[r] % S]))
                r = out_G[r] // S
            if amount > 0:
                amount = min(amount, load_G[r] - target)
            if amount <= 0:
                continue
            moved = True
            load_G[r] -= amount
            load_G[sink] += amount
            r = sink
            while out_G[r] >= 0:
                quota_GS[in_G[r] // S, in_G[r] % S] += amount
                quota_GS[out_G[r] // S, out_G[r] % S] -= amount
                r = out_G[r] // S
        if not moved:
            total = np.int64(0)
            for i in range(num_reached):
                total += load_G[queue_I[i]]
            target = -(-total // num_reached)
            if target > limit:
                return np.int64(-1)


@njit(nogil=True, cache=True)
def home_of_experts(num_experts, num_base, expert_GS):  # type: ignore[no-untyped-def]
    """int64 [E]: home p = g*S + b of every expert."""
    home_E = np.empty(num_experts, np.int64)
    for g in range(expert_GS.shape[0]):
        for b in range(num_base):
            home_E[expert_GS[g, b]] = g * expert_GS.shape[1] + b
    return home_E


@njit(nogil=True, cache=True)
def _clean_row(num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Empties redundant slots without quota and sets `load_G`."""
    for g in range(expert_GS.shape[0]):
        load_G[g] = 0
        for s in range(expert_GS.shape[1]):
            load_G[g] += quota_GS[g, s]
            if s >= num_base and quota_GS[g, s] == 0:
                expert_GS[g, s] = -1


@njit(nogil=True, cache=True)
def _count_row(home_E, node_G, num_base, expert_GS):  # type: ignore[no-untyped-def]
    """Replicas outside the node of their home, and all replicas."""
    G, S = expert_GS.shape
    far = num = 0
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] >= 0:
                num += 1
                far += node_G[home_E[expert_GS[g, s]] // S] != node_G[g]
    return far, num


@njit(nogil=True, cache=True)
def prune_row(target, load_E, failures, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Drops replicas that a maximum load of `target` does not need, smallest quota first; in place.

    A replica goes if the exact split manages without it. Only those are tried whose rank could still be filled so far that
    the slack of all ranks together covers the rest; the search ends after `failures` vain tries.
    """
    G, S = quota_GS.shape
    slack = target * G - load_G.sum()
    if slack < G:
        return  # at the mean itself, a replica less would need loads that cancel out exactly
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    untried_GS = expert_GS >= 0
    for g in range(G):
        most = np.int64(0)
        for s in range(S):
            if expert_GS[g, s] >= 0:
                most += load_E[expert_GS[g, s]]
        for s in range(num_base, S):
            if untried_GS[g, s] and target - (most - load_E[expert_GS[g, s]]) > slack:
                untried_GS[g, s] = False
    while failures > 0:
        rank, slot = -1, -1
        for g in range(G):
            for s in range(num_base, S):
                if untried_GS[g, s] and (rank < 0 or quota_GS[g, s] < quota_GS[rank, slot]):
                    rank, slot = g, s
        if rank < 0:
            break
        untried_GS[rank, slot] = False
        old_expert_GS, old_quota_GS, old_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
        home, amount = home_E[expert_GS[rank, slot]], quota_GS[rank, slot]
        quota_GS[home // S, home % S] += amount
        load_G[home // S] += amount
        load_G[rank] -= amount
        expert_GS[rank, slot], quota_GS[rank, slot] = -1, 0
        if split_row(target, target, load_E.size, expert_GS, quota_GS, load_G) < 0:
            expert_GS[:], quota_GS[:], load_G[:] = old_expert_GS, old_quota_GS, old_load_G
            failures -= 1
    _clean_row(num_base, expert_GS, quota_GS, load_G)


@njit(nogil=True, cache=True)
def _goal(slack, node_only, node_G, load_G):  # type: ignore[no-untyped-def]
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


@njit(nogil=True, cache=True)
def _bound(goal, node_only, node_G, num_base, quota_GS):  # type: ignore[no-untyped-def]
    """`bound_row` over all ranks, or over every node by itself."""
    if not node_only:
        return bound_row(goal, np.ones(node_G.size, np.bool_), num_base, quota_GS)
    for node in range(node_G.max() + 1):
        goal = bound_row(goal, node_G == node, num_base, quota_GS)
    return goal


@njit(nogil=True, cache=True)
def search_row(load_E, goal, limit, tries, spread, best_nodes, near_limit, far_limit, node_only, node_G, home_quota_GS, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """The best of several settlings that start from the given placement, in place; only maxima up to `limit` count.

    First the goal is tried with relays. If ranks stay above it, the goal rises to the lower bound and the target is bisected
    between that and the best maximum so far, each failure improved by the exact split. When the interval is used up, it starts
    again with givers weighted at random by up to ``spread / 2`` (xorshift: the same numbers in every row). A relay at the best
    maximum ends the search: as much balance with fewer replicas across nodes.
    """
    G = load_G.size
    best = load_G.max()
    if best <= goal:
        return
    limit = min(limit, best - 1)
    first_expert_GS, first_quota_GS, first_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
    try_expert_GS, try_quota_GS, try_load_G = np.empty_like(expert_GS), np.empty_like(quota_GS), np.empty_like(load_G)
    weight_G = np.ones(G)
    many_nodes = not node_only and node_G.min() != node_G.max()
    state = np.uint64(88172645463325252)
    bottom = target = goal
    relayed = False
    for t in range(tries + 1):
        last = t == tries or limit < goal
        if last:
            if relayed or not many_nodes or tries < 2 or best_nodes < RELAY:
                break
            target = limit = min(best, limit + 1)
            weight_G[:] = 1.0
        relay = many_nodes and (t == 0 or last)
        nodes = min(best_nodes, RELAY if relay else NEAR) if many_nodes else IGNORE
        try_expert_GS[:], try_quota_GS[:], try_load_G[:] = first_expert_GS, first_quota_GS, first_load_G
        settle_row(target, nodes, near_limit, far_limit, node_only, weight_G, node_G, num_base, try_expert_GS, try_quota_GS, try_load_G)
        reached = try_load_G.max()
        if reached > goal and not (last and reached <= limit):
            reached = split_row(goal, limit, load_E.size, try_expert_GS, try_quota_GS, try_load_G)
        if 0 <= reached <= limit:
            best, limit, relayed = reached, reached - 1, relay
            expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
        if last:
            break
        if t == 0 and limit >= goal:
            goal = bottom = _bound(goal, node_only, node_G, num_base, home_quota_GS)
        elif reached < 0 or reached > target:
            bottom = max(bottom, target)
        if limit - bottom <= goal // 4096:
            bottom = goal
            for g in range(G):
                state ^= state << np.uint64(13)
                state ^= state >> np.uint64(7)
                state ^= state << np.uint64(17)
                weight_G[g] = 1.0 + spread * (np.float64(state >> np.uint64(11)) / 9007199254740992.0 - 0.5)
        target = max(goal, (bottom + limit) // 2)


@njit(nogil=True, cache=True)
def chain_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `Chain`; see `RowSolver.edit` and `Chain.params`."""
    node_only = params[0] != 0.0
    tries, spread, slack, failures, source = np.int64(params[1]), params[2], params[3], np.int64(params[4]), params[5]
    G = quota_GS.shape[0]
    load_G = np.empty(G, np.int64)
    _clean_row(num_base, expert_GS, quota_GS, load_G)
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    goal = _goal(slack, node_only, node_G, load_G)
    home_expert_GS, home_quota_GS = expert_GS.copy(), np.zeros_like(quota_GS)
    home_expert_GS[:, num_base:] = -1
    for g in range(G):
        for b in range(num_base):
            home_quota_GS[g, b] = load_E[expert_GS[g, b]]
    best, (far, num) = max(goal, load_G.max()), _count_row(home_E, node_G, num_base, expert_GS)
    start_expert_GS, start_quota_GS, replicated = expert_GS.copy(), quota_GS.copy(), num > 0
    for keep in (False, True):
        if (keep and not (replicated and source != SCRATCH)) or (not keep and replicated and source == KEEP):
            continue
        try_expert_GS = start_expert_GS.copy() if keep else home_expert_GS.copy()
        try_quota_GS = start_quota_GS.copy() if keep else home_quota_GS.copy()
        for g in range(G):
            load_G[g] = try_quota_GS[g].sum()
        num_tries = 1 if keep and best == goal else tries
        search_row(
            load_E, goal, best, num_tries, spread, np.int64(params[6]), np.int64(params[7]), np.int64(params[8]), node_only, node_G, home_quota_GS, num_base, try_expert_GS, try_quota_GS, load_G
        )  # fmt: skip
        _clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
        reached = max(load_G.max(), goal)
        prune_row(reached, load_E, failures, num_base, try_expert_GS, try_quota_GS, load_G)
        try_far, try_num = _count_row(home_E, node_G, num_base, try_expert_GS)
        if (reached, try_far, try_num) < (best, far, num):
            best, far, num = reached, try_far, try_num
            expert_GS[:], quota_GS[:] = try_expert_GS, try_quota_GS


@njit(nogil=True, cache=True)
def node_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `NodeChain`; see `RowSolver.edit` and `NodeChain.params`."""
    G, S = quota_GS.shape
    load_G = np.empty(G, np.int64)
    _clean_row(num_base, expert_GS, quota_GS, load_G)
    most = load_G.max()
    goal = _goal(params[1], False, node_G, load_G)
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    kept_GS = expert_GS >= 0
    settle_row(goal, RELAY, G, G, False, np.ones(G), node_G, num_base, expert_GS, quota_GS, load_G)
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] < 0 or kept_GS[g, s]:
                continue
            home = home_E[expert_GS[g, s]]
            if node_G[home // S] == node_G[g]:
                quota_GS[home // S, home % S] += quota_GS[g, s]
                load_G[home // S] += quota_GS[g, s]
                load_G[g] -= quota_GS[g, s]
                expert_GS[g, s], quota_GS[g, s] = -1, 0
    # The start is a split over these slots, so its maximum is in reach: only what is above it has to move.
    split_row(most, most, load_E.size, expert_GS, quota_GS, load_G)
    _clean_row(num_base, expert_GS, quota_GS, load_G)


@njit(nogil=True, cache=True)
def chain_rows(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`chain_row` for rows [low, high)."""
    for n in range(low, high):
        chain_row(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])


@njit(nogil=True, cache=True)
def node_rows(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`node_row` for rows [low, high)."""
    for n in range(low, high):
        node_row(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])
