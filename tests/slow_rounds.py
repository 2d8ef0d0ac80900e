"""`rounds_of`, message by message."""

from __future__ import annotations

from collections import defaultdict


def rounds_by_hand(messages, node_G):
    """Round of every message (group, turn, source, destination): the first in which both ends are free."""
    out, taken = {}, defaultdict(set)
    for i in sorted(range(len(messages)), key=lambda i: messages[i][:2]):
        group, _, src, dst = messages[i]
        out[i] = 0
        if src < 0:
            continue
        near = node_G[src] == node_G[dst]
        ends = (group, near, "out", src), (group, near, "in", dst)
        while any(out[i] in taken[end] for end in ends):
            out[i] += 1
        for end in ends:
            taken[end].add(out[i])
    return [out[i] for i in range(len(messages))]
