"""Dispatch of a row's tokens. The messages of one expert can be removed, changed and added again."""

import numpy as np

from foremoe.base.compiled import inner_kernel
from foremoe.problem.kernels.messages import copy_row, put_flow, restore_messages, settle_messages
from foremoe.problem.kernels.reached import reached
from foremoe.problem.kernels.traffic import (
    BY_NODE,
    BY_PAIR,
    PAIRS,
    PEER_IN,
    PEER_OUT,
    RDMA_IN,
    RDMA_OUT,
    SPREAD_BY_NODE,
)

# Letters: G ranks, V nodes, E experts, X sums.


@inner_kernel
def put(e, sign, row, t):
    """Adds the messages from tokens to the slots of expert `e`, according to the split law. If `sign` is -1, removes them."""
    if row.ranks.travel == BY_PAIR:
        _put_pairs(e, sign, row, t)
    elif row.ranks.travel == BY_NODE:
        put_flow(e, sign, row, t.quota_EG, t.holder_EG[e, : t.num_E[e]], t.messages)


@inner_kernel
def _put_pairs(e, sign, row, t):
    """Adds the pairs of an expert under pairs dispatch. All pairs of a source were counted as crossing nodes before."""
    ranks, load_G, quota_G, total_XG = row.ranks, row.load_EG[e], t.quota_EG[e], t.sum_XG
    if t.num_E[e] == 1:
        rank = t.holder_EG[e, 0]
        v = ranks.node_G[rank]
        for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
            g = ranks.order_G[x]
            total_XG[PEER_OUT, g] += sign * load_G[g]
            total_XG[RDMA_OUT, ranks.nic_G[g]] -= sign * load_G[g]
        total_XG[PEER_OUT, rank] -= sign * load_G[rank]
        total_XG[PEER_IN, rank] += sign * (row.demand_VE[v, e] - load_G[rank])
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
            own += min(load_G[g], quota_G[g])
            served += quota_G[g]
        room = served - own
        stay = min(row.demand_VE[v, e] - own, room)
        left, end, gone = stay, np.int64(0), np.int64(0)
        for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
            g = ranks.order_G[x]
            had, quota = np.int64(load_G[g]), np.int64(quota_G[g])
            kept = min(had, quota)
            sent = min(had - kept, left)  # in the order of sources
            left -= sent
            total_XG[PEER_OUT, g] += sign * sent
            total_XG[RDMA_OUT, ranks.nic_G[g]] -= sign * (sent + kept)
            if quota > kept:  # in proportion to the pairs that ranks can still take
                end += quota - kept
                given = stay if end == room else end * stay // room  # division is slow
                total_XG[PEER_IN, g] += sign * (given - gone)
                total_XG[RDMA_IN, ranks.nic_G[g]] += sign * (quota - kept - given + gone)
                gone = given


@inner_kernel
def settle(row, t):
    """Updates the numbers of messages after `put`. Does nothing unless tokens are sent by node."""
    if row.ranks.travel == BY_NODE:
        settle_messages(row, t.sum_XG, t.messages)


@inner_kernel
def keep(t):
    """Notes the sums of links, so that `restore` can undo the calls of `put` that follow. All earlier calls must be settled."""
    for x in range(4):
        copy_row(t.sum_XG[PEER_OUT + x], t.kept_XG[x])


@inner_kernel
def restore(settled, row, t):
    """Undoes all calls of `put` since `keep`, and that of `settle` if there was one."""
    for x in range(4):
        copy_row(t.kept_XG[x], t.sum_XG[PEER_OUT + x])
    if row.ranks.travel == BY_NODE:
        restore_messages(settled, t.messages)


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
    sent_tokens = all_pairs / G / ranks.num_topk
    for v in range(V):
        low, high = ranks.first_V[v], ranks.first_V[v + 1]
        inside = 0.0
        for x in range(low, high):
            g = ranks.order_G[x]
            pairs = total_XG[PAIRS, g] / G
            inside += pairs
            came = reached(sent_tokens, pairs, ranks.num_topk, row.load_E.size) if by_node else pairs
            for src in range(G):
                sender = ranks.forward_VG[v, src] if by_node else src
                if sender != g and (by_node or ranks.node_G[src] == v):
                    total_XG[PEER_OUT, sender] += came
                    total_XG[PEER_IN, g] += came
                elif not by_node and ranks.node_G[src] != v:
                    total_XG[RDMA_IN, ranks.nic_G[g]] += came
        crossed = reached(sent_tokens, inside, ranks.num_topk, row.load_E.size) if by_node else inside
        for src in range(G):
            if ranks.node_G[src] != v:
                total_XG[RDMA_OUT, ranks.nic_G[src]] += crossed
                if by_node:
                    total_XG[RDMA_IN, ranks.nic_G[ranks.forward_VG[v, src]]] += crossed
