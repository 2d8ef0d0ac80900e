"""Exact test of whether a few ranks with one redundant slot each can reach a maximum load. It examines all sets of ranks.

Every rank has one redundant slot, so the moves of load from homes to slots form trees and cycles. A cycle can be broken by moving
less load along all of its edges. A rank below the maximum does not have to give load, because the rank that gives load to it can
give the same expert to another rank instead. So only ranks above the maximum give. The division of a giver's experts limits the
maximum. A set of ranks takes at most the load of one expert, and at most the load by which the set is below the maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel

# Letters: N rows, G ranks, B base slots, C ranks that give, J their largest experts, counted from none, Q sets of ranks, as bits.

# Largest number of ranks, as in an NVLink node. Each further rank would take three times as long.
MOST_RANKS = 8
# The quick bound is seldom looser than this. If the gap is larger, the placement is usually not optimal.
WITHIN = 1.06
# The bound is settled to within this factor.
NEAR = 1.005


class _Sets(NamedTuple):
    """Most load that each set of ranks can take from outside, or -1 if some rank in it stays above the maximum in any case."""

    taken_Q: Array  # int64, if one expert has unlimited load
    taken_CJQ: Array  # int64, of the j largest experts of one giver


@kernel
def _below_givers(target, members, load_G, giver_G, sets):
    """Returns the load that the set takes from outside, as one tree under any of its givers, or as two sets."""
    G, best = load_G.size, np.int64(-1)
    last = sets.taken_CJQ.shape[1] - 1
    for g in range(G):
        if (members >> g) & 1 and giver_G[g] >= 0:
            passed = sets.taken_CJQ[giver_G[g], last, members ^ (1 << g)]
            if passed >= 0:
                best = max(best, target - load_G[g] + passed)
    first = members & -members
    rest = members ^ first
    part = (rest - 1) & rest
    while part != rest and rest:
        one, other = sets.taken_Q[part | first], sets.taken_Q[rest ^ part]
        if one >= 0 and other >= 0:
            best = max(best, one + other)
        part = (part - 1) & rest
    return best


@kernel
def _share_out(members, load_J, taken_JQ, taken_Q):
    """Fills in the load that the set takes of the j largest experts. Some of its ranks take the last one, the others the rest."""
    taken_JQ[0, members] = min(taken_Q[members], 0)
    for j in range(1, taken_JQ.shape[0]):
        best, part = taken_JQ[j - 1, members], members
        while part:
            before = taken_JQ[j - 1, members ^ part]
            if taken_Q[part] >= 0 and before >= 0:
                best = max(best, before + min(load_J[j - 1], taken_Q[part]))
            part = (part - 1) & members
        taken_JQ[j, members] = best


@kernel
def reachable(target, load_GB):
    """Returns True if replicas can bring all ranks to at most `target`. Each row of `load_GB` (int64) is in descending order."""
    G, B = load_GB.shape
    load_G, giver_G, num = np.empty(G, np.int64), np.full(G, -1), 0
    givers = 0
    for g in range(G):
        load_G[g] = load_GB[g].sum()
        if load_G[g] > target:
            giver_G[g], num = num, num + 1
            givers |= 1 << g
    sets = _Sets(np.zeros(1 << G, np.int64), np.zeros((num, min(B, G - 1) + 1, 1 << G), np.int64))
    for members in range(1 << G):
        if members & givers:
            sets.taken_Q[members] = _below_givers(target, members, load_G, giver_G, sets)
        else:
            for g in range(G):
                if (members >> g) & 1:
                    sets.taken_Q[members] += target - load_G[g]
        for g in range(G):
            if giver_G[g] >= 0 and not (members >> g) & 1:
                _share_out(members, load_GB[g], sets.taken_CJQ[giver_G[g]], sets.taken_Q)
    return sets.taken_Q[(1 << G) - 1] >= 0


@kernel
def settle_rows(low, high, load_NE, homes, reached_N, bound_N):
    """Raises bounds that are near `reached_N`, for rows [low, high). A bound becomes `reached_N` if that load is optimal.

    If it is not optimal, the bound is raised to within the factor `NEAR` of the optimum.
    """
    G, B = homes.base_NGB.shape[1:]
    domain_G = homes.node_G if homes.node_only else np.zeros_like(homes.node_G)
    domains = [domain_G == domain for domain in range(domain_G.max() + 1)]
    if homes.redundant != 1 or np.bincount(domain_G).max() > MOST_RANKS:
        return
    load_GB = np.empty((G, B), np.int64)
    for n in range(low, high):
        if not bound_N[n] < reached_N[n] <= WITHIN * bound_N[n]:
            continue
        for g in range(G):
            for b in range(B):
                load_GB[g, b] = load_NE[n, homes.base_NGB[n, g, b]]
            load_GB[g] = -np.sort(-load_GB[g])
        least, most = np.int64(bound_N[n]), np.int64(reached_N[n])
        target = most - 1
        while target >= least:
            stuck = 0
            for member_G in domains:
                stuck += not reachable(target, load_GB[member_G])
            least, most = (target + 1, most) if stuck else (least, target)
            target = (least + most) // 2 if most > NEAR * least else least - 1
        bound_N[n] = least
