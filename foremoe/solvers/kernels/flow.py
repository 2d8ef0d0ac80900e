"""The exact split: the least maximum rank load that given replicas allow."""

from __future__ import annotations

import numpy as np

from foremoe.solvers.kernels.compiled import kernel

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.


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
    G, S = quota_GS.shape
    first_E = np.full(num_experts, -1, np.int64)
    next_P = np.empty(G * S, np.int64)
    for p in range(G * S - 1, -1, -1):
        e = expert_GS[p // S, p % S]
        if e >= 0:
            next_P[p] = first_E[e]
            first_E[e] = p
    queue_I, out_G, in_G = np.empty(G, np.int64), np.empty(G, np.int64), np.empty(G, np.int64)
    seen_G, seen_E = np.empty(G, np.bool_), np.empty(num_experts, np.bool_)
    while True:
        seen_G[:] = False
        seen_E[:] = False
        num_reached = 0
        for g in range(G):
            if load_G[g] > target:
                seen_G[g] = True
                out_G[g] = -1
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
                    r = p // S
                    if not seen_G[r]:
                        seen_G[r] = True
                        out_G[r], in_G[r] = g * S + s, p
                        queue_I[num_reached] = r
                        num_reached += 1
                    p = next_P[p]
        moved = False
        for i in range(num_sources, num_reached):
            sink = queue_I[i]
            amount = target - load_G[sink]
            r = sink
            while out_G[r] >= 0 and amount > 0:
                amount = min(amount, np.int64(quota_GS[out_G[r] // S, out_G[r] % S]))
                r = out_G[r] // S
            if amount > 0:
                amount = min(amount, load_G[r] - target)
            if amount <= 0:
                continue
            moved = True
            load_G[r] -= amount
            load_G[sink] += amount
            r = sink
            while out_G[r] >= 0:
                quota_GS[in_G[r] // S, in_G[r] % S] += amount
                quota_GS[out_G[r] // S, out_G[r] % S] -= amount
                r = out_G[r] // S
        if not moved:
            total = np.int64(0)
            for i in range(num_reached):
                total += load_G[queue_I[i]]
            target = -(-total // num_reached)
            if target > limit:
                return np.int64(-1)
