"""What a placement costs in seconds, up to what is the same for all: `CostModel.rows` of one row, without a pass over experts."""

from __future__ import annotations

import numpy as np

from foremoe.solvers.kernels.compiled import kernel

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
def copies_seconds(home_E, node_G, num_base, rate_K, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """Seconds of all copies: their price, and what does not hide of the largest number through one rank, direction and link."""
    G, S = expert_GS.shape
    fan_4G = np.zeros((4, G), np.int64)  # peer out, peer in, RDMA out, RDMA in
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] < 0 or quota_GS[g, s] == 0:
                continue
            home = home_E[expert_GS[g, s]] // S
            link = 0 if node_G[home] == node_G[g] else 2
            fan_4G[link, home] += 1
            fan_4G[link + 1, g] += 1
    price_s = rate_K[REPLICA_PEER] * fan_4G[0].sum() + rate_K[REPLICA_RDMA] * fan_4G[2].sum()
    return price_s + exposed_s(max(fan_4G[0].max(), fan_4G[1].max()), max(fan_4G[2].max(), fan_4G[3].max()), rate_K)


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
def demand_row(load_GE, node_G, demand_VE):  # type: ignore[no-untyped-def]
    """Fills `demand_VE`: pairs that the tokens of a node send to an expert."""
    demand_VE[:] = 0
    for g in range(node_G.size):
        of_node_E, of_rank_E = demand_VE[node_G[g]], load_GE[g]
        for e in range(of_rank_E.size):
            of_node_E[e] += of_rank_E[e]


@kernel
def price_row(load_GE, demand_VE, node_G, num_base, rate_K, home_E, busy_G, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Seconds of a placement, up to what is the same for all placements of the row.

    Args:
        load_GE, demand_VE: pairs by source rank and by source node, [0, 0] if not known.
        home_E: int64, home p = g*S + b of every expert.   busy_G: int64, base slots whose expert has load.
        load_G: int64, pairs of every rank.
    """
    G, S = expert_GS.shape
    compute_s, nearer_s = 0.0, 0.0
    located = demand_VE.size > 0
    next_P, first_E = np.empty(G * S, np.int64), np.full(home_E.size, -1, np.int64)
    served_V = np.zeros(demand_VE.shape[0], np.int64)
    for g in range(G):
        busy = busy_G[g]
        for s in range(num_base, S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] == 0:
                continue
            busy += 1
            if located:
                next_P[g * S + s] = first_E[e]
                first_E[e] = g * S + s
        compute_s = max(compute_s, rate_K[PAIR] * load_G[g] + rate_K[SLOT] * busy)
    if located:
        for g in range(G):
            for s in range(num_base, S):
                e = expert_GS[g, s]
                if e < 0 or first_E[e] < 0:
                    continue
                p, home, left = first_E[e], home_E[e] // S, quota_GS[home_E[e] // S, home_E[e] % S]
                first_E[e] = -1
                local = min(load_GE[home, e], left) - load_GE[home, e]
                served_V[node_G[home]] += left
                q = p
                while q >= 0:
                    quota = quota_GS[q // S, q % S]
                    local += min(load_GE[q // S, e], quota)
                    served_V[node_G[q // S]] += quota
                    q = next_P[q]
                inside = min(demand_VE[node_G[home], e], served_V[node_G[home]]) - demand_VE[node_G[home], e]
                served_V[node_G[home]] = 0
                while p >= 0:
                    v = node_G[p // S]
                    inside += min(demand_VE[v, e], served_V[v])
                    served_V[v] = 0
                    p = next_P[p]
                nearer_s += rate_K[RDMA_PAIR] * inside - rate_K[PEER_PAIR] * (inside - local)
    return compute_s - nearer_s + copies_seconds(home_E, node_G, num_base, rate_K, expert_GS, quota_GS)
