"""Row kernel of the closed form: what it needs of a placement, in one pass over the slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import add_copies, busiest_s

# Letters: N rows, L layers, G ranks, V nodes, E experts, S slots per rank.


class Held(NamedTuple):
    """A placement, its homes, and the node of every rank."""

    home_LE: Array
    node_G: Array
    num_base: int
    expert_NGS: Array
    quota_NGS: Array


class Features(NamedTuple):
    """What the closed form needs of a placement, float64 [N] each. Without source ranks sources count as uniform.

    A copy is any slot that holds, with a quota, an expert whose home is another rank.
    """

    slowest_N: Array  # seconds of the slowest rank at ``pair_s`` per pair
    compute_N: Array  # the same without exchange, ``late_s`` per pair less
    peer_pairs_N: Array  # pairs served on another rank of their node
    rdma_pairs_N: Array  # pairs served in another node
    forward_s_N: Array  # seconds of copies through the busiest rank, direction and link in forward
    backward_s_N: Array  # the same of copies and gradients in backward
    peer_copies_N: Array  # copies inside nodes
    rdma_copies_N: Array  # copies across nodes


@inner_kernel
def _read_row(n, counts, held, rates, served_VE, fan_4G):
    """Adds up what nodes serve and the copies of row `n`; both start at zero.

    Returns seconds of the slowest rank, the same without exchange, and pairs served on their own rank (if located).
    """
    expert_GS, quota_GS, node_G, num_base = held.expert_NGS[n], held.quota_NGS[n], held.node_G, held.num_base
    load_E, home_E, located = counts.load_NE[n], held.home_LE[n % held.home_LE.shape[0]], counts.located
    load_GE = counts.load_NGE[n if located else 0]
    slowest_s, compute_s, work_s, local_pairs = 0.0, 0.0, rates.pair_s - rates.late_s, 0
    for g in range(node_G.size):
        load = busy = 0
        for s in range(expert_GS.shape[1]):
            e, quota = expert_GS[g, s], quota_GS[g, s]
            if e < 0:
                continue
            load += quota
            served_VE[node_G[g], e] += quota
            if quota > 0 or (s < num_base and load_E[e] > 0):
                busy += 1
            if located:
                local_pairs += min(load_GE[g, e], quota)
            home = home_E[e] // num_base
            if home != g and quota > 0:
                add_copies(1, home, g, node_G, fan_4G)
        slowest_s = max(slowest_s, rates.pair_s * load + rates.slot_s * busy)
        compute_s = max(compute_s, work_s * load + rates.slot_s * busy)
    return slowest_s, compute_s, local_pairs


@inner_kernel
def _feature_row(n, counts, held, rates, ranks_V, served_VE, fan_4G, out):
    """Fills row `n` of `out`, from memory for sums that starts at zero."""
    G, num_nodes, pairs = held.node_G.size, ranks_V.size, np.int64(0)
    load_E = counts.load_NE[n]
    for e in range(load_E.size):
        pairs += load_E[e]
    out.slowest_N[n], out.compute_N[n], local_pairs = _read_row(n, counts, held, rates, served_VE, fan_4G)
    if counts.located:
        inside = np.int64(0)
        for node in range(num_nodes):
            demand_E, served_E = counts.demand_NVE[n, node], served_VE[node]
            for e in range(load_E.size):
                inside += min(demand_E[e], served_E[e])
        out.peer_pairs_N[n], out.rdma_pairs_N[n] = inside - local_pairs, pairs - inside
    else:
        node_pairs = 0.0
        for node in range(num_nodes):
            node_pairs += pairs * (ranks_V[node] / G) * (ranks_V[node] / G)
        out.peer_pairs_N[n], out.rdma_pairs_N[n] = node_pairs - pairs / G, pairs - node_pairs
    out.forward_s_N[n], out.backward_s_N[n] = busiest_s(fan_4G, rates)
    peers = rdmas = np.int64(0)
    for g in range(G):
        peers += fan_4G[0, g]
        rdmas += fan_4G[2, g]
    out.peer_copies_N[n], out.rdma_copies_N[n] = peers, rdmas


@kernel
def feature_rows(low, high, counts, held, rates, out):
    """Fills rows [low, high) of the `Features` `out`."""
    ranks_V = np.bincount(held.node_G)
    served_VE = np.empty((ranks_V.size, counts.load_NE.shape[1]), np.int32)
    fan_4G = np.empty((4, held.node_G.size), np.int64)  # peer out, peer in, rdma out, rdma in
    for n in range(low, high):
        served_VE[:] = 0
        fan_4G[:] = 0
        _feature_row(n, counts, held, rates, ranks_V, served_VE, fan_4G, out)
