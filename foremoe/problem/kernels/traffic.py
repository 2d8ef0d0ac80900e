"""Traffic: the pairs that every rank of a row serves, sends and receives, updated incrementally.

The part of one expert can be removed, changed and added again. The time for this depends on the number of ranks that hold the
expert and on their nodes, but not on the other experts. All sums except messages under ``"node"`` dispatch are whole numbers, so
a part that is removed and added again leaves them exactly as they were.
"""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.kernels.reached import reached

# Letters: G ranks, V nodes, E experts, S slots per rank, X sums, H holders of an expert.

# First axis of `Traffic.sum_XG`, summed by rank. RDMA is summed by NIC, except FAR_COPIES, the RDMA copies from or to a rank.
PAIRS, PADDED, BUSY, PEER_OUT, PEER_IN, RDMA_OUT, RDMA_IN = range(7)
COPY_OUT, COPY_IN, RDMA_COPY_OUT, RDMA_COPY_IN, FAR_COPIES = range(7, 12)
NUM_SUMS = 12
# Kinds of dispatch. With SPREAD, sources are unknown, and each rank is assumed to send an equal part of every expert's pairs.
BY_PAIR, BY_NODE, SPREAD_BY_PAIR, SPREAD_BY_NODE = range(4)


class Ranks(NamedTuple):
    """The ranks of a cluster, with the kind of dispatch between them."""

    node_G: Array
    order_G: Array  # ranks, node by node, in ascending order in a node
    first_V: Array  # start of each node in `order_G`, and the end
    nic_G: Array
    num_nics: int
    forward_VG: Array  # rank that a message of rank g reaches first in node v; in its own node, g itself
    travel: int
    num_topk: int
    tile: int  # number of pairs in a tile; the pairs of an expert on a rank are computed in whole tiles


class Row(NamedTuple):
    """The data of a row that do not depend on the placement."""

    load_GE: Array  # int32
    demand_VE: Array
    pairs_G: Array  # float64, pairs of every source
    load_E: Array
    home_E: Array  # home rank of every expert
    ranks: Ranks


class Traffic(NamedTuple):
    """A placement of a row and the traffic that results from it."""

    quota_EG: Array  # int32, pairs of an expert that a rank serves
    holder_EG: Array  # int64, ranks that hold an expert: its home, then its replicas in any order
    num_E: Array  # int64, number of those ranks
    sum_XG: Array  # float64
    flow_GG: Array  # float64, only for node dispatch: pairs of a source that a rank (first axis) serves
    flow_VG: Array  # pairs of a source that a node serves
    sent_GG: Array  # flows for which messages are counted
    sent_VG: Array
    came_GG: Array  # number of those messages, one for each token of a source that has an expert there
    came_VG: Array
    stale_G: Array  # bool, ranks whose messages are not up to date
    rest_2G: Array  # int64, scratch: pairs of one expert that sources still have, and that ranks can still take


@kernel
def empty_traffic(num_experts, num_ranks, num_nodes, num_nics, by_node):
    """Returns a traffic in which no expert has been placed yet."""
    E, G, V = num_experts, num_ranks, num_nodes
    (G_, V_) = (G, V) if by_node else (0, 0)
    return Traffic(
        np.zeros((E, G), np.int32), np.zeros((E, G), np.int64), np.zeros(E, np.int64), np.zeros((NUM_SUMS, max(G, num_nics))),
        np.zeros((G_, G)), np.zeros((V_, G)), np.zeros((G_, G)), np.zeros((V_, G)), np.zeros((G_, G)), np.zeros((V_, G)),
        np.zeros(G, np.bool_),
        np.zeros((2, G), np.int64),
    )  # fmt: skip


@inner_kernel
def put(e, sign, row, t):
    """Adds the messages from tokens to the slots of expert `e`, according to the split law. If `sign` is -1, removes them."""
    if row.ranks.travel == BY_PAIR:
        _put_pairs(e, sign, row, t)
    elif row.ranks.travel == BY_NODE:
        _put_flow(e, sign, row, t)


