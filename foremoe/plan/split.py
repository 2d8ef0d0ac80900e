"""The split law: how the quotas of an expert's slots are shared out over source ranks.

A pure function, so every rank can compute its own part: tier 1, a rank's tokens go to its own slot; tier 2, to slots of its own
node; tier 3, anywhere. Within a tier, what sources still have (in rank order) and what slots still take (in slot order) are laid
out as intervals on one line, and a source sends a slot the overlap of their intervals.
"""

from __future__ import annotations

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.parallel import for_rows

# Letters: N rows, G ranks, V nodes, E experts, S slots per rank, P = G*S physical slots.


def split_over_sources(
    load_NGE: Array, expert_NGS: Array, quota_NGS: Array, node_of_rank_G: Array, rank: int, demand_NVE: Array | None = None
) -> Array:
    """int32 [N, P]: how many pairs of its own source rank `rank` sends to every physical slot.

    Args:
        load_NGE: int32, pairs by source rank; summed over sources it equals each expert's summed quota.
        expert_NGS: int16, logical expert in every slot.
        quota_NGS: int32, pairs that every slot serves.
        node_of_rank_G: int32 node of each rank.
        demand_NVE: int32, `load_NGE` summed over the ranks of every node, if it is known already (`Problem.counts`).
    """
    N, G, S = expert_NGS.shape
    split_NP = np.zeros((N, G * S), np.int32)
    quota_NGS = np.ascontiguousarray(quota_NGS)
    known = demand_NVE is not None
    sums_NVE = demand_NVE if demand_NVE is not None else np.zeros((1, 1, 1), np.int32)

    def block(low: int, high: int) -> None:
        _split_rows(low, high, load_NGE, sums_NVE, known, expert_NGS, quota_NGS, node_of_rank_G, rank, split_NP)

    for_rows(block, N, whole=True)
    return split_NP


@kernel
def _split_rows(low, high, load_NGE, sums_NVE, known, expert_NGS, quota_NGS, node_G, rank, split_NP):  # type: ignore[no-untyped-def]
    """One source needs no other source by itself: who comes before it on a line, and what each node asks for in all, is enough.

    Those are sums over whole rows of the load, which vectorise; the rest is a few steps per slot of a replicated expert.
    """
    G, S = expert_NGS.shape[1], expert_NGS.shape[2]
    E, V = load_NGE.shape[2], node_G.max() + 1
    first_E, next_P = np.empty(E, np.int64), np.empty(G * S, np.int64)  # the slots of an expert in order, -1 after the last
    rank_P, left_P = np.arange(G * S) // S, np.empty(G * S, np.int64)
    before_VE, before_E, demand_VE = np.empty((V, E), np.int32), np.empty(E, np.int32), np.empty((V, E), np.int32)
    line_3V = np.empty((3, V), np.int64)
    for n in range(low, high):
        split_P, mine_E, quota_P = split_NP[n], load_NGE[n, rank], quota_NGS[n].reshape(-1)
        first_E[:] = -1
        for g in range(G - 1, -1, -1):
            for s in range(S):
                e = expert_NGS[n, g, s]
                if e >= 0 and quota_NGS[n, g, s] > 0:
                    next_P[g * S + s], first_E[e] = first_E[e], g * S + s
        summed = False
        for e in range(E):
            p = first_E[e]
            if mine_E[e] == 0 or p < 0:
                continue
            if next_P[p] < 0:
                split_P[p] = mine_E[e]
                continue
            if not summed:
                if known:
                    demand_VE[:] = sums_NVE[n]
                _sum_sources(load_NGE[n], known, node_G, rank, before_VE, before_E, demand_VE)
                summed = True
            _split_expert(
                p, next_P, rank_P, quota_P, load_NGE[n, :, e], before_VE[:, e], before_E[e], demand_VE[:, e], node_G, rank,
                left_P, line_3V, split_P,
            )  # fmt: skip


@kernel
def _sum_sources(load_GE, known, node_G, rank, before_VE, before_E, demand_VE):  # type: ignore[no-untyped-def]
    """Fills by node what all ranks ask of every expert (unless `known`) and what those before `rank` ask, and sums the latter.

    Of a node whose ranks are all before `rank`, or all after it, no rank needs to be read if the node's sum is known.
    """
    last_V = np.full(demand_VE.shape[0], -1, np.int64)
    for g in range(node_G.size):
        last_V[node_G[g]] = g
    before_VE[:] = 0
    for g in range(rank):
        if not known or last_V[node_G[g]] >= rank:
            of_node_E, of_rank_E = before_VE[node_G[g]], load_GE[g]
            for e in range(of_rank_E.size):
                of_node_E[e] += of_rank_E[e]
    if not known:
        demand_VE[:] = before_VE
        for g in range(rank, node_G.size):
            of_node_E, of_rank_E = demand_VE[node_G[g]], load_GE[g]
            for e in range(of_rank_E.size):
                of_node_E[e] += of_rank_E[e]
    before_E[:] = 0
    for v in range(last_V.size):
        if known and last_V[v] < rank:
            before_VE[v] = demand_VE[v]
        of_node_E = before_VE[v]
        for e in range(before_E.size):
            before_E[e] += of_node_E[e]


@kernel
def _split_expert(  # type: ignore[no-untyped-def]
    first, next_P, rank_P, quota_P, load_G, before_V, before, demand_V, node_G, rank, left_P, line_3V, split_P
):
    """All tiers of one expert with several slots, from the slot `first` on.

    Args:
        left_P: Scratch for what tier 1 leaves of quotas.
        line_3V: Scratch.
    """
    # By node: what tier 1 places of all ranks and of ranks before this one, and what it leaves of quotas.
    own_V, own_before_V, quota_V = line_3V[0], line_3V[1], line_3V[2]
    line_3V[:] = 0
    mine = np.int64(load_G[rank])
    p = first
    while p >= 0:
        g, v = rank_P[p], node_G[rank_P[p]]
        own = min(np.int64(load_G[g]), np.int64(quota_P[p]))
        if g == rank:
            split_P[p] = own
            mine -= own
        left_P[p] = quota_P[p] - own
        own_V[v] += own
        own_before_V[v] += own if g < rank else 0
        quota_V[v] += left_P[p]
        p = next_P[p]

    here = node_G[rank]
    if mine > 0 and quota_V[here] > 0:
        low, begin = before_V[here] - own_before_V[here], np.int64(0)
        high = low + mine
        p = first
        while p >= 0:
            if node_G[rank_P[p]] == here:
                sent = max(np.int64(0), min(begin + left_P[p], high) - max(begin, low))
                split_P[p] += sent
                mine -= sent
                begin += left_P[p]
            p = next_P[p]

    # In a node, the first in line were served: as many as its slots take of what it asks.
    if mine > 0:
        low = np.int64(before)
        p = first
        while p >= 0:
            v = node_G[rank_P[p]]
            if own_V[v] >= 0:
                low += max(np.int64(0), before_V[v] - own_before_V[v] - quota_V[v]) - before_V[v]
                quota_V[v] = min(quota_V[v], demand_V[v] - own_V[v])  # now: what tier 2 takes of the node's quotas
                own_V[v] = -1
            p = next_P[p]
        begin, high = np.int64(0), low + mine
        p = first
        while p >= 0 and begin < high:
            v = node_G[rank_P[p]]
            taken = min(left_P[p], quota_V[v])
            quota_V[v] -= taken
            end = begin + left_P[p] - taken
            split_P[p] += max(np.int64(0), min(end, high) - max(begin, low))
            begin = end
            p = next_P[p]
