"""Rounds: in which order what is sent at once goes over its links, so that none waits for another that could go later."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel

# Letters: I messages, G ranks.

_MOST = 63  # rounds that are told apart; what comes later shares the last one


def rounds_of(group_I: Array, turn_I: Array, src_I: Array, dst_I: Array, node_of_rank_G: Array) -> Array:
    """int64 [I]: the round of every message, from 0.

    In a round, a rank sends one message of a group and receives one, on peer links and on RDMA links each. A group takes hardly
    more rounds than its busiest rank has messages: each gets the first round that is free at both ends, by `turn_I`, then in the
    order given. Messages of no rank (`src_I` -1) are in round 0.

    Args:
        group_I: What is sent at once, ints; messages of a group need not be side by side.
        turn_I: Ints that order a group.
        src_I: Rank that sends, or -1.
        dst_I: Rank that receives.
        node_of_rank_G: Node of every rank.
    """
    round_I, taken_4G = np.zeros(len(group_I), np.int64), np.zeros((4, len(node_of_rank_G)), np.uint64)
    # Of one type, whatever columns they come from: the kernel compiles once.
    int_I = (array_I.astype(np.int64) for array_I in (group_I, src_I, dst_I))
    _fit(np.lexsort((turn_I, group_I)), *int_I, node_of_rank_G, taken_4G, round_I)
    return round_I


@kernel
def _fit(order_I, group_I, src_I, dst_I, node_G, taken_4G, round_I):
    """`taken_4G` has a bit for every round in which a rank sends or receives, on peer links, then on RDMA links."""
    group = np.int64(-1)
    for i in order_I:
        if group_I[i] != group:
            group = group_I[i]
            taken_4G[:] = 0
        src, dst = src_I[i], dst_I[i]
        if src < 0:
            continue
        link = 0 if node_G[src] == node_G[dst] else 2
        taken = taken_4G[link, src] | taken_4G[link + 1, dst]
        round_, bit = 0, np.uint64(1)
        while round_ < _MOST and taken & bit:
            round_ += 1
            bit <<= np.uint64(1)
        taken_4G[link, src] |= bit
        taken_4G[link + 1, dst] |= bit
        round_I[i] = round_
