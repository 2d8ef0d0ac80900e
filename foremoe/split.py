"""The split law: how the quotas of an expert's slots are shared out over source ranks.

A pure function, so every rank can compute its own part: tier 1, a rank's tokens go to its own slot; tier 2, to slots of its own
node; tier 3, anywhere. Within a tier, what sources still have (in rank order) and what slots still take (in slot order) are laid
out as intervals on one line, and a source sends a slot the overlap of their intervals.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from foremoe.arrays import Array
from foremoe.parallel import for_rows

# Letters: N rows, G ranks, E experts, S slots per rank, P = G*S physical slots.


def split_over_sources(load_NGE: Array, expert_NGS: Array, quota_NGS: Array, node_of_rank_G: Array, rank: int) -> Array:
    """int32 [N, P]: how many pairs of its own source rank `rank` sends to every physical slot.

    Args:
        load_NGE: int32, pairs by source rank; summed over sources it equals each expert's summed quota.
        expert_NGS, quota_NGS: the placement.
        node_of_rank_G: int32 node of each rank.
    """
    N, G, S = expert_NGS.shape
    split_NP = np.zeros((N, G * S), np.int32)
    for_rows(
        lambda low, high: _split_rows(low, high, load_NGE, expert_NGS, quota_NGS, node_of_rank_G, rank, split_NP), N, whole=True
    )
    return split_NP


@njit(nogil=True, cache=True)
def _split_rows(low, high, load_NGE, expert_NGS, quota_NGS, node_G, rank, split_NP):  # type: ignore[no-untyped-def]
    G, S = expert_NGS.shape[1], expert_NGS.shape[2]
    E = load_NGE.shape[2]
    num_nodes = 0
    for g in range(G):
        num_nodes = max(num_nodes, node_G[g] + 1)
    count_E = np.zeros(E, np.int64)
    first_E = np.zeros(E, np.int64)
    next_P = np.zeros(G * S, np.int64)  # the next slot of the same expert, -1 none
    demand_G = np.zeros(G, np.int64)
    quota_G = np.zeros(G, np.int64)
    slot_G = np.zeros(G, np.int64)
    for n in range(low, high):
        count_E[:] = 0
        for p in range(G * S):
            e = expert_NGS[n, p // S, p % S]
            if e >= 0 and quota_NGS[n, p // S, p % S] > 0:
                next_P[p] = first_E[e] if count_E[e] > 0 else -1
                first_E[e] = p
                count_E[e] += 1
        for e in range(E):
            mine = load_NGE[n, rank, e]
            if mine == 0 or count_E[e] == 0:
                continue
            if count_E[e] == 1:
                split_NP[n, first_E[e]] = mine
                continue
            slot_G[:] = -1
            for g in range(G):
                demand_G[g] = load_NGE[n, g, e]
                quota_G[g] = 0
            p = first_E[e]
            while p >= 0:
                slot_G[p // S] = p
                quota_G[p // S] = quota_NGS[n, p // S, p % S]
                p = next_P[p]
            for g in range(G):
                own = min(demand_G[g], quota_G[g])
                if g == rank and own > 0:
                    split_NP[n, slot_G[g]] += own
                demand_G[g] -= own
                quota_G[g] -= own
            for node in range(num_nodes):
                _overlap(demand_G, quota_G, slot_G, node_G, node, rank, split_NP[n])
            _overlap(demand_G, quota_G, slot_G, node_G, -1, rank, split_NP[n])


@njit(nogil=True, cache=True)
def _overlap(demand_G, quota_G, slot_G, node_G, node, rank, split_P):  # type: ignore[no-untyped-def]
    """Matches intervals of the ranks of `node` (-1: of all ranks) and takes what was matched off demand and quota."""
    G = demand_G.size
    total_demand = 0
    total_quota = 0
    for g in range(G):
        if node < 0 or node_G[g] == node:
            total_demand += demand_G[g]
            total_quota += quota_G[g]
    matched = min(total_demand, total_quota)
    if matched == 0:
        return
    begin = 0
    mine_low = 0
    mine_high = 0
    for g in range(G):
        if node < 0 or node_G[g] == node:
            end = min(begin + demand_G[g], matched)
            if g == rank:
                mine_low, mine_high = begin, end
            demand_G[g] -= end - begin
            begin = end
    begin = 0
    for g in range(G):
        if node < 0 or node_G[g] == node:
            end = min(begin + quota_G[g], matched)
            both = min(end, mine_high) - max(begin, mine_low)
            if both > 0:
                split_P[slot_G[g]] += both
            quota_G[g] -= end - begin
            begin = end
