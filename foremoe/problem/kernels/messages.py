"""Messages under ``"node"`` dispatch, in which a token is sent once to each node and once to each rank that serves it.

Pairs that flow from a source to a rank are whole numbers and change with every expert. Messages are estimated from them for whole
ranks and nodes at a time, so that the loops over sources run on vector units.
"""

import numpy as np

from foremoe.base.compiled import inner_kernel
from foremoe.problem.kernels.traffic import PEER_IN, PEER_OUT, RDMA_IN, RDMA_OUT

# Letters: G ranks, V nodes, Y NICs, H holders of an expert, I some ranks.


@inner_kernel
def clear_messages(m):
    """Removes all pairs and messages."""
    for g in range(m.flow_GG.shape[0]):
        flow_G = m.flow_GG[g]
        for src in range(flow_G.size):
            flow_G[src] = 0
    for p in range(m.side_P.size):
        came_G = m.came_2PG[m.side_P[p], p]
        for src in range(came_G.size):
            came_G[src] = 0.0


@inner_kernel
def put_flow(e, sign, row, quota_EG, holders, m):
    """Adds the flow of pairs of an expert, according to the split law. If `sign` is -1, removes it."""
    ranks, load_G, quota_G, sign = row.ranks, row.load_EG[e], quota_EG[e], np.int64(sign)
    for g in holders:
        if not m.stale_G[g]:
            _mark(g, m)
    if holders.size == 1:
        flow_G = m.flow_GG[holders[0]]
        for src in range(load_G.size):
            flow_G[src] += sign * load_G[src]
        return
    copy_row(load_G, m.rest_G)
    for h in range(holders.size):
        g = holders[h]
        kept = min(load_G[g], quota_G[g])
        m.flow_GG[g, g] += sign * kept
        m.rest_G[g] -= kept
        m.room_G[g] = quota_G[g] - kept
        i = h
        while i > 0 and m.holder_H[i - 1] > g:
            m.holder_H[i] = m.holder_H[i - 1]
            i -= 1
        m.holder_H[i] = g
    for h in range(holders.size):
        v, seen = ranks.node_G[m.holder_H[h]], False
        for other in range(h):
            seen = seen or ranks.node_G[m.holder_H[other]] == v
        if not seen:
            _share_node(v, sign, h, holders.size, ranks, m)
    _share_rest(sign, holders.size, m)


@inner_kernel
def _share_node(v, sign, first, num, ranks, m):
    """Divides the remaining pairs of a node's sources over ranks of the node, in proportion to the pairs they can still take.

    The first of these ranks among the `num` holders has index `first`.
    """
    low, high = ranks.first_V[v], ranks.first_V[v + 1]
    asked = room = end = gone = np.int64(0)
    for x in range(low, high):
        asked += m.rest_G[ranks.order_G[x]]
    for h in range(first, num):
        if ranks.node_G[m.holder_H[h]] == v:
            room += m.room_G[m.holder_H[h]]
    stay, source = min(asked, room), low
    if stay == 0:
        return
    for h in range(first, num):
        g = m.holder_H[h]
        if ranks.node_G[g] != v:
            continue
        end += m.room_G[g]
        given = stay if end == room else end * stay // room  # division is slow
        took = given - gone
        gone = given
        m.room_G[g] -= took
        while took > 0:
            src = ranks.order_G[source]
            sent = min(took, np.int64(m.rest_G[src]))
            if sent == 0:
                source += 1
                continue
            m.flow_GG[g, src] += sign * sent
            m.rest_G[src] -= sent
            took -= sent


@inner_kernel
def _share_rest(sign, num, m):
    """Gives the remaining pairs of all sources, in the order of ranks, to the `num` holders in the order of ranks."""
    h, room, flow_G = 0, m.room_G[m.holder_H[0]], m.flow_GG[m.holder_H[0]]
    for src in range(m.rest_G.size):
        rest = np.int64(m.rest_G[src])
        while rest > room:
            flow_G[src] += sign * room
            rest -= room
            h += 1
            room, flow_G = m.room_G[m.holder_H[h]], m.flow_GG[m.holder_H[h]]
        flow_G[src] += sign * rest
        room -= rest


@inner_kernel
def settle_messages(row, sum_XG, m):
    """Updates messages, and their sums by link, after the flow of pairs has changed. `restore_messages` undoes this."""
    m.num_2[1] = 0
    for i in range(m.num_2[0]):
        g = m.stale_I[i]
        m.stale_G[g] = False
        if _differ(m.flow_GG[g], m.kept_GG[g]):
            m.stale_V[row.ranks.node_G[g]] = True
            _renew_rank(g, row, sum_XG, m)
    m.num_2[0] = 0
    for v in range(m.stale_V.size):
        if m.stale_V[v]:
            m.stale_V[v] = False
            _renew_node(v, row, sum_XG, m)


