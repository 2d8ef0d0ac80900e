"""The split law: divides the quotas of an expert's slots over source ranks.

The split law is a pure function, so every rank can compute its own part. In tier 1, a rank's tokens go to its own slot. In tier
2, remaining tokens go to slots of the rank's node, in proportion to the remaining room of each slot. Pairs from other nodes then
do not all go to the same slot. In tier 3, remaining tokens go to any slot. In each tier, the remaining pairs of sources (in rank
order) and the remaining room of slots (in slot order) are intervals on one line. A source sends a slot as many pairs as their
intervals overlap.
"""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.base.parallel import for_rows

# Letters: N rows, G ranks, V nodes, E experts, S slots per rank, P = G*S physical slots.

_UNKNOWN = np.zeros((1, 1, 1), np.int32)
_UNKNOWN.flags.writeable = False  # like known sums, so that kernels compile only once for both


def split_over_sources(
    load_NGE: Array, expert_NGS: Array, quota_NGS: Array, node_of_rank_G: Array, rank: int, demand_NVE: Array | None = None
) -> Array:
    """Returns int32 [N, P], the number of pairs that source rank `rank` sends to every physical slot.

    The loads by source rank, int32, must sum to each expert's quotas. `demand_NVE` is the sum of loads over the ranks of every
    node, int32, if it is already known (`Problem.counts`).
    """
    N, G, S = expert_NGS.shape
    split_NP = np.zeros((N, G * S), np.int32)
    sums_NVE = _UNKNOWN if demand_NVE is None else demand_NVE
    rows = _Rows(load_NGE, sums_NVE, demand_NVE is not None, expert_NGS, np.ascontiguousarray(quota_NGS), node_of_rank_G, rank)
    for_rows(lambda low, high: _split_rows(low, high, rows, split_NP), N, whole=True)
    return split_NP


def served_quotas(
    expert_NGS: Array, quota_NGS: Array, planned_NGE: Array | None, load_NGE: Array, home_NE: Array, node_of_rank_G: Array
) -> Array:
    """Returns int32 [N, G, S], the pairs of `load_NGE` that each slot serves if quotas were planned for `planned_NGE`.

    The result equals that of `foremoe.runtime.remap`, but is computed from counts. In ascending order, each slot of an expert
    serves at most its planned share of a source's pairs. The home slot serves the remaining pairs. `home_NE` has physical slots,
    int64. If `planned_NGE` is None, all pairs come from one source.
    """
    (N, G, S), E = expert_NGS.shape, load_NGE.shape[2]
    expert_NP = np.where(expert_NGS < 0, E, expert_NGS).reshape(N, G * S).astype(np.int64)
    order_NP = np.argsort(expert_NP, axis=1, kind="stable")
    sorted_NP, row_N1 = np.take_along_axis(expert_NP, order_NP, axis=1), np.arange(N)[:, None]
    served_NP = np.zeros((N, G * S), np.int64)
    for source in range(load_NGE.shape[1]):
        split_NP = quota_NGS.reshape(N, G * S)
        if planned_NGE is not None:
            split_NP = split_over_sources(planned_NGE, expert_NGS, quota_NGS, node_of_rank_G, source)
        width_NP = np.take_along_axis(split_NP, order_NP, axis=1).astype(np.int64)
        # All intervals of a row are on one line. Those of an expert begin at `first`, and those of empty slots come last.
        split_NX = np.zeros((N, E + 1), np.int64)
        np.add.at(split_NX, (row_N1, sorted_NP), width_NP)
        first_NX, load_NX = np.cumsum(split_NX, axis=1) - split_NX, np.pad(load_NGE[:, source], ((0, 0), (0, 1)))
        left_NP = np.take_along_axis(load_NX + first_NX, sorted_NP, axis=1) - (np.cumsum(width_NP, axis=1) - width_NP)
        served_NP[row_N1, order_NP] += np.clip(left_NP, 0, width_NP)
        served_NP[row_N1, home_NE] += np.maximum(load_NX - split_NX, 0)[:, :E]
    return served_NP.reshape(N, G, S).astype(np.int32)


