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

# Vain tries after which `prune_row` stops.
FAILURES = 4


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
    return np.int64(top)


@njit(nogil=True, cache=True)
def _emptiest(target, rank_I, open_G, load_G):  # type: ignore[no-untyped-def]
    """The least loaded of some ranks that can still be filled, -1 if there is none."""
    emptiest, least = -1, target
    for r in rank_I:
        if open_G[r] and load_G[r] < least:
            emptiest, least = r, load_G[r]
    return emptiest


@njit(nogil=True, cache=True)
def settle_row(target, relay, near_limit, far_limit, node_only, weight_G, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Fills takers to `target`, the emptiest first, until no rank is above it or no taker is left; in place.

    The giver is the most loaded rank above the target that has an expert with enough left to fill the taker alone; of its
    experts the smallest that does. It may fall below the target if it has a free slot: then it becomes a taker itself, and its
    deficit is smaller than the one it filled, so large experts are used where only they will do. If no expert is large enough,
    the largest of all gives what it has. Ranks of the taker's own node go first.

    With `relay`, where no rank of the node can fill the taker, a node mate that is itself below the target does: its deficit
    grows, and one larger replica from another node will fill both.

    Args:
        near_limit, far_limit: most copies out of a home rank inside its node, and to other nodes.
        weight_G: float64, favours givers; all 1.0 but for repeated tries.
        load_G: int64, kept up to date.
    """
    G, S = quota_GS.shape
    num_nodes = node_G.max() + 1
    by_node_G = np.argsort(node_G, kind="mergesort")
    first_X = np.searchsorted(node_G[by_node_G], np.arange(num_nodes + 1))
    top_G, free_G, near_G, far_G = np.empty(G, np.int64), np.zeros(G, np.int64), np.zeros(G, np.int64), np.zeros(G, np.int64)
    open_G = np.empty(G, np.bool_)
    giver_I, num_givers = np.empty(G, np.int64), 0
    for g in range(G):
        top_G[g] = _top(g, num_base, quota_GS)
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
        open_G[g] = free_G[g] > 0
        if load_G[g] > target:
            giver_I[num_givers] = g
            num_givers += 1
    emptiest_V = np.empty(num_nodes, np.int64)
    for v in range(num_nodes):
        emptiest_V[v] = _emptiest(target, by_node_G[first_X[v] : first_X[v + 1]], open_G, load_G)
    while num_givers > 0:
        r = -1
        for other in emptiest_V:
            if other >= 0 and (r < 0 or load_G[other] < load_G[r] or (load_G[other] == load_G[r] and other < r)):
                r = other
        if r < 0:
            break
        need = target - load_G[r]
        mate_I = by_node_G[first_X[node_G[r]] : first_X[node_G[r] + 1]]

        # Rank the givers: 0 fills in part, 1 and 2 from another node, 3 and 4 from this one; 2 and 4 have a free slot.
        g, tier, key, reach = -1, -1, 0.0, np.int64(0)
        for near in (True, False):
            if not near and (node_only or tier > 2 or num_nodes == 1):
                break
            for i in range(mate_I.size if near else num_givers):
                other = mate_I[i] if near else giver_I[i]
                over = load_G[other] - target
                if over <= 0 or top_G[other] == 0 or (near_G[other] >= near_limit if near else far_G[other] >= far_limit):
                    continue
                if not near:
                    if node_G[other] == node_G[r]:
                        continue
                    reach = max(reach, top_G[other])
                free = free_G[other] > 0
                if top_G[other] >= need and (free or over >= need):
                    this_tier = 1 + free + 2 * near
                    this = over * weight_G[other]
                else:
                    this_tier = 0
                    this = (top_G[other] if free else min(top_G[other], over)) * weight_G[other]
                if this_tier > tier or (this_tier == tier and (this > key or (this == key and other < g))):
                    g, tier, key = other, this_tier, this
        if g < 0:  # nobody may give to this rank, and no giver will appear later
            open_G[r] = False
            emptiest_V[node_G[r]] = _emptiest(target, mate_I, open_G, load_G)
            continue
        if relay and tier < 3:
            chosen = -1
            for mate in mate_I:
                deficit = target - load_G[mate]
                if mate == r or deficit <= 0 or not open_G[mate] or near_G[mate] >= near_limit:
                    continue
                if top_G[mate] >= need and need + deficit <= reach and (chosen < 0 or load_G[mate] > load_G[chosen]):
                    chosen = mate
            if chosen >= 0:
                g, tier = chosen, 1

        best = -1
        for b in range(num_base):
            left = quota_GS[g, b]
            fits = left >= need if tier > 0 else left > 0
            if fits and (best < 0 or (left < quota_GS[g, best] if tier > 0 else left > quota_GS[g, best])):
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
            open_G[r] = free_G[r] > 0
            if node_G[g] == node_G[r]:
                near_G[g] += 1
            else:
                far_G[g] += 1
        quota_GS[r, slot] += amount
        quota_GS[g, best] -= amount
        if load_G[g] > target >= load_G[g] - amount:
            num_givers -= 1
            for i in range(num_givers):
                if giver_I[i] == g:
                    giver_I[i] = giver_I[num_givers]
        load_G[r] += amount
        load_G[g] -= amount
        top_G[g] = _top(g, num_base, quota_GS)
        emptiest_V[node_G[r]] = _emptiest(target, mate_I, open_G, load_G)
        if node_G[g] != node_G[r]:
            v = node_G[g]
            emptiest_V[v] = _emptiest(target, by_node_G[first_X[v] : first_X[v + 1]], open_G, load_G)


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
    weight_G = np.ones(load_G.size)
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
        settle_row(
            target, relay, near_limit, far_limit, node_only, weight_G, node_G, num_base, try_expert_GS, try_quota_GS, try_load_G
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


@njit(nogil=True, cache=True)
def chain_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `Chain`; see `RowSolver.edit` for the arguments.

    Args:
        params: stay inside nodes (0 or 1), tries, spread, slack, most copies out of a home inside its node and to other nodes,
            relays (0 or 1), start's replicas too (0 or 1).
    """
    node_only, slack = params[0] != 0.0, params[3]
    G = quota_GS.shape[0]
    load_G = np.empty(G, np.int64)
    _clean_row(num_base, expert_GS, quota_GS, load_G)
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    goal = _goal(slack, node_only, node_G, load_G)
    far, num = _count_row(home_E, node_G, num_base, expert_GS)
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
        _clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
        if keep and best == goal:
            if far <= start_far:
                break  # nothing to gain: the start's replicas across nodes would all stay
            params[1] = 0.0
        search_row(load_E, goal, best, params, node_G, home_quota_GS, num_base, try_expert_GS, try_quota_GS, load_G)
        _clean_row(num_base, try_expert_GS, try_quota_GS, load_G)
        reached = max(load_G.max(), goal)
        prune_row(reached, load_E, FAILURES, num_base, try_expert_GS, try_quota_GS, load_G)
        try_far, try_num = _count_row(home_E, node_G, num_base, try_expert_GS)
        if (reached, try_far, try_num) < (best, far, num):
            best, far, num = reached, try_far, try_num
            expert_GS[:], quota_GS[:] = try_expert_GS, try_quota_GS


@njit(nogil=True, cache=True)
def _nodes_over(target, node_G, load_G):  # type: ignore[no-untyped-def]
    """Pairs by which nodes exceed `target` per rank, summed over nodes."""
    over_V = np.zeros(node_G.max() + 1, np.int64)
    for g in range(load_G.size):
        over_V[node_G[g]] += load_G[g] - target
    return np.maximum(over_V, 0).sum()


@njit(nogil=True, cache=True)
def node_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `NodeChain`; see `RowSolver.edit`."""
    G, S = quota_GS.shape
    load_G = np.empty(G, np.int64)
    _clean_row(num_base, expert_GS, quota_GS, load_G)
    most = load_G.max()
    goal = _goal(0.0, False, node_G, load_G)
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    kept_GS = expert_GS >= 0
    start_expert_GS, start_quota_GS, over = expert_GS.copy(), quota_GS.copy(), _nodes_over(goal, node_G, load_G)
    settle_row(goal, True, G, G, False, np.ones(G), node_G, num_base, expert_GS, quota_GS, load_G)
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
    if _nodes_over(goal, node_G, load_G) >= over:
        expert_GS[:], quota_GS[:] = start_expert_GS, start_quota_GS
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
