"""Replicas of `Robust` within limits. Copies are made in proportion to expected load, and the fastest limits are searched."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import Rates, add_copies, busiest_s, free_fans, late_s
from foremoe.solvers.robust.cover import Limits, home_quotas
from foremoe.solvers.rows import Placed, home_of_experts
from foremoe.solvers.split.flow import UNLIMITED, split_row

# Letters: K samples, G ranks, S slots per rank, E experts.

# The search continues along the levels while a step saves at least this share of the time.
WORTH = 2e-3
# Tried limits of copies through one rank, direction and link. The last one means no limit.
LEVELS = (0, 1, 2, 3, 4, 6, 8, 2**31 - 1)


class Case(NamedTuple):
    """The data from which the replicas of one row are chosen."""

    share_E: Array  # float64, weights of experts in proportion to which they get copies
    load_KE: Array  # int32, loads on which placements are priced
    node_G: Array  # node of every rank
    num_base: int  # base slots of a rank
    rates: Rates  # rates of this row


@kernel
def count_copies(share_E, num, most_E):
    """Returns the number of copies of every expert, including its home, int64 [E].

    A copy for the expert with the largest share per copy is added `num` times. No expert gets more than `most_E` copies.
    """
    copies_E, per_copy_E = np.ones(share_E.size, np.int64), share_E.copy()
    for _ in range(num):
        e = np.argmax(per_copy_E)
        while per_copy_E[e] > 0.0 and copies_E[e] >= most_E[e]:
            per_copy_E[e] = 0.0
            e = np.argmax(per_copy_E)
        if per_copy_E[e] <= 0.0:
            break
        copies_E[e] += 1
        per_copy_E[e] = share_E[e] / copies_E[e]
    return copies_E


@kernel
def place_copies(case, limits, expert_GS):
    """Fills empty redundant slots. Copies are placed heaviest first, each on the least loaded rank within `limits`.

    A copy is left out if no rank can take it. Returns two values: whether the limit for links inside nodes kept any copy from the
    least loaded rank, and whether the limit for links between nodes did.
    """
    share_E, node_G, num_base = case.share_E, case.node_G, case.num_base
    G, S = expert_GS.shape
    home_E = home_of_experts(num_base, expert_GS) // S
    most, slots = min(np.int64(G), 1 + np.int64(limits.peer) + np.int64(limits.rdma)), min(np.int64(limits.slots), S - num_base)
    copies_E = count_copies(share_E, G * slots, np.full(share_E.size, most))
    per_copy_E, load_G, used_G, fan_4G = share_E / copies_E, np.zeros(G), np.full(G, num_base), np.zeros((4, G), np.int64)
    for e in range(share_E.size):
        load_G[home_E[e]] += per_copy_E[e]
    peer_bound = rdma_bound = False
    for e in np.argsort(-per_copy_E, kind="mergesort"):
        home = home_E[e]
        for _ in range(copies_E[e] - 1):
            to, least = -1, np.inf
            for g in range(G):
                if load_G[g] >= least or used_G[g] == num_base + slots or g == home:
                    continue
                link, fan = (0, limits.peer) if node_G[g] == node_G[home] else (2, limits.rdma)
                if fan_4G[link, home] >= fan or fan_4G[link + 1, g] >= fan:
                    peer_bound |= link == 0
                    rdma_bound |= link == 2
                    continue
                held = False
                for s in range(num_base, used_G[g]):
                    held |= expert_GS[g, s] == e
                if not held:
                    to, least = g, load_G[g]
            if to < 0:
                break
            add_copies(1, home, to, node_G, fan_4G)
            expert_GS[to, used_G[to]] = e
            used_G[to] += 1
            load_G[to] += per_copy_E[e]
    return peer_bound, rdma_bound


@inner_kernel
def _copies_s(fan_4G, rates):
    """Returns the seconds of all replicas: their price and the exposed part of `busiest_s`. `add_copies` fills `fan_4G`."""
    peers = rdmas = np.int64(0)
    for g in range(fan_4G.shape[1]):
        peers += fan_4G[0, g]
        rdmas += fan_4G[2, g]
    return rates.replica_peer_s * peers + rates.replica_rdma_s * rdmas + late_s(busiest_s(fan_4G, rates), rates)


@kernel
def expected_s(case, expert_GS):
    """Returns the mean seconds of a placement over `load_KE`: the slowest rank with the exact split, plus all copies."""
    node_G, num_base, (G, S) = case.node_G, case.num_base, expert_GS.shape
    home_E, fan_4G, quota_GS = home_of_experts(num_base, expert_GS), np.zeros((4, G), np.int64), np.zeros((G, S), np.int32)
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] >= 0:
                add_copies(1, home_E[expert_GS[g, s]] // S, g, node_G, fan_4G)
    load_G, compute_s = np.zeros(G, np.int64), 0.0
    for load_E in case.load_KE:
        home_quotas(load_E, num_base, expert_GS, quota_GS, load_G)
        split_row(-(-load_G.sum() // G), UNLIMITED, num_base, Placed(expert_GS, quota_GS, load_G))
        slowest_s = 0.0
        for g in range(G):
            copies = fan_4G[1, g] + fan_4G[3, g]
            slowest_s = max(slowest_s, case.rates.pair_s * load_G[g] + case.rates.slot_s * (num_base + copies))
        compute_s += slowest_s
    return compute_s / case.load_KE.shape[0] + _copies_s(fan_4G, case.rates)


class _Walk(NamedTuple):
    """State of the search over limits: the placement at the start and the best one so far."""

    home_GS: Array
    best_GS: Array
    best_s: Array  # float64 [1]


@inner_kernel
def limits_of(peer, rdma, slots):
    """Returns the `Limits` for two indices into `LEVELS` and a number of slots."""
    return Limits(np.int64(LEVELS[peer]), np.int64(LEVELS[rdma]), np.int64(slots))


@kernel
def _try(case, peer, rdma, slots, walk):
    """Tries `place_copies` with these levels. Returns whether the result is clearly faster, and which limits were reached.

    The best placement is replaced by any faster one.
    """
    tried_GS = walk.home_GS.copy()
    peer_bound, rdma_bound = place_copies(case, limits_of(peer, rdma, slots), tried_GS)
    tried_s = expected_s(case, tried_GS)
    better = tried_s < (1.0 - WORTH) * walk.best_s[0]
    if tried_s < walk.best_s[0]:
        walk.best_GS[:, :] = tried_GS
        walk.best_s[0] = tried_s
    return better, peer_bound, rdma_bound


@inner_kernel
def hidden_levels(rates, node_only):
    """Returns the highest indices into `LEVELS` for which all copies inside and between nodes overlap with compute."""
    free_peer, free_rdma = free_fans(rates)
    peer = rdma = 0
    for level in range(len(LEVELS) - 1):
        peer = level if LEVELS[level] <= free_peer else peer
        rdma = level if LEVELS[level] <= free_rdma and not node_only else rdma
    return peer, rdma


@kernel
def walk_levels(case, node_only, best_GS):
    """Returns the limits whose replicas have the lowest expected time, and writes these replicas to `best_GS`.

    `best_GS` must hold only homes before the call, and is not changed if no replicas are faster. The search begins with as many
    copies as overlap with compute. Then each limit on links is raised as long as it keeps copies from the least loaded rank and
    more copies save time. The limit on slots is halved as long as fewer slots are faster.
    """
    last, slots = len(LEVELS) - 1, best_GS.shape[1] - case.num_base
    walk = _Walk(best_GS.copy(), best_GS, np.full(1, expected_s(case, best_GS)))
    peer, rdma = hidden_levels(case.rates, node_only)
    _, peer_bound, rdma_bound = _try(case, peer, rdma, slots, walk)
    better = not node_only
    while better and rdma_bound and rdma < last:
        better, peer_bound, rdma_bound = _try(case, peer, rdma + 1, slots, walk)
        rdma += better
    better = True
    while better and peer_bound and peer < last:
        better, peer_bound, _ = _try(case, peer + 1, rdma, slots, walk)
        peer += better
    better = True
    while better and slots > 1:
        better, _, _ = _try(case, peer, rdma, slots // 2, walk)
        slots = slots // 2 if better else slots
    return limits_of(peer, rdma, slots)
