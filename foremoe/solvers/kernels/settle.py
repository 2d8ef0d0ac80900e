"""Replicas by settling ranks one after the other.

A replica is an edge from its home rank (the giver) to the rank that holds it (the taker), whose capacity is what is left of
the expert's load. With one redundant slot per rank the edges of a best placement form a forest, and what flows over an edge
is what the subtree below it lacks; so a taker can be filled exactly to the target and closed, one rank per edge.
"""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.


@kernel
def top_left(g, num_base, quota_GS):  # type: ignore[no-untyped-def]
    """What is left of the largest expert at home on rank g."""
    top = quota_GS[g, 0]
    for b in range(1, num_base):
        top = max(top, quota_GS[g, b])
    return np.int64(top)


@kernel
def _emptiest(target, rank_I, open_G, load_G):  # type: ignore[no-untyped-def]
    """The least loaded of some ranks that can still be filled, -1 if there is none."""
    emptiest, least = -1, target
    for r in rank_I:
        if open_G[r] and load_G[r] < least:
            emptiest, least = r, load_G[r]
    return emptiest


@kernel
def _by_node(num_nodes, node_G):  # type: ignore[no-untyped-def]
    """int64 [G] and [V + 1]: the ranks of all nodes in order, and where every node's begin; counting beats a sort."""
    rank_G, first_X = np.empty(node_G.size, np.int64), np.zeros(num_nodes + 1, np.int64)
    for v in node_G:
        first_X[v + 1] += 1
    for v in range(1, num_nodes):
        first_X[v + 1] += first_X[v]
    next_X = first_X.copy()
    for g in range(node_G.size):
        rank_G[next_X[node_G[g]]] = g
        next_X[node_G[g]] += 1
    return rank_G, first_X


@kernel
def slot_for(expert, r, num_base, expert_GS):  # type: ignore[no-untyped-def]
    """The redundant slot of rank r that holds the expert already, else its first free one, else -1."""
    slot = -1
    for s in range(num_base, expert_GS.shape[1]):
        if expert_GS[r, s] == expert:
            return s
        if expert_GS[r, s] < 0 and slot < 0:
            slot = s
    return slot