@inner_kernel
def _put_pairs(e, sign, row, t):
    """Adds the pairs of an expert under pairs dispatch. All pairs of a source were counted as crossing nodes before."""
    ranks, load_GE, quota_EG, total_XG = row.ranks, row.load_GE, t.quota_EG, t.sum_XG
    if t.num_E[e] == 1:
        rank = t.holder_EG[e, 0]
        v = ranks.node_G[rank]
        for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
            g = ranks.order_G[x]
            total_XG[PEER_OUT, g] += sign * load_GE[g, e]
            total_XG[RDMA_OUT, ranks.nic_G[g]] -= sign * load_GE[g, e]
        total_XG[PEER_OUT, rank] -= sign * load_GE[rank, e]
        total_XG[PEER_IN, rank] += sign * (row.demand_VE[v, e] - load_GE[rank, e])
        total_XG[RDMA_IN, ranks.nic_G[rank]] += sign * (row.load_E[e] - row.demand_VE[v, e])
        return
    for i in range(t.num_E[e]):
        v = ranks.node_G[t.holder_EG[e, i]]
        seen = False
        for j in range(i):
            seen = seen or ranks.node_G[t.holder_EG[e, j]] == v
        if seen:
            continue
        own = served = np.int64(0)
        for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
            g = ranks.order_G[x]
            own += min(load_GE[g, e], quota_EG[e, g])
            served += quota_EG[e, g]
        room = served - own
        stay = min(row.demand_VE[v, e] - own, room)
        left = begin = np.int64(0)
        left = stay
        for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
            g = ranks.order_G[x]
            had, quota = np.int64(load_GE[g, e]), np.int64(quota_EG[e, g])
            kept = min(had, quota)
            sent = min(had - kept, left)  # in the order of sources
            left -= sent
            total_XG[PEER_OUT, g] += sign * sent
            total_XG[RDMA_OUT, ranks.nic_G[g]] -= sign * (sent + kept)
            if quota > kept:  # in proportion to the pairs that ranks can still take
                end = begin + quota - kept
                took = end * stay // room - begin * stay // room
                begin = end
                total_XG[PEER_IN, g] += sign * took
                total_XG[RDMA_IN, ranks.nic_G[g]] += sign * (quota - kept - took)


@inner_kernel
def _flow(dst, src, pairs, ranks, t):
    t.flow_GG[dst, src] += pairs
    t.flow_VG[ranks.node_G[dst], src] += pairs


@inner_kernel
def _put_flow(e, sign, row, t):
    ranks, load_GE, quota_EG, rest_2G = row.ranks, row.load_GE, t.quota_EG, t.rest_2G
    G = ranks.node_G.size
    for i in range(t.num_E[e]):
        t.stale_G[t.holder_EG[e, i]] = True
    if t.num_E[e] == 1:
        for g in range(G):
            _flow(t.holder_EG[e, 0], g, sign * load_GE[g, e], ranks, t)
        return
    for g in range(G):
        kept = np.int64(min(load_GE[g, e], quota_EG[e, g]))
        if kept > 0:
            _flow(g, g, sign * kept, ranks, t)
        rest_2G[0, g], rest_2G[1, g] = load_GE[g, e] - kept, quota_EG[e, g] - kept
    for v in range(ranks.first_V.size - 1):
        _share_node(v, sign, ranks, t)
    dst = 0
    for src in range(G):
        while rest_2G[0, src] > 0:
            while rest_2G[1, dst] == 0:
                dst += 1
            sent = min(rest_2G[0, src], rest_2G[1, dst])
            _flow(dst, src, sign * sent, ranks, t)
            rest_2G[0, src] -= sent
            rest_2G[1, dst] -= sent


@inner_kernel
def _share_node(v, sign, ranks, t):
    """Divides the remaining pairs of a node's sources over ranks of the node, in proportion to the pairs they can still take."""
    rest_2G = t.rest_2G
    low, high = ranks.first_V[v], ranks.first_V[v + 1]
    asked = room = begin = np.int64(0)
    for x in range(low, high):
        asked += rest_2G[0, ranks.order_G[x]]
        room += rest_2G[1, ranks.order_G[x]]
    stay, source = min(asked, room), low
    if stay == 0:
        return
    for x in range(low, high):
        g = ranks.order_G[x]
        end = begin + rest_2G[1, g]
        took = end * stay // room - begin * stay // room
        begin = end
        rest_2G[1, g] -= took
        while took > 0:
            src = ranks.order_G[source]
            sent = min(took, rest_2G[0, src])
            if sent == 0:
                source += 1
                continue
            _flow(g, src, sign * sent, ranks, t)
            rest_2G[0, src] -= sent
            took -= sent