class _Rows(NamedTuple):
    """The arguments of `split_over_sources`. `demand_NVE` is empty unless `known` is True."""

    load_NGE: Array
    demand_NVE: Array
    known: bool
    expert_NGS: Array
    quota_NGS: Array
    node_G: Array
    rank: int


class _Sums(NamedTuple):
    """Pairs of one row for every expert, summed over earlier ranks (by node and in total) and over all ranks (by node)."""

    before_VE: Array
    before_E: Array
    demand_VE: Array


class _Slots(NamedTuple):
    """The slots of one row: the next slot of the same expert (or -1), rank, quota, and the quota left after tier 1."""

    next_P: Array
    rank_P: Array
    quota_P: Array
    left_P: Array


@kernel
def link_slots(expert_GS, quota_GS, first_E, next_P):
    """Writes a linked list of every expert's slots with a quota.

    The list begins in `first_E`, continues in `next_P` and ends with -1.
    """
    G, S = expert_GS.shape
    first_E[:] = -1
    for g in range(G - 1, -1, -1):
        for s in range(S):
            e = expert_GS[g, s]
            if e >= 0 and quota_GS[g, s] > 0:
                next_P[g * S + s], first_E[e] = first_E[e], g * S + s


@kernel
def _split_rows(low, high, rows, split_NP):
    """Splits rows [low, high). From other sources, it only needs the pairs of all earlier ranks and each node's total.

    Both are sums over whole rows of the load, so the loops vectorise. The rest takes a few steps per slot of a replicated expert.
    """
    G, S = rows.expert_NGS.shape[1], rows.expert_NGS.shape[2]
    E, V = rows.load_NGE.shape[2], rows.node_G.max() + 1
    first_E, next_P = np.empty(E, np.int64), np.empty(G * S, np.int64)
    rank_P, left_P = np.arange(G * S) // S, np.empty(G * S, np.int64)
    sums = _Sums(np.empty((V, E), np.int32), np.empty(E, np.int32), np.empty((V, E), np.int32))
    line_4V = np.empty((4, V), np.int64)
    for n in range(low, high):
        split_P, mine_E = split_NP[n], rows.load_NGE[n, rows.rank]
        slots = _Slots(next_P, rank_P, rows.quota_NGS[n].reshape(-1), left_P)
        link_slots(rows.expert_NGS[n], rows.quota_NGS[n], first_E, next_P)
        summed = False
        for e in range(E):
            p = first_E[e]
            if mine_E[e] == 0 or p < 0:
                continue
            if next_P[p] < 0:
                split_P[p] = mine_E[e]
                continue
            if not summed:
                _sum_sources(n, rows, sums)
                summed = True
            mine = _own_tier(p, rows.load_NGE[n, :, e], rows, slots, line_4V, split_P)
            _far_tiers(p, e, mine, rows, sums, slots, line_4V, split_P)


@kernel
def _sum_sources(n, rows, sums):
    """Fills `sums` for one row.

    If the ranks of a node are all before or all after this rank, and the node's sum is known, none of them needs to be read.
    """
    load_GE, node_G, rank, known = rows.load_NGE[n], rows.node_G, rows.rank, rows.known
    if known:
        sums.demand_VE[:] = rows.demand_NVE[n]
    last_V = np.full(sums.demand_VE.shape[0], -1, np.int64)
    for g in range(node_G.size):
        last_V[node_G[g]] = g
    sums.before_VE[:] = 0
    for g in range(rank):
        if not known or last_V[node_G[g]] >= rank:
            _add(load_GE[g], sums.before_VE[node_G[g]])
    if not known:
        sums.demand_VE[:] = sums.before_VE
        for g in range(rank, node_G.size):
            _add(load_GE[g], sums.demand_VE[node_G[g]])
    sums.before_E[:] = 0
    for v in range(last_V.size):
        if known and last_V[v] < rank:
            sums.before_VE[v] = sums.demand_VE[v]
        _add(sums.before_VE[v], sums.before_E)