@kernel
def settle_row(target, relay, near_limit, far_limit, node_only, weight_G, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """`settle_on` from a placement without replicas of its own: not thrifty and without a log."""
    G = load_G.size
    log_C6 = np.empty((0, 6), np.int64)
    settle_on(
        target, relay, near_limit, far_limit, node_only, False, False, weight_G, node_G, num_base, np.zeros(G, np.int64),
        np.zeros(G, np.int64), log_C6, 0, expert_GS, quota_GS, load_G,
    )  # fmt: skip


@kernel
def settle_on(  # type: ignore[no-untyped-def]
    target, relay, near_limit, far_limit, node_only, blind, thrifty, weight_G, node_G, num_base, near_G, far_G, log_C6, num_moves,
    expert_GS, quota_GS, load_G,
):  # fmt: skip
    """Fills takers to `target`, the emptiest first, until no rank is above it or no taker is left; in place.

    The giver is the most loaded rank above the target that has an expert with enough left to fill the taker alone; of its
    experts the smallest that does. It may fall below the target if it has a free slot: then it becomes a taker itself, and its
    deficit is smaller than the one it filled, so large experts are used where only they will do. If no expert is large enough,
    the largest of all gives what it has. Ranks of the taker's own node go first.

    With `relay`, where no rank of the node can fill the taker, a node mate that is itself below the target does: its deficit
    grows, and one larger replica from another node will fill both.

    With `thrifty` and a target above the mean, a giver whose whole excess nearly fills the taker goes before all others: one
    replica then settles both. What the taker is left without comes out of what the target allows in all.

    With `blind`, nodes do not matter for who gives.

    Args:
        near_limit, far_limit: most copies out of a home rank inside its node, and to other nodes.
        weight_G: float64, favours givers; all 1.0 but for repeated tries.
        near_G, far_G: int64, copies out of every home rank so far, kept up to date.
        log_C6, num_moves: int64, moves are appended from `num_moves` on: giver, its slot, taker, its slot, pairs, 1 for a new
            replica; nothing is logged if it has no rows.

    Returns:
        the number of moves in the log.
    """
    G, S = quota_GS.shape
    num_nodes = node_G.max() + 1
    by_node_G, first_X = _by_node(num_nodes, node_G)
    top_G, free_G = np.empty(G, np.int64), np.zeros(G, np.int64)
    open_G = np.empty(G, np.bool_)
    giver_I, num_givers = np.empty(G, np.int64), 0
    for g in range(G):
        top_G[g] = top_left(g, num_base, quota_GS)
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
        open_G[g] = free_G[g] > 0
        if load_G[g] > target:
            giver_I[num_givers] = g
            num_givers += 1
    emptiest_V = np.empty(num_nodes, np.int64)
    for v in range(num_nodes):
        emptiest_V[v] = _emptiest(target, by_node_G[first_X[v] : first_X[v + 1]], open_G, load_G)
    # What may stay unfilled in all: a target above the mean leaves room for moves that settle two ranks at once.
    spare_V = np.zeros(num_nodes, np.int64)
    for g in range(G if thrifty else 0):
        spare_V[node_G[g] if node_only else 0] += target - load_G[g]
    while num_givers > 0:
        r = -1
        for other in emptiest_V:
            if other >= 0 and (r < 0 or load_G[other] < load_G[r] or (load_G[other] == load_G[r] and other < r)):
                r = other
        if r < 0:
            break
        need = target - load_G[r]
        mate_I = by_node_G[first_X[node_G[r]] : first_X[node_G[r] + 1]]

        pool = node_G[r] if node_only else 0
        match, match_gap = -1, min(spare_V[pool], 2 * spare_V[pool] // num_givers)
        for near in (True, False):
            if match_gap <= 0 or (not near and (node_only or match >= 0)):
                break
            for i in range(0 if near and blind else mate_I.size if near else num_givers):
                other = mate_I[i] if near else giver_I[i]
                over = load_G[other] - target
                if over <= 0 or over > need or need - over >= match_gap or top_G[other] < over:
                    continue
                if near_G[other] < near_limit if node_G[other] == node_G[r] else far_G[other] < far_limit:
                    match, match_gap = other, need - over
        if match >= 0:
            spare_V[pool] -= match_gap
            need -= match_gap

        # Rank the givers: 0 fills in part, 1 and 2 from another node, 3 and 4 from this one; 2 and 4 have a free slot.
        g, tier, key, reach = -1, -1, 0.0, np.int64(0)
        for near in (True, False):
            if match >= 0:
                g, tier = match, 1
                break
            if not near and not blind and (node_only or tier > 2 or num_nodes == 1):
                break
            if near and blind:
                continue
            for i in range(mate_I.size if near else num_givers):
                other = mate_I[i] if near else giver_I[i]
                over = load_G[other] - target
                same = near or node_G[other] == node_G[r]
                if over <= 0 or top_G[other] == 0 or (near_G[other] >= near_limit if same else far_G[other] >= far_limit):
                    continue
                if not near:
                    if same and not blind:
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
        if relay and match < 0 and tier < 3:
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
        slot = slot_for(expert_GS[g, best], r, num_base, expert_GS)
        fresh = expert_GS[r, slot] < 0
        if fresh:
            expert_GS[r, slot] = expert_GS[g, best]
            free_G[r] -= 1
            open_G[r] = free_G[r] > 0
            if node_G[g] == node_G[r]:
                near_G[g] += 1
            else:
                far_G[g] += 1
        if log_C6.shape[0] > 0:
            if num_moves == log_C6.shape[0]:
                break
            log_C6[num_moves, 0], log_C6[num_moves, 1], log_C6[num_moves, 2] = g, best, r
            log_C6[num_moves, 3], log_C6[num_moves, 4], log_C6[num_moves, 5] = slot, amount, fresh
            num_moves += 1
        quota_GS[r, slot] += amount
        quota_GS[g, best] -= amount
        if load_G[g] > target >= load_G[g] - amount:
            num_givers -= 1
            for i in range(num_givers):
                if giver_I[i] == g:
                    giver_I[i] = giver_I[num_givers]
        load_G[r] += amount
        load_G[g] -= amount
        top_G[g] = top_left(g, num_base, quota_GS)
        emptiest_V[node_G[r]] = _emptiest(target, mate_I, open_G, load_G)
        if node_G[g] != node_G[r]:
            v = node_G[g]
            emptiest_V[v] = _emptiest(target, by_node_G[first_X[v] : first_X[v + 1]], open_G, load_G)
    return num_moves
