"""A lower bound of a row's seconds by prices: of every expert's pairs by source rank, and of a pair on every rank.

At given prices every rank takes the replicas that save most, whatever the others do, and no placement costs less than what is
left. Prices rise where pairs are served too little and where ranks are too full, by Polyak's steps toward the cost of a known
placement; at their best the bound is the linear program's over replicas and quotas, exposed copies aside.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.solvers.kernels.rows import row_of

# Letters: N rows, G ranks, E experts, S slots per rank, R redundant slots per rank.

# Below this part of the mean load prices are even: what is left is rounding, and a step would be without end.
EVEN = 1e-9
# Steps without a gain of a millionth before they get shorter, and by how much.
STALLED, SHORTER = 15, 0.6


class _Case(NamedTuple):
    """What stays as it is while prices change."""

    pairs_EG: Array  # float64, pairs by source rank; all at home where sources are not known
    link_GG: Array  # float64, seconds of a pair from source to serving rank
    home_E: Array  # int64, home rank
    copy_s_GG: Array  # float64, seconds of a replica from home to rank; inf where there may be none
    busy_G: Array  # float64, pairs that take as long as the busy base slots
    slot: float  # pairs that take as long as a slot
    redundant: int


class _Prices(NamedTuple):
    """Prices, and how far from even they leave a row."""

    pair_s_EG: Array  # seconds of a pair of an expert, by source rank
    rank_s_G: Array  # seconds of a pair served on a rank; they add up to those of a pair
    unserved_EG: Array  # pairs
    load_G: Array  # pairs and slots


@kernel
def _case_of(row, expert_GS):
    G, S = expert_GS.shape
    E, rates, node_G = row.load_E.size, row.rates, row.node_G
    pairs_EG, link_GG, copy_s_GG = np.zeros((E, G)), np.zeros((G, G)), np.full((G, G), np.inf)
    home_E = row.home_E // S
    for a in range(G):
        for b in range(G):
            near = node_G[a] == node_G[b]
            if a != b and row.located:
                link_GG[a, b] = rates.peer_pair_s if near else rates.rdma_pair_s
            if a != b and (near or not row.node_only):
                copy_s_GG[a, b] = rates.replica_peer_s if near else rates.replica_rdma_s
    for e in range(E):
        if row.located:
            for g in range(G):
                pairs_EG[e, g] = row.load_GE[g, e]
        else:
            pairs_EG[e, home_E[e]] = row.load_E[e]
    slot = rates.slot_s / rates.pair_s
    return _Case(pairs_EG, link_GG, home_E, copy_s_GG, slot * row.busy_G, slot, S - row.num_base)


@kernel
def _choose(case, prices, g, saved_s_R, expert_R):
    """Fills the replicas that save most on rank `g`, seconds descending; -1 where none saves any."""
    own_s, last = prices.rank_s_G[g], saved_s_R.size - 1
    saved_s_R[:], expert_R[:] = 0.0, -1
    reach_s_G = case.link_GG[:, g] + own_s
    for e in range(case.home_E.size):
        saved_s = -case.slot * own_s - case.copy_s_GG[case.home_E[e], g]
        for source in range(reach_s_G.size):
            saved_s += case.pairs_EG[e, source] * max(0.0, prices.pair_s_EG[e, source] - reach_s_G[source])
        if last >= 0 and saved_s > saved_s_R[last]:
            i = last
            while i > 0 and saved_s_R[i - 1] < saved_s:
                saved_s_R[i], expert_R[i] = saved_s_R[i - 1], expert_R[i - 1]
                i -= 1
            saved_s_R[i], expert_R[i] = saved_s, e


@inner_kernel
def _serve(case, prices, e, g):
    """Rank `g` serves all pairs of an expert whose price is above its own and the link's."""
    for source in range(case.busy_G.size):
        if prices.pair_s_EG[e, source] > case.link_GG[source, g] + prices.rank_s_G[g]:
            prices.unserved_EG[e, source] -= case.pairs_EG[e, source]
            prices.load_G[g] += case.pairs_EG[e, source]


