"""Lower bounds on the seconds of a set of replicas, and what every change of it makes of them, kept up to date."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.problem.rates import Rates, add_copies

# Letters: G ranks, R redundant slots per rank, E experts, P redundant slots, K bounds.


class Case(NamedTuple):
    """What stays as it is while replicas change."""

    load_E: Array  # int64, pairs
    pairs_EG: Array  # float64, pairs by source rank; all at home where sources are not known
    link_GG: Array  # float64, seconds of a pair from source to serving rank
    home_E: Array  # int64, home rank
    node_G: Array  # int64, node of every rank
    node_only: bool  # whether replicas stay inside their home's node
    busy_G: Array  # int64, base slots whose expert has load
    rates: Rates  # of the row
    bare_s: float  # seconds of all links with bare homes, which prices of a row leave out


class Held(NamedTuple):
    """The replicas: by slot (-1: empty); every rank that an expert is on, its home included; copies per rank and link."""

    expert_GR: Array
    at_EG: Array
    fan_4G: Array  # copies by peer out and in, by RDMA out and in


class Bounds(NamedTuple):
    """Bound k charges a pair ``price_s_GK[g, k]`` on rank g, and serves every pair where price and link together are least.

    Prices add up to the seconds of a pair, so no quotas cost less: the fullest rank counts at least as much as any average over
    ranks. With the prices of `cheapest_quotas` the bound is what the replicas reach."""

    price_s_GK: Array
    own_s_EK: Array  # seconds of every expert
    toggled_s_EGK: Array  # what is added if an expert leaves the rank, or comes to it. The last row of both, no expert, is 0
    moved_s_PGK: Array  # what is added if the expert of slot p = g*R + i moves to another rank
    total_s_K: Array  # the bounds, copies aside


@kernel
def case_of(row, num_slots):
    """The `Case` of a `Row`."""
    load_E, node_G, rates = row.load_E, row.node_G, row.rates
    G, E = node_G.size, load_E.size
    pairs_EG, link_GG, bare_s = np.zeros((E, G)), np.zeros((G, G)), 0.0
    # With RDMA faster than peer links the closed form is no least cost; prices are still its own, only the bounds guess.
    rdma_s = max(rates.rdma_pair_s, rates.peer_pair_s)
    for a in range(G):
        for b in range(G):
            if row.located and a != b:
                link_GG[a, b] = rates.peer_pair_s if node_G[a] == node_G[b] else rdma_s
    for e in range(E):
        home = row.home_E[e] // num_slots
        if not row.located:
            pairs_EG[e, home] = load_E[e]
            continue
        for g in range(G):
            pairs_EG[e, g] = row.load_GE[g, e]
            bare_s += pairs_EG[e, g] * link_GG[g, home]
    return Case(
        load_E.astype(np.int64), pairs_EG, link_GG, row.home_E // num_slots, node_G.astype(np.int64), row.node_only, row.busy_G,
        rates, bare_s,
    )  # fmt: skip


@kernel
def _least(link_GG, price_s_GK, k, at_EG, e, least_s_G):
    """Fills the least seconds of price and link by source rank, over the ranks that an expert is on."""
    G = link_GG.shape[0]
    for source in range(G):
        least_s_G[source] = np.inf
        for r in range(G):
            if at_EG[e, r]:
                least_s_G[source] = min(least_s_G[source], price_s_GK[r, k] + link_GG[source, r])


@kernel
def _served_s(pairs_EG, e, least_s_G):
    total_s = 0.0
    for source in range(least_s_G.size):
        total_s += pairs_EG[e, source] * least_s_G[source]
    return total_s


@kernel
def _served_with_s(pairs_EG, e, least_s_G, link_GG, price_s, r):
    """The same with one more rank, at its price."""
    total_s = 0.0
    for source in range(least_s_G.size):
        total_s += pairs_EG[e, source] * min(least_s_G[source], price_s + link_GG[source, r])
    return total_s


@kernel
def _renew_expert(case, held, e, low, high, bounds):
    """What bounds [low, high) say of an expert and its changes."""
    pairs_EG, link_GG, expert_GR, at_EG = case.pairs_EG, case.link_GG, held.expert_GR, held.at_EG
    price_s_GK, toggled_s_EGK, moved_s_PGK = bounds.price_s_GK, bounds.toggled_s_EGK, bounds.moved_s_PGK
    G, R = expert_GR.shape
    slot = case.rates.slot_s / case.rates.pair_s
    least_s_G = np.empty(G)
    for k in range(low, high):
        _least(link_GG, price_s_GK, k, at_EG, e, least_s_G)
        own_s = _served_s(pairs_EG, e, least_s_G)
        bounds.own_s_EK[e, k] = own_s
        for r in range(G):
            if not at_EG[e, r]:
                served_s = _served_with_s(pairs_EG, e, least_s_G, link_GG, price_s_GK[r, k], r)
                toggled_s_EGK[e, r, k] = served_s - own_s + slot * price_s_GK[r, k]
    for r in range(G):
        if not at_EG[e, r] or r == case.home_E[e]:
            continue
        p = r * R
        while expert_GR[r, p - r * R] != e:
            p += 1
        at_EG[e, r] = False
        for k in range(low, high):
            _least(link_GG, price_s_GK, k, at_EG, e, least_s_G)
            less_s = bounds.own_s_EK[e, k] + slot * price_s_GK[r, k]
            toggled_s_EGK[e, r, k] = _served_s(pairs_EG, e, least_s_G) - less_s
            for b in range(G):
                if b != r and not at_EG[e, b]:
                    served_s = _served_with_s(pairs_EG, e, least_s_G, link_GG, price_s_GK[b, k], b)
                    moved_s_PGK[p, b, k] = served_s + slot * price_s_GK[b, k] - less_s
        at_EG[e, r] = True


@kernel
def _renew_totals(case, held, low, high, bounds):
    """Bounds [low, high) from those of all experts and the busy slots."""
    own_s_EK, price_s_GK, total_s_K, expert_GR = bounds.own_s_EK, bounds.price_s_GK, bounds.total_s_K, held.expert_GR
    slot = case.rates.slot_s / case.rates.pair_s
    total_s_K[low:high] = -case.bare_s
    for e in range(own_s_EK.shape[0]):
        for k in range(low, high):
            total_s_K[k] += own_s_EK[e, k]
    for g in range(expert_GR.shape[0]):
        busy = case.busy_G[g]
        for e in expert_GR[g]:
            busy += e >= 0
        for k in range(low, high):
            total_s_K[k] += slot * busy * price_s_GK[g, k]


@kernel
def renew(case, held, low, high, bounds):
    """Bounds [low, high) for all experts, from their prices."""
    for e in range(case.home_E.size):
        _renew_expert(case, held, e, low, high, bounds)
    _renew_totals(case, held, low, high, bounds)


@kernel
def renew_two(case, held, e, f, num, bounds):
    """The first `num` bounds after a change of two experts, or one (-1: none)."""
    if e >= 0:
        _renew_expert(case, held, e, 0, num, bounds)
    if f >= 0:
        _renew_expert(case, held, f, 0, num, bounds)
    _renew_totals(case, held, 0, num, bounds)


@kernel
def count_copy(case, e, r, sign, fan_4G):
    """Counts the copy of an expert to a rank (-1: nothing), or with sign -1 takes it out of the count."""
    if e >= 0:
        add_copies(sign, case.home_E[e], r, case.node_G, fan_4G)


@kernel
def replica_s(case, e, r):
    """The price of a replica of an expert (-1: nothing), what does not hide aside."""
    if e < 0:
        return 0.0
    near = case.node_G[case.home_E[e]] == case.node_G[r]
    return case.rates.replica_peer_s if near else case.rates.replica_rdma_s


@kernel
def hold(case, expert_GR, held):
    """Fills `held` from slots."""
    G, R = expert_GR.shape
    held.expert_GR[:], held.at_EG[:], held.fan_4G[:] = expert_GR, False, 0
    for e in range(case.home_E.size):
        held.at_EG[e, case.home_E[e]] = True
    for r in range(G):
        for i in range(R):
            count_copy(case, expert_GR[r, i], r, 1, held.fan_4G)
            if expert_GR[r, i] >= 0:
                held.at_EG[expert_GR[r, i], r] = True
