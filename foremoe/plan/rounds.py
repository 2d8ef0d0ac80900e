"""Rounds: an order of simultaneous messages in which no message delays another one unnecessarily."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.machine.cluster import Cluster

# Letters: I messages, G ranks, Y NICs, P ports (ranks, then NICs), X rounds.

_MOST = 63  # number of distinct rounds; all later messages share the last one


def rounds_of(group_I: Array, turn_I: Array, src_I: Array, dst_I: Array, cluster: Cluster) -> Array:
    """Returns int64 [I], the round of every message, counted from 0.

    In a round, a rank sends and receives at most one message of a group inside its node. A NIC also sends and receives at most
    one. A group takes as many rounds as its busiest rank or NIC has messages. This is optimal (D. König, "Über Graphen und ihre
    Anwendung", 1916: edges of a bipartite graph can be coloured with as many colours as the largest degree). Messages are taken
    in the order of `turn_I`, then in the given order. Messages without a sending rank (`src_I` -1) are in round 0.

    Args:
        group_I: Group of each message, integers. Messages of a group are sent at the same time and need not be adjacent.
        turn_I: Order of the messages in a group, integers.
        src_I: Sending rank, or -1.
        dst_I: Receiving rank.
        cluster: Cluster with the nodes and NICs of the ranks.
    """
    # Converted to one type, so that the kernel compiles only once.
    src_I, dst_I, nic_G = src_I.astype(np.int64), dst_I.astype(np.int64), cluster.nic_of_rank_G
    near_I = cluster.node_of_rank_G[src_I] == cluster.node_of_rank_G[dst_I]
    out_I = np.where(src_I < 0, -1, np.where(near_I, src_I, cluster.num_ranks + nic_G[src_I]))
    in_I = np.where(near_I, dst_I, cluster.num_ranks + nic_G[dst_I])
    num_ports = cluster.num_ranks + int(nic_G.max()) + 1
    held_2PX, path_P = np.full((2, num_ports, _MOST + 1), -1, np.int64), np.empty(2 * num_ports, np.int64)
    messages = _Messages(out_I, in_I, np.zeros(len(src_I), np.int64), held_2PX, path_P)
    _colour(order_of(group_I, turn_I), group_I.astype(np.int64), messages)
    return messages.round_I


class _Messages(NamedTuple):
    """Messages as edges of a graph, from port to port."""

    out_I: Array
    in_I: Array
    round_I: Array
    held_2PX: Array  # message that a port sends, and message that it receives, in each round, or -1
    path_P: Array  # scratch


@inner_kernel
def _first_free(held_X):
    """Returns the first round without a message, or the last round if there is none."""
    x = 0
    while x < _MOST and held_X[x] >= 0:
        x += 1
    return x


@inner_kernel
def _put(i, x, m):
    m.round_I[i] = x
    m.held_2PX[0, m.out_I[i], x] = i
    m.held_2PX[1, m.in_I[i], x] = i


@inner_kernel
def _swap(port, x, y, m):
    """Exchanges the messages of rounds `x` and `y` along the path that begins at a receiving port in round `x`."""
    num, side, wanted = 0, 1, x
    while m.held_2PX[side, port, wanted] >= 0:
        i = m.held_2PX[side, port, wanted]
        m.path_P[num] = i
        num, side, wanted = num + 1, 1 - side, x + y - wanted
        port = m.in_I[i] if side == 1 else m.out_I[i]
    for j in range(num):
        i = m.path_P[j]
        m.held_2PX[0, m.out_I[i], m.round_I[i]] = -1
        m.held_2PX[1, m.in_I[i], m.round_I[i]] = -1
    for j in range(num):
        _put(m.path_P[j], x + y - m.round_I[m.path_P[j]], m)


@kernel
def _colour(order_I, group_I, m):
    """Puts each message of a group into a round that is free at both ends. If there is none, a swap of two rounds makes one."""
    first = 0
    for k in range(order_I.size):
        i = order_I[k]
        if group_I[i] != group_I[order_I[first]]:
            for j in range(first, k):
                before = order_I[j]
                if m.out_I[before] >= 0:
                    m.held_2PX[0, m.out_I[before]] = -1
                    m.held_2PX[1, m.in_I[before]] = -1
            first = k
        if m.out_I[i] < 0:
            continue
        x, y = _first_free(m.held_2PX[0, m.out_I[i]]), _first_free(m.held_2PX[1, m.in_I[i]])
        if x != y and x < _MOST and y < _MOST and m.held_2PX[1, m.in_I[i], x] >= 0:
            _swap(m.in_I[i], x, y, m)
        _put(i, x if y < _MOST else y, m)