@kernel
def _add(part_E, total_E):
    for e in range(total_E.size):
        total_E[e] += part_E[e]


@inner_kernel
def shared_out(num_V, quota_V, begin_V, v, left):
    """Returns how many of the ``num_V[v]`` pairs in node `v` the next slot gets, in the proportion `left` / ``quota_V[v]``.

    `begin_V` is the sum of `left` over earlier slots of each node, and the call adds `left` of this slot. Cumulative sums are
    rounded, so no pair is lost.
    """
    begin, end = np.int64(begin_V[v]), np.int64(begin_V[v] + left)
    begin_V[v] = end
    return end * num_V[v] // quota_V[v] - begin * num_V[v] // quota_V[v] if quota_V[v] > 0 else np.int64(0)


@kernel
def _own_tier(first, load_G, rows, slots, line_4V, split_P):
    """Runs tier 1 for an expert with several slots, from the slot `first` on. Returns the pairs that this source has left.

    Writes to `line_4V`, by node: the pairs that tier 1 places from all ranks and from earlier ranks, and the quotas left.
    """
    line_4V[:] = 0
    mine = np.int64(load_G[rows.rank])
    p = first
    while p >= 0:
        g, v = slots.rank_P[p], rows.node_G[slots.rank_P[p]]
        own = min(np.int64(load_G[g]), np.int64(slots.quota_P[p]))
        if g == rows.rank:
            split_P[p] = own
            mine -= own
        slots.left_P[p] = slots.quota_P[p] - own
        line_4V[0, v] += own
        line_4V[1, v] += own if g < rows.rank else 0
        line_4V[2, v] += slots.left_P[p]
        p = slots.next_P[p]
    return mine


@kernel
def _far_tiers(first, e, mine, rows, sums, slots, line_4V, split_P):
    """Runs tiers 2 and 3 for an expert, with the pairs `mine` that tier 1 left."""
    next_P, rank_P, left_P, node_G = slots.next_P, slots.rank_P, slots.left_P, rows.node_G
    before_VE, demand_VE = sums.before_VE, sums.demand_VE
    own_V, own_before_V, quota_V, begin_V = line_4V[0], line_4V[1], line_4V[2], line_4V[3]
    here = node_G[rows.rank]
    if mine == 0:
        return
    low, far_low = before_VE[here, e] - own_before_V[here], np.int64(sums.before_E[e])
    p = first
    while p >= 0:
        v = node_G[rank_P[p]]
        if own_before_V[v] >= 0:
            # In a node, the first pairs on the line are served, as many as its slots take.
            far_low += max(np.int64(0), before_VE[v, e] - own_before_V[v] - quota_V[v]) - before_VE[v, e]
            own_V[v] = min(quota_V[v], demand_VE[v, e] - own_V[v])  # from now on: pairs that tier 2 places
            own_before_V[v] = -1
        p = next_P[p]
    if quota_V[here] > 0:
        begin, high = np.int64(0), low + mine
        p = first
        while p >= 0:
            if node_G[rank_P[p]] == here:
                end = begin + shared_out(own_V, quota_V, begin_V, here, left_P[p])
                sent = max(np.int64(0), min(end, high) - max(begin, low))
                split_P[p] += sent
                mine -= sent
                begin = end
            p = next_P[p]
        begin_V[here] = 0
        if mine == 0:
            return
    begin, high = np.int64(0), far_low + mine
    p = first
    while p >= 0 and begin < high:
        end = begin + left_P[p] - shared_out(own_V, quota_V, begin_V, node_G[rank_P[p]], left_P[p])
        split_P[p] += max(np.int64(0), min(end, high) - max(begin, far_low))
        begin = end
        p = next_P[p]
