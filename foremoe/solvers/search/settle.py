"""Choice of replicas that settles ranks one after the other.

A replica is an edge from its home rank (the giver) to the rank that holds it (the taker). The capacity of an edge is the number
of pairs that the expert still has at home. With one redundant slot per rank, the edges of a best placement form a forest, and the
flow over an edge is the load that the subtree below it lacks. A taker can therefore be filled exactly to the target and closed,
so that every edge settles one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.solvers.search.copies import give, top_left

# Letters: G ranks, S slots per rank, E experts, V nodes, X places or ends of nodes, I some ranks.


class Wants(NamedTuple):
    """The source ranks of tokens. The arrays are empty if sources do not matter."""

    place_G: Array  # int64, the place of every rank: its node, or the rank itself if there is one node
    want_XE: Array  # int32, pairs of a place's tokens with an expert, less those that replicas serve there; kept up to date


@kernel
def nothing_wanted():
    """Returns empty `Wants`, with which the sources of tokens do not matter."""
    return Wants(np.empty(0, np.int64), np.empty((0, 0), np.int32))


class _Ranks(NamedTuple):
    """State of `settle_on`."""

    by_node_I: Array  # ranks, ordered by node
    first_X: Array  # where every node's ranks begin in `by_node_I`
    top_G: Array  # the most pairs that an expert at home on a rank has left
    free_G: Array  # number of free slots
    open_G: Array  # 1 if a rank can still be filled, else 0
    giver_I: Array  # ranks above the target
    emptiest_V: Array  # every node's emptiest open rank, or -1 if it has none


@inner_kernel
def _emptiest(target, rank_I, open_G, load_G):
    """Returns the least loaded of the given ranks that can still be filled, or -1 if there is none."""
    emptiest, least = -1, target
    for r in rank_I:
        if open_G[r] and load_G[r] < least:
            emptiest, least = r, load_G[r]
    return emptiest


@inner_kernel
def _by_node(node_G, by_node_I, first_X, next_V):
    """Fills `by_node_I` and `first_X` with a counting sort, which is faster than a general one. `next_V` is its memory."""
    for v in range(first_X.size):
        first_X[v] = 0
    for v in node_G:
        first_X[v + 1] += 1
    for v in range(next_V.size):
        next_V[v] = first_X[v]
        first_X[v + 1] += first_X[v]
    for g in range(node_G.size):
        by_node_I[next_V[node_G[g]]] = g
        next_V[node_G[g]] += 1


@kernel
def settle_on(target, rule, copies, wants, placed):
    """Fills takers to `target` in place, the emptiest first, until no rank is above it or no taker is left.

    The giver is the most loaded rank above the target that has an expert with enough pairs left to fill the taker alone. The
    pairs come from the smallest such expert. A giver with a free slot may fall below the target and become a taker itself. Its
    deficit is smaller than the deficit that it filled, so that large experts are kept for deficits that only they can fill. If no
    expert is large enough, the largest of all gives all its pairs. Ranks in the node of the taker are preferred.

    With ``rule.relay``, if no giver in its node can fill the taker, a rank of the node that is itself below the target fills it.
    The deficit of that rank grows, and one larger replica from another node will fill both.

    If `wants` is not empty, the choice is among all experts that can fill the taker alone. The expert that brings most pairs
    nearer to their source is taken. `copies` and `wants` are kept up to date.
    """
    ranks, num_givers = _begin(target, rule, placed)
    _settle(target, rule, copies, wants, placed, ranks, num_givers)


@inner_kernel
def _settle(target, rule, copies, wants, placed, ranks, num_givers):
    """Does the work of `settle_on` after `_begin`."""
    quota_GS, load_G, num_base = placed.quota_GS, placed.load_G, rule.num_base
    while num_givers > 0:
        r = _taker(ranks.emptiest_V, load_G)
        if r < 0:
            break
        need = target - load_G[r]
        g, b = _pick(target, r, num_givers, rule, copies, wants, placed, ranks)
        if g < 0:  # no rank may give to this one, and none will later
            ranks.open_G[r] = 0
            _renew_emptiest(target, r, rule, ranks, load_G)
            continue
        amount = min(need, np.int64(quota_GS[g, b]))
        if ranks.free_G[g] == 0:
            amount = min(amount, load_G[g] - target)
        if wants.want_XE.size > 0:
            wants.want_XE[wants.place_G[r], placed.expert_GS[g, b]] -= amount
        new = give(g, b, r, amount, rule, copies, placed)
        if new:
            ranks.free_G[r] -= 1
            ranks.open_G[r] = ranks.free_G[r] > 0
        if load_G[g] + amount > target >= load_G[g]:
            num_givers -= 1
            for i in range(num_givers):
                if ranks.giver_I[i] == g:
                    ranks.giver_I[i] = ranks.giver_I[num_givers]
        ranks.top_G[g] = top_left(g, num_base, quota_GS)
        _renew_emptiest(target, r, rule, ranks, load_G)
        if rule.node_G[g] != rule.node_G[r]:
            _renew_emptiest(target, g, rule, ranks, load_G)


@inner_kernel
def _pick(target, r, num_givers, rule, copies, wants, placed, ranks):
    """Returns the giver for rank r, or -1 if there is none, and its base slot."""
    if wants.want_XE.size > 0:
        g, b = _nearest(target, r, num_givers, rule, copies, wants, placed, ranks)
        if g >= 0:
            return g, b
    g, alone, far, reach = _giver(target, r, num_givers, rule, copies, ranks, placed.load_G)
    if g < 0:
        return g, np.int64(-1)
    if rule.relay and far:
        mate = _mate(target, r, reach, rule, copies, ranks, placed.load_G)
        if mate >= 0:
            g, alone = mate, True
    return g, _expert(g, target - placed.load_G[r], alone, rule.num_base, placed.quota_GS)


@inner_kernel
def _nearest(target, r, num_givers, rule, copies, wants, placed, ranks):
    """Returns the giver and base slot that bring most pairs nearer and can fill rank r alone, or -1 and -1 if none can.

    The gain is the pairs that the taker's place wants, less those that the giver's place would then have to send away. Ties go
    to the lowest rank, then to the expert with the fewest pairs left.
    """
    node_G, (place_G, want_XE), need, x = rule.node_G, wants, target - placed.load_G[r], wants.place_G[r]
    giver, slot, most, least = np.int64(-1), np.int64(-1), np.int64(0), np.int64(0)
    for i in range(num_givers):
        g = ranks.giver_I[i]
        if ranks.free_G[g] == 0 and placed.load_G[g] - target < need:
            continue
        if copies.near_G[g] >= copies.near_limit if node_G[g] == node_G[r] else copies.far_G[g] >= copies.far_limit:
            continue
        for b in range(rule.num_base):
            left, gain = np.int64(placed.quota_GS[g, b]), np.int64(0)
            if left < need:
                continue
            if place_G[g] != x:
                e = placed.expert_GS[g, b]
                spare = left - want_XE[place_G[g], e]
                gain = min(need, max(0, np.int64(want_XE[x, e]))) - min(need, max(0, need - spare))
            better = gain > most or (gain == most and (g < giver or (g == giver and left < least)))
            if giver < 0 or better:
                giver, slot, most, least = g, np.int64(b), gain, left
    return giver, slot


@kernel
def _begin(target, rule, placed):
    """Returns the state of `settle_on` before the first move, and the number of givers."""
    num_nodes = rule.node_G.max() + 1
    of_rank_5G, of_node_2X = np.empty((5, placed.load_G.size), np.int64), np.empty((2, num_nodes + 1), np.int64)
    by_node_I, top_G, free_G, open_G, giver_I = of_rank_5G[0], of_rank_5G[1], of_rank_5G[2], of_rank_5G[3], of_rank_5G[4]
    emptiest_V = of_node_2X[1, :num_nodes]
    ranks = _Ranks(by_node_I, of_node_2X[0], top_G, free_G, open_G, giver_I, emptiest_V)
    _by_node(rule.node_G, by_node_I, ranks.first_X, emptiest_V)
    return ranks, _fill(target, rule, placed, ranks)


@inner_kernel
def _fill(target, rule, placed, ranks):
    """Fills the state of `settle_on`. Returns the number of givers."""
    expert_GS, quota_GS, load_G = placed
    num_base = rule.num_base
    G, S = quota_GS.shape
    num_givers = np.int64(0)
    for g in range(G):
        ranks.top_G[g], ranks.free_G[g] = top_left(g, num_base, quota_GS), 0
        for s in range(num_base, S):
            ranks.free_G[g] += expert_GS[g, s] < 0
        ranks.open_G[g] = ranks.free_G[g] > 0
        if load_G[g] > target:
            ranks.giver_I[num_givers] = g
            num_givers += 1
    for v in range(ranks.emptiest_V.size):
        mate_I = ranks.by_node_I[ranks.first_X[v] : ranks.first_X[v + 1]]
        ranks.emptiest_V[v] = _emptiest(target, mate_I, ranks.open_G, load_G)
    return num_givers


@inner_kernel
def _renew_emptiest(target, r, rule, ranks, load_G):
    """Updates the emptiest rank in the node of rank r."""
    v = rule.node_G[r]
    ranks.emptiest_V[v] = _emptiest(target, ranks.by_node_I[ranks.first_X[v] : ranks.first_X[v + 1]], ranks.open_G, load_G)


@inner_kernel
def _taker(emptiest_V, load_G):
    """Returns the emptiest rank of all nodes, or -1 if there is none. Ties go to the lowest rank."""
    r = np.int64(-1)
    for other in emptiest_V:
        if other >= 0 and (r < 0 or load_G[other] < load_G[r] or (load_G[other] == load_G[r] and other < r)):
            r = other
    return r


@inner_kernel
def _giver(target, r, num_givers, rule, copies, ranks, load_G):
    """Returns the best giver for rank r, or -1 if there is none, and whether it can fill the rank alone. Also returns whether it
    is in another node or can fill the rank only in part, and the most pairs that an expert in another node has left."""
    node_G, blind, weight_G = rule.node_G, rule.blind, rule.weight_G
    near_G, far_G, near_limit, far_limit = copies.near_G, copies.far_G, copies.near_limit, copies.far_limit
    top_G, free_G, giver_I = ranks.top_G, ranks.free_G, ranks.giver_I
    mate_I = ranks.by_node_I[ranks.first_X[node_G[r]] : ranks.first_X[node_G[r] + 1]]
    need = target - load_G[r]
    # Tiers: 0 fills the rank in part, 1 and 2 from another node, 3 and 4 from this one. Givers of 2 and 4 have a free slot.
    g, tier, key, reach = np.int64(-1), -1, 0.0, np.int64(0)
    for near in (True, False):
        if not near and not blind and (rule.node_only or tier > 2 or ranks.emptiest_V.size == 1):
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
    return g, tier > 0, tier < 3, reach


@inner_kernel
def _mate(target, r, reach, rule, copies, ranks, load_G):
    """Returns a rank (or -1) of the node that can fill rank r, so that an expert with `reach` pairs then fills both deficits."""
    v, chosen, need = rule.node_G[r], np.int64(-1), target - load_G[r]
    for mate in ranks.by_node_I[ranks.first_X[v] : ranks.first_X[v + 1]]:
        deficit = target - load_G[mate]
        if mate == r or deficit <= 0 or not ranks.open_G[mate] or copies.near_G[mate] >= copies.near_limit:
            continue
        if ranks.top_G[mate] >= need and need + deficit <= reach and (chosen < 0 or load_G[mate] > load_G[chosen]):
            chosen = mate
    return chosen


@inner_kernel
def _expert(g, need, alone, num_base, quota_GS):
    """Returns the base slot of rank g with the fewest pairs that fill `need`, or with the most pairs if `alone` is False."""
    best = np.int64(-1)
    for b in range(num_base):
        left = quota_GS[g, b]
        fits = left >= need if alone else left > 0
        if fits and (best < 0 or (left < quota_GS[g, best] if alone else left > quota_GS[g, best])):
            best = b
    return best