@inner_kernel
def restore_messages(settled, m):
    """Undoes all calls of `put_flow` since the last settling, or with `settled` this settling and the calls that it settled.

    Sums by link stay as they are.
    """
    if settled:
        for i in range(m.num_2[1]):
            p = m.place_I[i]
            m.side_P[p] ^= 1
            if p < m.stale_G.size:
                copy_row(m.kept_GG[p], m.flow_GG[p])
        return
    for i in range(m.num_2[0]):
        g = m.stale_I[i]
        m.stale_G[g] = False
        copy_row(m.kept_GG[g], m.flow_GG[g])
    m.num_2[0] = 0


@inner_kernel
def copy_row(from_G, to_G):
    """Copies an array, in a loop because kernels without reference counts compile no slice assignment."""
    for src in range(to_G.size):
        to_G[src] = from_G[src]


@inner_kernel
def _differ(a_G, b_G):
    found = np.int64(0)
    for src in range(a_G.size):
        found |= a_G[src] ^ b_G[src]
    return found != 0


@inner_kernel
def _mark(g, m):
    """Notes that the flow to rank `g` changes, and keeps the one before."""
    m.stale_G[g] = True
    m.stale_I[m.num_2[0]] = g
    m.num_2[0] += 1
    copy_row(m.flow_GG[g], m.kept_GG[g])


@inner_kernel
def _turn(p, m):
    """Turns a place to its other side. Returns its messages on the side before and on the new one."""
    m.place_I[m.num_2[1]] = p
    m.num_2[1] += 1
    side = m.side_P[p]
    m.side_P[p] = 1 - side
    return m.came_2PG[side, p], m.came_2PG[1 - side, p]


@inner_kernel
def _estimate(flow_G, row, held_G, came_G):
    """Writes the estimated messages of every source to a place that serves `flow_G` of its pairs. `reached` is the formula."""
    num_topk, num_experts = row.ranks.num_topk, row.load_E.size
    all_drawn, scale_G, tokens_G = 1.0, row.scale_G, row.tokens_G
    for src in range(flow_G.size):
        held_G[src], came_G[src] = flow_G[src] * scale_G[src], 1.0
    for drawn in range(0, num_topk - 1, 2):  # in pairs, to store half as often
        left, next_left = np.float64(num_experts - drawn), np.float64(num_experts - drawn - 1)
        all_drawn *= left * next_left
        for src in range(flow_G.size):
            came_G[src] *= max(0.0, left - held_G[src]) * max(0.0, next_left - held_G[src])
    if num_topk % 2:
        left = np.float64(num_experts - num_topk + 1)
        all_drawn *= left
        for src in range(flow_G.size):
            came_G[src] *= max(0.0, left - held_G[src])
    for src in range(flow_G.size):
        came_G[src] = tokens_G[src] * (1.0 - came_G[src] / all_drawn)


@inner_kernel
def _renew_rank(g, row, sum_XG, m):
    forward_G, out_G = row.ranks.forward_VG[row.ranks.node_G[g]], sum_XG[PEER_OUT]
    before_G, came_G = _turn(g, m)
    _estimate(m.flow_GG[g], row, m.held_G, came_G)
    total = 0.0
    for src in range(came_G.size):
        sender = forward_G[src]
        if sender != g:
            more = came_G[src] - before_G[src]
            out_G[sender] += more
            total += more
    sum_XG[PEER_IN, g] += total


@inner_kernel
def _renew_node(v, row, sum_XG, m):
    ranks, pairs_G, out_Y, in_Y = row.ranks, m.pairs_G, sum_XG[RDMA_OUT], sum_XG[RDMA_IN]
    forward_G, node_G, nic_G = ranks.forward_VG[v], ranks.node_G, ranks.nic_G
    for src in range(pairs_G.size):
        pairs_G[src] = 0
    for x in range(ranks.first_V[v], ranks.first_V[v + 1]):
        flow_G = m.flow_GG[ranks.order_G[x]]
        for src in range(pairs_G.size):
            pairs_G[src] += flow_G[src]
    before_G, came_G = _turn(m.stale_G.size + v, m)
    _estimate(pairs_G, row, m.held_G, came_G)
    for src in range(came_G.size):
        if node_G[src] != v:
            more = came_G[src] - before_G[src]
            out_Y[nic_G[src]] += more
            in_Y[nic_G[forward_G[src]]] += more
