"""The exact split, which reaches the smallest maximum rank load that given replicas allow."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel

# Letters: G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), I ranks reached.

# A value larger than any load and any number of copies.
UNLIMITED = np.int64(2**62)


class Links(NamedTuple):
    """Linked lists with the slots of every expert in ascending order."""

    first_E: Array  # int64, first slot of every expert; -1 ends a list
    next_P: Array  # int64, next slot of the same expert
    rank_P: Array  # int64, rank of every slot


class _Paths(NamedTuple):
    """State of a breadth-first search: the ranks in the order of discovery, their predecessors, and the slots on each edge."""

    rank_I: Array
    from_G: Array
    out_G: Array
    in_G: Array


@kernel
def link_slots(num_experts, expert_GS):
    """Returns the `Links` of a placement."""
    G, S = expert_GS.shape
    first_E, next_P, rank_P = np.full(num_experts, -1, np.int64), np.empty(G * S, np.int64), np.empty(G * S, np.int64)
    p = G * S - 1
    for g in range(G - 1, -1, -1):
        for s in range(S - 1, -1, -1):
            e = expert_GS[g, s]
            if e >= 0:
                next_P[p], rank_P[p] = first_E[e], g
                first_E[e] = p
            p -= 1
    return Links(first_E, next_P, rank_P)


@kernel
def split_row(target, limit, num_base, placed):
    """Finds the split with the smallest maximum rank load that is at least `target`. Works in place and with few changes.

    Any split may be given. Returns the maximum. If the maximum exceeds `limit`, returns -1 and leaves the split unfinished.
    """
    if placed.load_G.max() <= target:
        return np.int64(target)
    links = link_slots(placed.load_G.size * num_base, placed.expert_GS)
    return split_linked(target, limit, np.bool_(False), links, placed)


@kernel
def split_linked(target, limit, single, links, placed):
    """Finds the same split as `split_row`, but takes the lists of `link_slots` as an argument.

    Overloaded ranks push load to ranks below the target along residual paths. Each edge of a path leads from one slot to another
    slot of the same expert. All paths that a breadth-first search finds are used. If no path is left, the ranks that the search
    has reached hold only experts that have no slot on other ranks. No split can then be better than ceil(load of these ranks /
    number of these ranks), which becomes the new target. This is Newton's method on the minimum cut. If `single` is set, only the
    most loaded rank pushes, along one path per search.
    """
    load_G = placed.load_G
    G = load_G.size
    path_4G = np.empty((4, G), np.int64)
    rank_I, from_G = path_4G[0], path_4G[1]
    paths = _Paths(rank_I, from_G, path_4G[2], path_4G[3])
    seen_G, seen_E = np.empty(G, np.bool_), np.empty(links.first_E.size, np.bool_)
    while True:
        seen_G[:] = False
        seen_E[:] = False
        num_sources = np.int64(0)
        most = np.argmax(load_G) if single else 0
        for g in range(most, most + 1 if single else G):
            if load_G[g] > target:
                seen_G[g] = True
                from_G[g] = -1
                rank_I[num_sources] = g
                num_sources += 1
        if num_sources == 0:
            return target
        num_reached = _search(target, single, num_sources, links, placed, paths, seen_G, seen_E)
        if not _push(target, num_sources, num_reached, paths, placed):
            total = np.int64(0)
            for i in range(num_reached):
                total += load_G[rank_I[i]]
            target = -(-total // num_reached)
            if target > limit:
                return np.int64(-1)


@inner_kernel
def _search(target, single, num_reached, links, placed, paths, seen_G, seen_E):
    """Continues the search in `paths`. With `single`, stops at the first rank below the target. Returns the number of ranks."""
    expert_GS, quota_GS, load_G = placed
    rank_I, from_G, out_G, in_G = paths
    first_E, next_P, rank_P = links
    S, head = quota_GS.shape[1], 0
    while head < num_reached:
        g = rank_I[head]
        head += 1
        for s in range(S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] == 0 or seen_E[e]:
                continue
            seen_E[e] = True
            p = first_E[e]
            while p >= 0:
                r = rank_P[p]
                if not seen_G[r]:
                    seen_G[r] = True
                    from_G[r], out_G[r], in_G[r] = g, s, p - r * S
                    rank_I[num_reached] = r
                    num_reached += 1
                    if single and load_G[r] < target:
                        return num_reached
                p = next_P[p]
    return num_reached


@inner_kernel
def _push(target, num_sources, num_reached, paths, placed):
    """Pushes load along the path to every rank below the target. Returns whether any load moved."""
    quota_GS, load_G = placed.quota_GS, placed.load_G
    rank_I, from_G, out_G, in_G = paths
    moved = False
    for i in range(num_sources, num_reached):
        sink = rank_I[i]
        amount = target - load_G[sink]
        r = sink
        while from_G[r] >= 0 and amount > 0:
            amount = min(amount, np.int64(quota_GS[from_G[r], out_G[r]]))
            r = from_G[r]
        if amount > 0:
            amount = min(amount, load_G[r] - target)
        if amount <= 0:
            continue
        moved = True
        load_G[r] -= amount
        load_G[sink] += amount
        r = sink
        while from_G[r] >= 0:
            quota_GS[r, in_G[r]] += amount
            quota_GS[from_G[r], out_G[r]] -= amount
            r = from_G[r]
    return moved
