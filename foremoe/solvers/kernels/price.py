"""Seconds of a placement, up to what is the same for all: `price_rows` of one row, without a pass over experts."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.problem.kernels.demand import demand_row as demand_row  # for those who price

# Letters: G ranks, S slots per rank, E experts, V nodes, K rates.

# Places in the rates of a row.
PAIR, SLOT, PEER_PAIR, RDMA_PAIR, COPY_PEER, COPY_RDMA, BACK_PEER, BACK_RDMA, REPLICA_PEER, REPLICA_RDMA = range(10)
SENDS_BACKWARD, RETURNS, HIDE_FORWARD, HIDE_BACKWARD = range(10, 14)
NUM_RATES = 14


@kernel
def exposed_s(peer_fan, rdma_fan, rate_K):  # type: ignore[no-untyped-def]
    """Seconds of copies and gradients that do not hide if so many go through one rank on peer and on RDMA links."""
    copy_s = max(peer_fan * rate_K[COPY_PEER], rdma_fan * rate_K[COPY_RDMA])
    out_s = max(0.0, copy_s - rate_K[HIDE_FORWARD])
    if rate_K[SENDS_BACKWARD] != 0.0:
        out_s += max(0.0, copy_s - rate_K[HIDE_BACKWARD])
    if rate_K[RETURNS] != 0.0:
        back_s = max(peer_fan * rate_K[BACK_PEER], rdma_fan * rate_K[BACK_RDMA])
        out_s += max(0.0, back_s - rate_K[HIDE_BACKWARD])
    return out_s


@kernel
def fans_seconds(fan_4G, rate_K):  # type: ignore[no-untyped-def]
    """Seconds of all copies: their price, and what does not hide of the largest number through one rank, direction and link.

    Args:
        fan_4G: int64, copies out of every rank and into it on peer links, then on RDMA links.
    """
    peers = rdmas = peer_fan = rdma_fan = np.int64(0)
    for g in range(fan_4G.shape[1]):
        peers += fan_4G[0, g]
        rdmas += fan_4G[2, g]
        peer_fan = max(peer_fan, max(fan_4G[0, g], fan_4G[1, g]))
        rdma_fan = max(rdma_fan, max(fan_4G[2, g], fan_4G[3, g]))
    return rate_K[REPLICA_PEER] * peers + rate_K[REPLICA_RDMA] * rdmas + exposed_s(peer_fan, rdma_fan, rate_K)


@kernel
def count_copies(home_E, node_G, num_base, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """int64 [4, G]: copies through every rank, as `fans_seconds` reads them."""
    G, S = expert_GS.shape
    fan_4G = np.zeros((4, G), np.int64)
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] < 0 or quota_GS[g, s] == 0:
                continue
            home = home_E[expert_GS[g, s]] // S
            link = 0 if node_G[home] == node_G[g] else 2
            fan_4G[link, home] += 1
            fan_4G[link + 1, g] += 1
    return fan_4G


@kernel
def free_fans(rate_K):  # type: ignore[no-untyped-def]
    """The most copies through one rank that hide entirely, on peer and on RDMA links."""
    out = np.empty(2, np.int64)
    for i in range(2):
        most = rate_K[HIDE_FORWARD] / rate_K[COPY_PEER + i]
        if rate_K[SENDS_BACKWARD] != 0.0:
            most = min(most, rate_K[HIDE_BACKWARD] / rate_K[COPY_PEER + i])
        if rate_K[RETURNS] != 0.0:
            most = min(most, rate_K[HIDE_BACKWARD] / rate_K[BACK_PEER + i])
        out[i] = np.int64(min(most, 1e9))
    return out


@kernel
def price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Seconds of a placement, up to what is the same for all placements of the row.

    Args:
        load_GE, demand_VE: pairs by source rank and by source node, [0, 0] if not known.
        home_E: int64, home p = g*S + b of every expert.   busy_G: int64, base slots whose expert has load.
        load_G: int64, pairs of every rank.
    """
    G, S = expert_GS.shape
    compute_s, nearer_s, num = 0.0, 0.0, 0
    located = demand_VE.size > 0
    # Replicas in the order of their slots, and by expert the one before: divisions and steps over slots would cost most.
    held_5I = np.empty((5, G * (S - num_base)), np.int64)
    rank_I, home_I, next_I, expert_I, quota_I = held_5I[0], held_5I[1], held_5I[2], held_5I[3], held_5I[4]
    last_E = np.full(home_E.size, -1, np.int64)
    served_V, fan_4G = np.zeros(demand_VE.shape[0], np.int64), np.zeros((4, G), np.int64)
    for g in range(G):
        busy = busy_G[g]
        for s in range(num_base, S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] == 0:
                continue
            busy += 1
            home = home_E[e] // S
            link = 0 if node_G[home] == node_G[g] else 2
            fan_4G[link, home] += 1
            fan_4G[link + 1, g] += 1
            rank_I[num], home_I[num], expert_I[num], quota_I[num] = g, home, e, quota_GS[g, s]
            next_I[num], last_E[e] = last_E[e], num
            num += 1
        compute_s = max(compute_s, rate_K[PAIR] * load_G[g] + rate_K[SLOT] * busy)
    for first in range(num if located else 0):
        e, home = expert_I[first], home_I[first]
        i = last_E[e]
        if i < 0:
            continue
        last_E[e] = -1
        left = np.int64(quota_GS[home, home_E[e] - home * S])
        local = min(np.int64(load_GE[home, e]), left) - load_GE[home, e]
        served_V[node_G[home]] += left
        j = i
        while j >= 0:
            local += min(np.int64(load_GE[rank_I[j], e]), quota_I[j])
            served_V[node_G[rank_I[j]]] += quota_I[j]
            j = next_I[j]
        inside = min(np.int64(demand_VE[node_G[home], e]), served_V[node_G[home]]) - demand_VE[node_G[home], e]
        served_V[node_G[home]] = 0
        while i >= 0:
            v = node_G[rank_I[i]]
            inside += min(np.int64(demand_VE[v, e]), served_V[v])
            served_V[v] = 0
            i = next_I[i]
        nearer_s += rate_K[RDMA_PAIR] * inside - rate_K[PEER_PAIR] * (inside - local)
    return compute_s - nearer_s + fans_seconds(fan_4G, rate_K)
