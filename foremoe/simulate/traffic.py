"""How long the exchanges of every row keep the links busy: tokens to their experts, by link class."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.plan.plan import Plan
from foremoe.plan.split import link_slots, shared_out
from foremoe.problem.problem import Problem
from foremoe.simulate.nics import add_row
from foremoe.simulate.node_traffic import NodeRows, node_exchange_rows
from foremoe.simulate.token_traffic import counted_messages

# Letters: N rows, G ranks, V nodes, Y NICs, E experts, S slots per rank.


class Exchange(NamedTuple):
    """Seconds of one dispatch per row; combine, and both of backward, send the same pairs or their way back."""

    peer_N: Array  # busiest rank and direction
    rdma_N: Array  # busiest NIC and direction
    peer_busy_G: Array  # sends plus receives, summed over rows with their weights
    rdma_busy_G: Array


def exchange(problem: Problem, plan: Plan, weight_N: Array) -> Exchange:
    """The exchanges of every row of a plan, by the split law; a row dispatches `weight_N` (int64) times.

    Where a token travels once per node, messages are counted if the problem has its tokens, else estimated: see `reached`.
    """
    load_NGE = problem.load_NGE
    if load_NGE is None:
        raise InputError("simulation needs counts by source rank; give the problem its load_MLGE.")
    cluster, busy_N2 = problem.cluster, np.zeros((problem.N, 2))
    pair_s = problem.model.token_bytes / np.array([cluster.kernel_bytes_per_s, cluster.rdma_bytes_per_s])
    node_G, nic_G, quota_NGS = cluster.node_of_rank_G, cluster.nic_of_rank_G, np.ascontiguousarray(plan.quota_NGS)
    parts: list[Array] = []
    if cluster.dispatch == "node" and problem.routed is not None:
        place_G = _places(node_G)
        counted = _Counted(*counted_messages(problem, plan, place_G), weight_N, nic_G, pair_s, busy_N2)
        for_rows(lambda low, high: parts.append(_busy_rows(low, high, counted)), problem.N, whole=True)
    elif cluster.dispatch == "node":
        by_node = NodeRows(
            load_NGE, problem.counts().demand_NVE, plan.expert_NGS, quota_NGS, weight_N, node_G, _places(node_G), nic_G,
            problem.model.num_topk, pair_s, busy_N2,
        )  # fmt: skip
        for_rows(lambda low, high: parts.append(node_exchange_rows(low, high, by_node)), problem.N, whole=True)
    else:
        rows = _Rows(load_NGE, plan.expert_NGS, quota_NGS, weight_N, node_G, nic_G, pair_s, busy_N2)
        for_rows(lambda low, high: parts.append(_exchange_rows(low, high, rows)), problem.N, whole=True)
    peer_busy_G, rdma_busy_G = np.sum(parts, axis=0) * pair_s[:, None]
    return Exchange(busy_N2[:, 0], busy_N2[:, 1], peer_busy_G, rdma_busy_G)


def _places(node_G: Array) -> Array:
    """int64 [G]: the number of every rank inside its node."""
    order_G = np.argsort(node_G, kind="stable")
    first_V = np.searchsorted(node_G[order_G], np.arange(node_G.max() + 1))
    place_G = np.empty(len(node_G), np.int64)
    place_G[order_G] = np.arange(len(node_G)) - first_V[node_G[order_G]]
    return place_G


class _Counted(NamedTuple):
    """Messages of every row, seconds of one by link class, and where the seconds of the rows are written."""

    peer_N2G: Array
    rdma_N2G: Array
    weight_N: Array
    nic_G: Array
    pair_s: Array
    busy_N2: Array


@kernel
def _busy_rows(low, high, rows):
    """Writes the seconds of rows [low, high); returns int64 [2, G], the weighted messages of every rank by link class."""
    total_2G, nic_2Y = np.zeros((2, rows.nic_G.size), np.int64), np.empty((2, rows.nic_G.max() + 1), np.int64)
    for n in range(low, high):
        add_row(n, rows.peer_N2G[n], rows.rdma_N2G[n], rows, rows.pair_s, nic_2Y, total_2G)
    return total_2G


class _Rows(NamedTuple):
    """The rows of a plan, seconds of one pair by link class, and where the seconds of the rows are written."""

    load_NGE: Array
    expert_NGS: Array
    quota_NGS: Array
    weight_N: Array
    node_G: Array
    nic_G: Array
    pair_s: Array
    busy_N2: Array


class _Pairs(NamedTuple):
    """Pairs of one row over each link class, out of and into every rank; and scratch: by rank and node, pairs of one expert."""

    peer_2G: Array
    rdma_2G: Array
    demand_G: Array
    quota_G: Array
    demand_V: Array
    quota_V: Array
    asked_V: Array
    begin_V: Array


@kernel
def _exchange_rows(low, high, rows):
    """Writes the seconds of rows [low, high); returns int64 [2, G], the weighted pairs of every rank by link class."""
    G, S, E, V = rows.expert_NGS.shape[1], rows.expert_NGS.shape[2], rows.load_NGE.shape[2], rows.node_G.max() + 1
    first_E, next_P = np.empty(E, np.int64), np.empty(G * S, np.int64)
    by_rank, by_node = np.empty((6, G), np.int64), np.empty((4, V), np.int64)
    pairs = _Pairs(by_rank[:2], by_rank[2:4], by_rank[4], by_rank[5], by_node[0], by_node[1], by_node[2], by_node[3])
    total_2G, nic_2Y = np.zeros((2, G), np.int64), np.empty((2, rows.nic_G.max() + 1), np.int64)
    for n in range(low, high):
        link_slots(rows.expert_NGS[n], rows.quota_NGS[n], first_E, next_P)
        pairs.peer_2G[:] = 0
        pairs.rdma_2G[:] = 0
        for e in range(E):
            if first_E[e] >= 0:
                if next_P[first_E[e]] < 0:
                    _send_to_one(rows.load_NGE[n, :, e], first_E[e] // S, rows.node_G, pairs)
                else:
                    pairs.quota_G[:] = 0
                    p = first_E[e]
                    while p >= 0:
                        pairs.quota_G[p // S] += rows.quota_NGS[n, p // S, p % S]
                        p = next_P[p]
                    _send_to_several(rows.load_NGE[n, :, e], rows.node_G, pairs)
        add_row(n, pairs.peer_2G, pairs.rdma_2G, rows, rows.pair_s, nic_2Y, total_2G)
    return total_2G


@kernel
def _send_to_one(load_G, rank, node_G, pairs):
    """All pairs of an expert go to its only slot, on `rank`."""
    for source in range(node_G.size):
        num = load_G[source]
        if num > 0 and source != rank:
            link_2G = pairs.peer_2G if node_G[source] == node_G[rank] else pairs.rdma_2G
            link_2G[0, source] += num
            link_2G[1, rank] += num


@kernel
def _send_to_several(load_G, node_G, pairs):
    """Tier 1 stays on its rank, tier 2 in its node (first sources first, slots share), the rest crosses; uses up `quota_G`."""
    demand_G, quota_G, demand_V, quota_V = pairs.demand_G, pairs.quota_G, pairs.demand_V, pairs.quota_V
    asked_V, begin_V = pairs.asked_V, pairs.begin_V
    demand_V[:] = 0
    quota_V[:] = 0
    begin_V[:] = 0
    for g in range(node_G.size):
        own = min(np.int64(load_G[g]), quota_G[g])
        demand_G[g] = load_G[g] - own
        quota_G[g] -= own
        demand_V[node_G[g]] += demand_G[g]
        quota_V[node_G[g]] += quota_G[g]
    for v in range(demand_V.size):
        demand_V[v] = min(demand_V[v], quota_V[v])  # now: what stays in the node
        asked_V[v] = demand_V[v]
    for g in range(node_G.size):
        v = node_G[g]
        sent = min(demand_G[g], demand_V[v])
        demand_V[v] -= sent
        pairs.peer_2G[0, g] += sent
        pairs.rdma_2G[0, g] += demand_G[g] - sent
        taken = shared_out(asked_V, quota_V, begin_V, v, quota_G[g])
        pairs.peer_2G[1, g] += taken
        pairs.rdma_2G[1, g] += quota_G[g] - taken