@kernel
def _least_s(case, prices, saved_s_R, expert_R):
    """The bound at these prices; fills what they leave unserved, and loads."""
    total_s = 0.0
    prices.unserved_EG[:], prices.load_G[:] = case.pairs_EG, case.busy_G
    for e in range(case.home_E.size):
        home = case.home_E[e]
        for source in range(case.busy_G.size):
            home_s = case.link_GG[source, home] + prices.rank_s_G[home]
            total_s += case.pairs_EG[e, source] * min(prices.pair_s_EG[e, source], home_s)
        _serve(case, prices, e, home)
    for g in range(case.busy_G.size):
        total_s += case.busy_G[g] * prices.rank_s_G[g]
        _choose(case, prices, g, saved_s_R, expert_R)
        for i in range(saved_s_R.size):
            if expert_R[i] >= 0:
                total_s -= saved_s_R[i]
                prices.load_G[g] += case.slot
                _serve(case, prices, expert_R[i], g)
    return total_s


@kernel
def _move(case, prices, pair_s, share, missing_s):
    """Makes `share` of Polyak's step toward `missing_s` more, on the scale of every expert's pairs; False if none is left."""
    E, G = case.pairs_EG.shape
    mean = max(1.0, prices.load_G.sum() / G)
    prices.load_G[:] -= prices.load_G.mean()
    square = (prices.load_G**2).sum() / mean
    for e in range(E):
        for source in range(G):
            square += prices.unserved_EG[e, source] ** 2 / max(1.0, case.pairs_EG[e, source])
    if square <= EVEN * mean:
        return False
    step_s = share * missing_s / square
    for e in range(E):
        for source in range(G):
            prices.pair_s_EG[e, source] += step_s * prices.unserved_EG[e, source] / max(1.0, case.pairs_EG[e, source])
    prices.rank_s_G[:] += step_s / mean * prices.load_G
    # To the nearest prices that are not below zero and add up to those of a pair.
    above_s, level_s = -pair_s, 0.0
    sorted_s_G = np.sort(prices.rank_s_G)
    for i in range(G):
        above_s += sorted_s_G[G - 1 - i]
        if sorted_s_G[G - 1 - i] > above_s / (i + 1):
            level_s = above_s / (i + 1)
    prices.rank_s_G[:] = np.maximum(0.0, prices.rank_s_G - level_s)
    # The bound holds for no larger sum, and after a long step the difference above is rounded, perhaps to nothing.
    total_s = prices.rank_s_G.sum()
    if not total_s > 0.0:
        return False
    prices.rank_s_G[:] *= pair_s / total_s
    return True


@kernel
def _row_bound(row, expert_GS, reached_s, steps):
    case = _case_of(row, expert_GS)
    (E, G), pair_s = case.pairs_EG.shape, row.rates.pair_s
    prices = _Prices(np.empty((E, G)), np.full(G, pair_s / G), np.empty((E, G)), np.empty(G))
    for e in range(E):
        for source in range(G):
            prices.pair_s_EG[e, source] = case.link_GG[source, case.home_E[e]] + pair_s / G
    saved_s_R, expert_R = np.empty(case.redundant), np.empty(case.redundant, np.int64)
    best_s, share, stalled = -np.inf, 1.0, 0
    for _ in range(steps):
        bound_s = _least_s(case, prices, saved_s_R, expert_R)
        stalled = 0 if bound_s > best_s + 1e-6 * reached_s else stalled + 1
        best_s = max(best_s, bound_s)
        if stalled == STALLED:
            share, stalled = SHORTER * share, 0
        if best_s >= reached_s or not _move(case, prices, pair_s, share, reached_s - bound_s):
            break
    return best_s


@kernel
def _anyway_s(row):
    """Seconds of exchange that no placement changes: all of it where sources are not known, and so count as uniform."""
    rates, G, pairs, inside = row.rates, row.node_G.size, row.load_E.sum(), 0.0
    if row.located:
        return rates.fixed_s
    for ranks in np.bincount(row.node_G):
        inside += pairs * (ranks / G) ** 2
    return rates.fixed_s + rates.peer_pair_s * (inside - pairs / G) + rates.rdma_pair_s * (pairs - inside)


@kernel
def certify_rows(low, high, rows, steps, reached_N, expert_NGS, bound_N):
    """Raises ``bound_N[low:high]``, seconds without ``times.base_N``, toward `reached_N`, likewise, of some placement."""
    for n in range(low, high):
        if bound_N[n] < reached_N[n]:
            row = row_of(rows, n, expert_NGS[n])
            anyway_s = _anyway_s(row)
            bound_N[n] = max(bound_N[n], anyway_s + _row_bound(row, expert_NGS[n], reached_N[n] - anyway_s, steps))
