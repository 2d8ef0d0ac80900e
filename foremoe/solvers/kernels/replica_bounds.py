"""Lower bounds on the seconds of a set of replicas, and what every change of it makes of them, kept up to date."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.price import PAIR, PEER_PAIR, RDMA_PAIR, REPLICA_PEER, REPLICA_RDMA, SLOT

# Letters: G ranks, R redundant slots per rank, V nodes, E experts, K bounds (rate_K: rates).


class Row(NamedTuple):
    """What stays as it is while replicas change.

    Attributes:
        pairs_EG: float64, pairs by source rank; all at home where sources are not known.
        link_GG: float64, seconds of a pair from source to serving rank.
        home_E: int64, home rank.
        busy_G: int64, base slots whose expert has load.
        bare_s: seconds of all links with bare homes, which prices of a row leave out.
    """

    load_E: Array
    pairs_EG: Array
    link_GG: Array
    home_E: Array
    node_G: Array
    busy_G: Array
    rate_K: Array
    bare_s: float


class Held(NamedTuple):
    """The replicas: by slot (-1: empty); every rank that an expert is on, its home included; copies per rank and link.

    Attributes:
        fan_4G: copies by peer out and in, by RDMA out and in.
    """

    expert_GR: Array
    at_EG: Array
    fan_4G: Array


class Bounds(NamedTuple):
    """Bound k charges a pair ``price_s_GK[g, k]`` on rank g, and serves every pair where price and link together are least.

    Prices add up to the seconds of a pair, so no quotas cost less: the fullest rank counts at least as much as any average over
    ranks. With the prices of `cheapest_flow` the bound is what the replicas reach.

    Attributes:
        own_s_EK: seconds of every expert.
        toggled_s_EGK: what is added if an expert leaves the rank, or comes to it. The last row of both, no expert, is 0.
        moved_s_PGK: what is added if the expert of slot p = g*R + i moves to another rank.
        total_s_K: the bounds, copies aside.
    """

    price_s_GK: Array
    own_s_EK: Array
    toggled_s_EGK: Array
    moved_s_PGK: Array
    total_s_K: Array


@kernel
def row_of(load_E, load_GE, node_G, num_slots, rate_K, slot_E, busy_G):  # type: ignore[no-untyped-def]
    """The `Row`; `slot_E` is the home slot of every expert, g*S + b."""
    G, E, located = node_G.size, load_E.size, load_GE.size > 0
    pairs_EG, link_GG, bare_s = np.zeros((E, G)), np.zeros((G, G)), 0.0
    # With RDMA faster than peer links the closed form is no least cost; prices are still its own, only the bounds guess.
    rdma_s = max(rate_K[RDMA_PAIR], rate_K[PEER_PAIR])
    for a in range(G):
        for b in range(G):
            if located and a != b:
                link_GG[a, b] = rate_K[PEER_PAIR] if node_G[a] == node_G[b] else rdma_s
    for e in range(E):
        home = slot_E[e] // num_slots
        if not located:
            pairs_EG[e, home] = load_E[e]
            continue
        for g in range(G):
            pairs_EG[e, g] = load_GE[g, e]
            bare_s += pairs_EG[e, g] * link_GG[g, home]
    return Row(load_E.astype(np.int64), pairs_EG, link_GG, slot_E // num_slots, node_G.astype(np.int64), busy_G, rate_K, bare_s)


@kernel
def _least(link_GG, price_s_GK, k, at_EG, e, least_s_G):  # type: ignore[no-untyped-def]
    """Fills the least seconds of price and link by source rank, over the ranks that an expert is on."""
    G = link_GG.shape[0]
    for source in range(G):
        least_s_G[source] = np.inf
        for r in range(G):
            if at_EG[e, r]:
                least_s_G[source] = min(least_s_G[source], price_s_GK[r, k] + link_GG[source, r])


@kernel
def _served_s(pairs_EG, e, least_s_G):  # type: ignore[no-untyped-def]
    total_s = 0.0
    for source in range(least_s_G.size):
        total_s += pairs_EG[e, source] * least_s_G[source]
    return total_s


@kernel
def _served_with_s(pairs_EG, e, least_s_G, link_GG, price_s, r):  # type: ignore[no-untyped-def]
    """The same with one more rank, at its price."""
    total_s = 0.0
    for source in range(least_s_G.size):
        total_s += pairs_EG[e, source] * min(least_s_G[source], price_s + link_GG[source, r])
    return total_s


@kernel
def _renew_expert(row, held, e, low, high, bounds):  # type: ignore[no-untyped-def]
    """What bounds [low, high) say of an expert and its changes."""
    pairs_EG, link_GG, expert_GR, at_EG = row.pairs_EG, row.link_GG, held.expert_GR, held.at_EG
    price_s_GK, toggled_s_EGK, moved_s_PGK = bounds.price_s_GK, bounds.toggled_s_EGK, bounds.moved_s_PGK
    G, R = expert_GR.shape
    slot = row.rate_K[SLOT] / row.rate_K[PAIR]
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
        if not at_EG[e, r] or r == row.home_E[e]:
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
def _renew_totals(row, held, low, high, bounds):  # type: ignore[no-untyped-def]
    """Bounds [low, high) from those of all experts and the busy slots."""
    own_s_EK, price_s_GK, total_s_K, expert_GR = bounds.own_s_EK, bounds.price_s_GK, bounds.total_s_K, held.expert_GR
    slot = row.rate_K[SLOT] / row.rate_K[PAIR]
    total_s_K[low:high] = -row.bare_s
    for e in range(own_s_EK.shape[0]):
        for k in range(low, high):
            total_s_K[k] += own_s_EK[e, k]
    for g in range(expert_GR.shape[0]):
        busy = row.busy_G[g]
        for e in expert_GR[g]:
            busy += e >= 0
        for k in range(low, high):
            total_s_K[k] += slot * busy * price_s_GK[g, k]


@kernel
def renew(row, held, low, high, bounds):  # type: ignore[no-untyped-def]
    """Bounds [low, high) for all experts, from their prices."""
    for e in range(row.home_E.size):
        _renew_expert(row, held, e, low, high, bounds)
    _renew_totals(row, held, low, high, bounds)


@kernel
def renew_two(row, held, e, f, num, bounds):  # type: ignore[no-untyped-def]
    """The first `num` bounds after a change of two experts, or one (-1: none)."""
    if e >= 0:
        _renew_expert(row, held, e, 0, num, bounds)
    if f >= 0:
        _renew_expert(row, held, f, 0, num, bounds)
    _renew_totals(row, held, 0, num, bounds)


@kernel
def count_copy(home_E, node_G, e, r, sign, fan_4G):  # type: ignore[no-untyped-def]
    """Counts the copy of an expert to a rank (-1: nothing), or with sign -1 takes it out of the count."""
    if e >= 0:
        link = 0 if node_G[home_E[e]] == node_G[r] else 2
        fan_4G[link, home_E[e]] += sign
        fan_4G[link + 1, r] += sign


@kernel
def replica_s(home_E, node_G, rate_K, e, r):  # type: ignore[no-untyped-def]
    """The price of a replica of an expert (-1: nothing), what does not hide aside."""
    if e < 0:
        return 0.0
    return rate_K[REPLICA_PEER if node_G[home_E[e]] == node_G[r] else REPLICA_RDMA]


@kernel
def hold(row, expert_GR, held):  # type: ignore[no-untyped-def]
    """Fills `held` from slots."""
    G, R = expert_GR.shape
    held.expert_GR[:], held.at_EG[:], held.fan_4G[:] = expert_GR, False, 0
    for e in range(row.home_E.size):
        held.at_EG[e, row.home_E[e]] = True
    for r in range(G):
        for i in range(R):
            count_copy(row.home_E, row.node_G, expert_GR[r, i], r, 1, held.fan_4G)
            if expert_GR[r, i] >= 0:
                held.at_EG[expert_GR[r, i], r] = True
