"""How long the exchanges of every row keep the links busy: tokens to their experts, by link class."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.machine.cluster import Cluster
from foremoe.plan.plan import Plan
from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, V nodes, K NICs, E experts, S slots per rank.


class Exchange(NamedTuple):
    """Seconds of one dispatch per row; combine, and both of backward, send the same pairs or their way back.

    `peer_N`, `rdma_N`: of the busiest rank (NIC), direction and link class. `peer_busy_G`, `rdma_busy_G`: seconds that a rank
    sends plus those that it receives, summed over rows with the row's weight.
    """

    peer_N: Array
    rdma_N: Array
    peer_busy_G: Array
    rdma_busy_G: Array


def nic_of_rank(cluster: Cluster) -> Array:
    """int64 [G]: the NIC of every rank; `nic_sharing` ranks of a node share one, in rank order."""
    nic_G = np.empty(cluster.num_ranks, np.int64)
    first = 0
    for node in range(cluster.num_nodes):
        ranks = np.flatnonzero(cluster.node_of_rank_G == node)
        nic_G[ranks] = first + np.arange(len(ranks)) // cluster.nic_sharing
        first = int(nic_G[ranks].max()) + 1
    return nic_G


def exchange(problem: Problem, plan: Plan, weight_N: Array) -> Exchange:
    """The exchanges of every row of a plan, by the split law (own rank, own node, the rest).

    Args:
        weight_N: int64, how often a row dispatches.

    Raises:
        InputError: the problem does not say which rank asks for which expert.
    """
    load_NGE = problem.load_NGE
    if load_NGE is None:
        raise InputError("simulation needs counts by source rank; give the problem its load_MLGE.")
    cluster = problem.cluster
    peer_s = problem.model.token_bytes / cluster.peer_bytes_per_s
    rdma_s = problem.model.token_bytes / cluster.rdma_bytes_per_s
    out_N2 = np.zeros((problem.N, 2))
    nic_G = nic_of_rank(cluster)
    parts: list[Array] = []

    def block(low: int, high: int) -> None:
        pairs_2G = np.zeros((2, problem.G), np.int64)
        _exchange_rows(
            low, high, load_NGE, plan.expert_NGS, np.ascontiguousarray(plan.quota_NGS), cluster.node_of_rank_G, nic_G, peer_s,
            rdma_s, weight_N, out_N2, pairs_2G,
        )  # fmt: skip
        parts.append(pairs_2G)

    for_rows(block, problem.N, whole=True)
    pairs_2G = np.sum(parts, axis=0)
    return Exchange(out_N2[:, 0], out_N2[:, 1], pairs_2G[0] * peer_s, pairs_2G[1] * rdma_s)


@kernel
def _exchange_rows(  # type: ignore[no-untyped-def]
    low, high, load_NGE, expert_NGS, quota_NGS, node_G, nic_G, peer_s, rdma_s, weight_N, out_N2, pairs_2G
):
    """Per expert: tier 1 stays on its rank, tier 2 in its node (first in line first), what is left crosses nodes."""
    G, S = expert_NGS.shape[1], expert_NGS.shape[2]
    E, V = load_NGE.shape[2], node_G.max() + 1
    num_nics = nic_G.max() + 1
    first_E, next_P = np.empty(E, np.int64), np.empty(G * S, np.int64)
    peer = np.empty((2, G), np.int64)  # pairs out, in
    rdma = np.empty((2, G), np.int64)
    nic = np.empty((2, num_nics), np.int64)
    demand_G, quota_G = np.empty(G, np.int64), np.empty(G, np.int64)
    demand_V, quota_V, asked_V = np.empty(V, np.int64), np.empty(V, np.int64), np.empty(V, np.int64)
    for n in range(low, high):
        first_E[:] = -1
        for g in range(G - 1, -1, -1):
            for s in range(S):
                e = expert_NGS[n, g, s]
                if e >= 0 and quota_NGS[n, g, s] > 0:
                    next_P[g * S + s], first_E[e] = first_E[e], g * S + s
        peer[:] = 0
        rdma[:] = 0
        for e in range(E):
            p = first_E[e]
            if p < 0:
                continue
            if next_P[p] < 0:  # one slot serves all
                g = p // S
                for source in range(G):
                    pairs = load_NGE[n, source, e]
                    if pairs == 0 or source == g:
                        continue
                    link = peer if node_G[source] == node_G[g] else rdma
                    link[0, source] += pairs
                    link[1, g] += pairs
                continue
            quota_G[:] = 0
            while p >= 0:
                quota_G[p // S] += quota_NGS[n, p // S, p % S]
                p = next_P[p]
            demand_V[:] = 0
            quota_V[:] = 0
            for g in range(G):
                own = min(np.int64(load_NGE[n, g, e]), quota_G[g])
                demand_G[g] = load_NGE[n, g, e] - own
                quota_G[g] -= own
                demand_V[node_G[g]] += demand_G[g]
                quota_V[node_G[g]] += quota_G[g]
            for v in range(V):
                demand_V[v] = min(demand_V[v], quota_V[v])  # now: what stays in the node
                asked_V[v] = demand_V[v]
            for g in range(G):
                v = node_G[g]
                sent = min(demand_G[g], demand_V[v])
                demand_V[v] -= sent
                peer[0, g] += sent
                rdma[0, g] += demand_G[g] - sent
                taken = min(quota_G[g], asked_V[v])
                asked_V[v] -= taken
                peer[1, g] += taken
                rdma[1, g] += quota_G[g] - taken
        nic[:] = 0
        most = np.int64(0)
        for g in range(G):
            most = max(most, max(peer[0, g], peer[1, g]))
            nic[0, nic_G[g]] += rdma[0, g]
            nic[1, nic_G[g]] += rdma[1, g]
            pairs_2G[0, g] += weight_N[n] * (peer[0, g] + peer[1, g])
            pairs_2G[1, g] += weight_N[n] * (rdma[0, g] + rdma[1, g])
        out_N2[n, 0] = most * peer_s
        out_N2[n, 1] = nic.max() * rdma_s