@inner_kernel
def settle(row, t):
    """Updates the numbers of messages after the flow of pairs has changed. Does nothing unless tokens are sent by node."""
    if row.ranks.travel != BY_NODE:
        return
    ranks = row.ranks
    for v in range(ranks.first_V.size - 1):
        stale = False
        for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
            g = ranks.order_G[x]
            if t.stale_G[g]:
                stale = True
                t.stale_G[g] = False
                _renew_rank(v, g, row, t)
        if stale:
            _renew_node(v, row, t)


@inner_kernel
def _messages(pairs, source_pairs, row):
    """Estimates the messages to a place that serves `pairs` of a source's pairs, one for each token with an expert there."""
    return reached(source_pairs / row.ranks.num_topk, pairs, row.ranks.num_topk, row.load_E.size)


@inner_kernel
def _renew_rank(v, g, row, t):
    forward_G, total_XG, came_G = row.ranks.forward_VG[v], t.sum_XG, t.came_GG[g]
    flow_G, sent_G = t.flow_GG[g], t.sent_GG[g]
    for src in range(flow_G.size):
        if flow_G[src] != sent_G[src]:
            sent_G[src] = flow_G[src]
            if forward_G[src] != g:
                came = _messages(flow_G[src], row.pairs_G[src], row)
                total_XG[PEER_OUT, forward_G[src]] += came - came_G[src]
                total_XG[PEER_IN, g] += came - came_G[src]
                came_G[src] = came


@inner_kernel
def _renew_node(v, row, t):
    ranks, total_XG, came_G = row.ranks, t.sum_XG, t.came_VG[v]
    flow_G, sent_G = t.flow_VG[v], t.sent_VG[v]
    for src in range(flow_G.size):
        if flow_G[src] != sent_G[src]:
            sent_G[src] = flow_G[src]
            if ranks.node_G[src] != v:
                came = _messages(flow_G[src], row.pairs_G[src], row)
                total_XG[RDMA_OUT, ranks.nic_G[src]] += came - came_G[src]
                total_XG[RDMA_IN, ranks.nic_G[ranks.forward_VG[v, src]]] += came - came_G[src]
                came_G[src] = came


@inner_kernel
def spread(row, t):
    """Fills in the traffic if sources are not known. Each source is then assumed to send the same share of every rank's pairs."""
    ranks, total_XG = row.ranks, t.sum_XG
    G, V = ranks.node_G.size, ranks.first_V.size - 1
    by_node, all_pairs = ranks.travel == SPREAD_BY_NODE, 0.0
    for g in range(G):
        all_pairs += total_XG[PAIRS, g]
        total_XG[PEER_OUT, g] = total_XG[PEER_IN, g] = 0.0
    for y in range(total_XG.shape[1]):
        total_XG[RDMA_OUT, y] = total_XG[RDMA_IN, y] = 0.0
    if all_pairs == 0.0:
        return
    for v in range(V):
        low, high = ranks.first_V[v], ranks.first_V[v + 1]
        inside = 0.0
        for x in range(low, high):
            g = ranks.order_G[x]
            pairs = total_XG[PAIRS, g] / G
            inside += pairs
            came = _messages(pairs, all_pairs / G, row) if by_node else pairs
            for src in range(G):
                sender = ranks.forward_VG[v, src] if by_node else src
                if sender != g and (by_node or ranks.node_G[src] == v):
                    total_XG[PEER_OUT, sender] += came
                    total_XG[PEER_IN, g] += came
                elif not by_node and ranks.node_G[src] != v:
                    total_XG[RDMA_IN, ranks.nic_G[g]] += came
        crossed = _messages(inside, all_pairs / G, row) if by_node else inside
        for src in range(G):
            if ranks.node_G[src] != v:
                total_XG[RDMA_OUT, ranks.nic_G[src]] += crossed
                if by_node:
                    total_XG[RDMA_IN, ranks.nic_G[ranks.forward_VG[v, src]]] += crossed
