"""Pushes of pairs from busy ranks to other slots of their experts, so that replicas near tokens level the load."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel

# Letters: G ranks, S slots per rank, V groups of nodes, E experts, P = G*S slots, I replicas.


class Groups(NamedTuple):
    """Groups of nodes, and the pairs of each group's tokens with every expert."""

    group_G: Array
    demand_VE: Array


class Scratch(NamedTuple):
    """Memory of one row."""

    home_E: Array  # int64, home slot p = g*S + b of every expert
    price_G: Array  # float64, price of serving a pair on a rank, in units of a pair that leaves its group
    gain_I: Array  # float64
    expert_I: Array  # int64
    pairs_I: Array  # int64
    first_E: Array  # int64, a replica of the expert, or -1
    next_P: Array  # int64, the next replica of the same expert, or -1
    served_V: Array  # int64
    out_G: Array  # int64, replicas whose home is on the rank


@inner_kernel
def _link(placed, scratch):
    """Links the replicas of every expert. Replicas without quota are included because pairs may be pushed to them."""
    G, S = placed.expert_GS.shape
    scratch.first_E[:] = -1
    for g in range(G):
        for s in range(scratch.home_E.size // G, S):
            e = placed.expert_GS[g, s]
            if e >= 0:
                scratch.next_P[g * S + s], scratch.first_E[e] = scratch.first_E[e], g * S + s


@inner_kernel
def _count_served(e, group_G, placed, scratch):
    """Counts the pairs of an expert that each group serves, in `scratch.served_V`."""
    S, home = placed.expert_GS.shape[1], scratch.home_E[e]
    scratch.served_V[:] = 0
    scratch.served_V[group_G[home // S]] += placed.quota_GS[home // S, home % S]
    p = scratch.first_E[e]
    while p >= 0:
        scratch.served_V[group_G[p // S]] += placed.quota_GS[p // S, p % S]
        p = scratch.next_P[p]


@inner_kernel
def _best_push(busiest, goal, near, placed, scratch):
    """Returns the cheapest push of pairs from a rank to another slot of their expert: (slot, other slot, pairs), or -1 slots.

    A push is cheap if it does not make more pairs leave their group, and cheaper if fewer leave it. Ranks that are above the goal
    are the last choice because they would have to push pairs themselves.
    """
    expert_GS, quota_GS, load_G = placed
    S, group_G = expert_GS.shape[1], near.group_G
    best_cost, best = 9, (np.int64(-1), np.int64(-1), np.int64(0))
    for s in range(S):
        e = np.int64(expert_GS[busiest, s])
        if e < 0 or quota_GS[busiest, s] == 0 or scratch.first_E[e] < 0:
            continue
        _count_served(e, group_G, placed, scratch)
        here = group_G[busiest]
        p, following = scratch.home_E[e], scratch.first_E[e]
        while p >= 0:
            g = p // S
            if g != busiest and load_G[g] < load_G[busiest] - 1:
                room = goal - load_G[g] if load_G[g] < goal else (load_G[busiest] - load_G[g]) // 2
                pairs, cost = min(room, load_G[busiest] - goal, np.int64(quota_GS[busiest, s])), 0 if load_G[g] < goal else 1
                if group_G[g] != here:
                    spare = scratch.served_V[here] - near.demand_VE[here, e]
                    lack = near.demand_VE[group_G[g], e] - scratch.served_V[group_G[g]]
                    pairs = min(pairs, spare) if spare > 0 else pairs
                    pairs = min(pairs, lack) if lack > 0 else pairs
                    cost += 2 * (spare <= 0) - 2 * (lack > 0)
                if pairs > 0 and (cost < best_cost or (cost == best_cost and pairs > best[2])):
                    best_cost, best = cost, (busiest * S + s, p, pairs)
            p = following
            following = scratch.next_P[p] if p >= 0 else -1
    return best


@inner_kernel
def push(goal, near, placed, scratch):
    """Pushes pairs off the busiest rank until no rank is above the goal or the busiest rank cannot push any."""
    S, load_G = placed.expert_GS.shape[1], placed.load_G
    _link(placed, scratch)
    for _ in range(6 * load_G.size):
        busiest = load_G.argmax()
        if load_G[busiest] <= goal:
            return
        p, q, pairs = _best_push(busiest, goal, near, placed, scratch)
        if p < 0:
            return
        placed.quota_GS[p // S, p % S] -= pairs
        placed.quota_GS[q // S, q % S] += pairs
        load_G[p // S] -= pairs
        load_G[q // S] += pairs
