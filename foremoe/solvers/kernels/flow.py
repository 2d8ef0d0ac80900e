"""The exact split: the least maximum rank load that given replicas allow."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.


@kernel
def link_slots(num_experts, expert_GS):  # type: ignore[no-untyped-def]
    """The slots of every expert as lists: first_E, next_P (p = g*S + s, ascending; -1 ends a list); rank_P, every slot's rank."""
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
    return first_E, next_P, rank_P


@kernel
def split_row(target, limit, num_experts, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """The split with the least maximum rank load that is at least `target`, in place; returns that maximum.

    Overloaded ranks push load along residual paths (out of a slot into another slot of the same expert, again and again) to
    ranks below the target, all paths of one breadth-first search at a time. Where no path is left, the ranks that were reached
    hold only experts that have no slot elsewhere, so no split does better than ceil(their load / their number): that is the
    new target (Newton's method on the minimum cut). A target above `limit` ends the search with -1 and an unfinished split.

    Args:
        quota_GS: int32, any split of every expert's load over its slots; changed only where it must be.
        load_G: int64, kept up to date.
    """
    if load_G.max() <= target:
        return np.int64(target)
    first_E, next_P, rank_P = link_slots(num_experts, expert_GS)
    return split_linked(target, limit, first_E, next_P, rank_P, expert_GS, quota_GS, load_G)


@kernel
def split_linked(target, limit, first_E, next_P, rank_P, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """`split_row` with the lists of `link_slots`."""
    G, S = quota_GS.shape
    # How the search came to a rank: from which rank, out of which slot there, into which slot here.
    path_4G = np.empty((4, G), np.int64)
    queue_I, from_G, out_G, in_G = path_4G[0], path_4G[1], path_4G[2], path_4G[3]
    seen_G, seen_E = np.empty(G, np.bool_), np.empty(first_E.size, np.bool_)
    while True:
        seen_G[:] = False
        seen_E[:] = False
        num_reached = 0
        for g in range(G):
            if load_G[g] > target:
                seen_G[g] = True
                from_G[g] = -1
                queue_I[num_reached] = g
                num_reached += 1
        num_sources, head = num_reached, 0
        if num_sources == 0:
            return target
        while head < num_reached:
            g = queue_I[head]
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
                        queue_I[num_reached] = r
                        num_reached += 1
                    p = next_P[p]
        moved = False
        for i in range(num_sources, num_reached):
            sink = queue_I[i]
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
        if not moved:
            total = np.int64(0)
            for i in range(num_reached):
                total += load_G[queue_I[i]]
            target = -(-total // num_reached)
            if target > limit:
                return np.int64(-1)
