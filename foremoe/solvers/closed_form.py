"""Seconds of a placement, up to what is the same for all placements: `estimate_rows` of one row, without a pass over
experts."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import add_copies, back_s, busiest_s, late_s

# Letters: G ranks, S slots per rank, E experts, V nodes, I replicas.


@inner_kernel
def fans_seconds(fan_4G, rates):
    """Seconds of all replicas: their price, and what of `busiest_s` does not hide; `add_copies` fills `fan_4G`."""
    peers = rdmas = np.int64(0)
    for g in range(fan_4G.shape[1]):
        peers += fan_4G[0, g]
        rdmas += fan_4G[2, g]
    return rates.replica_peer_s * peers + rates.replica_rdma_s * rdmas + late_s(busiest_s(fan_4G, rates), rates)


@inner_kernel
def _free_fan(copy_s, gradient_s, rates):
    most = rates.hide_forward_s / copy_s
    one_s = back_s(1, 0, copy_s, gradient_s, rates)
    if one_s > 0.0:
        most = min(most, rates.hide_backward_s / one_s)
    return np.int64(min(most, 1e9))


@inner_kernel
def free_fans(rates):
    """The most replicas of one rank's experts, or on one rank, that hide entirely: on peer and on RDMA links."""
    return (
        _free_fan(rates.copy_peer_s, rates.gradient_peer_s, rates),
        _free_fan(rates.copy_rdma_s, rates.gradient_rdma_s, rates),
    )


@kernel
def price_row(row, rates, placed):
    """Seconds of a placement at `rates`, not those of `row`, up to what is the same for all placements of the row."""
    (G, S), E = placed.expert_GS.shape, row.home_E.size
    held_5I, last_E = np.empty((5, G * (S - row.num_base)), np.int64), np.full(E, -1, np.int64)
    served_V, fan_4G = np.zeros(row.demand_VE.shape[0], np.int64), np.zeros((4, G), np.int64)
    return _price(row, rates, placed, held_5I, last_E, served_V, fan_4G)


@inner_kernel
def _price(row, rates, placed, held_5I, last_E, served_V, fan_4G):
    """`price_row` over memory for replicas in the order of their slots, and by expert the one before: divisions and steps over
    slots would cost most."""
    expert_GS, quota_GS, load_G = placed
    node_G, home_E, load_GE, demand_VE, busy_G = row.node_G, row.home_E, row.load_GE, row.demand_VE, row.busy_G
    rank_I, home_I, next_I, expert_I, quota_I = held_5I[0], held_5I[1], held_5I[2], held_5I[3], held_5I[4]
    G, S = expert_GS.shape
    compute_s, nearer_s, num = 0.0, 0.0, 0
    for g in range(G):
        busy = busy_G[g]
        for s in range(row.num_base, S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] == 0:
                continue
            busy += 1
            home = home_E[e] // S
            add_copies(1, home, g, node_G, fan_4G)
            rank_I[num], home_I[num], expert_I[num], quota_I[num] = g, home, e, quota_GS[g, s]
            next_I[num], last_E[e] = last_E[e], num
            num += 1
        compute_s = max(compute_s, rates.pair_s * load_G[g] + rates.slot_s * busy)
    for first in range(num if row.located else 0):
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
        nearer_s += rates.rdma_pair_s * inside - rates.peer_pair_s * (inside - local)
    return compute_s - nearer_s + fans_seconds(fan_4G, rates)
