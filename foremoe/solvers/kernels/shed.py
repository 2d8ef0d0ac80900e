"""Stars for tight links: every rank above a target gets rid of its excess in as few copies as it can."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.settle import slot_for

# Letters: G ranks, S slots per rank.


@kernel
def most_loaded_first(load_G):  # type: ignore[no-untyped-def]
    """int64 [G]: ranks by falling load, equal ones in order."""
    return np.argsort(-load_G, kind="mergesort")


@kernel
def _without(taker, taker_I, num_takers):  # type: ignore[no-untyped-def]
    """Takes a rank out of the first `num_takers` of a list and keeps their order; returns how many are left."""
    kept = 0
    for i in range(num_takers):
        taker_I[kept] = taker_I[i]
        kept += taker_I[i] != taker
    return kept


@kernel
def shed_row(  # type: ignore[no-untyped-def]
    target, near_limit, far_limit, node_only, order_G, node_G, num_base, near_G, far_G, expert_GS, quota_GS, load_G
):
    """Moves load from ranks above `target` to ranks below it, the most loaded first; in place.

    The taker is the fullest that can take the whole excess of one expert, of the giver's own node if there is one; if no rank
    can, the one that takes most. Every copy but the last of a giver fills a rank or empties an expert, and the last settles the
    giver: no chains, so some ranks may stay above the target, but as few copies as levelling one rank after the other allows.

    Args:
        near_limit, far_limit: most copies out of a home rank inside its node, and to other nodes.
        order_G: int64, all ranks, the most loaded first.
        near_G, far_G: int64, copies out of every home rank so far, kept up to date.
        load_G: int64, kept up to date.
    """
    G, S = quota_GS.shape
    free_G = np.zeros(G, np.int64)
    taker_I, num_takers = np.empty(G, np.int64), 0
    for g in range(G):
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
        if load_G[g] < target and free_G[g] > 0:
            taker_I[num_takers] = g
            num_takers += 1
    for g in order_G:
        if load_G[g] <= target:
            break
        while load_G[g] > target:
            over = load_G[g] - target
            top, best = -1, np.int64(0)
            for b in range(num_base):
                if quota_GS[g, b] > best:
                    top, best = b, np.int64(quota_GS[g, b])
            taker, taken, need_of, near_taker = -1, np.int64(0), np.int64(0), False
            for r in taker_I[:num_takers]:
                need, near = target - load_G[r], node_G[r] == node_G[g]
                if near_G[g] >= near_limit if near else (node_only or far_G[g] >= far_limit):
                    continue
                takes = min(over, min(need, best))
                if takes > taken or (takes == taken and (near > near_taker or (near == near_taker and need < need_of))):
                    taker, taken, need_of, near_taker = r, takes, need, near
            if taker < 0:
                break
            for b in range(num_base):
                if taken <= quota_GS[g, b] < quota_GS[g, top]:
                    top = b
            slot = slot_for(expert_GS[g, top], taker, num_base, expert_GS)
            if expert_GS[taker, slot] < 0:
                expert_GS[taker, slot] = expert_GS[g, top]
                free_G[taker] -= 1
                if near_taker:
                    near_G[g] += 1
                else:
                    far_G[g] += 1
            quota_GS[taker, slot] += taken
            quota_GS[g, top] -= taken
            load_G[g] -= taken
            load_G[taker] += taken
            if load_G[taker] >= target or free_G[taker] == 0:
                num_takers = _without(taker, taker_I, num_takers)
