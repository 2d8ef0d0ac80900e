"""Stars for tight links: every rank above a target gets rid of its excess in as few copies as it can."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.solvers.kernels.moves import fullest_base, give

# Letters: G ranks, S slots per rank, I some ranks.


@kernel
def most_loaded_first(load_G):
    """int64 [G]: ranks by falling load, equal ones in order."""
    G = load_G.size
    return np.sort(np.arange(G) - load_G * G) % G  # one sort of numbers for all kernels compiles faster than two of indices


@inner_kernel
def _without(taker, taker_I, num_takers):
    """Takes a rank out of the first `num_takers` of a list and keeps their order; returns how many are left."""
    kept = 0
    for i in range(num_takers):
        taker_I[kept] = taker_I[i]
        kept += taker_I[i] != taker
    return kept


@inner_kernel
def _taker(g, target, best, taker_I, rule, copies, load_G):
    """The rank that takes most of rank g's excess from an expert with `best` left: of those that take the same one of the own
    node, then the fullest; -1 if there is none. And how much it takes."""
    node_G, over = rule.node_G, load_G[g] - target
    taker, taken, need_of, near_taker = np.int64(-1), np.int64(0), np.int64(0), False
    for r in taker_I:
        need, near = target - load_G[r], node_G[r] == node_G[g]
        if copies.near_G[g] >= copies.near_limit if near else (rule.node_only or copies.far_G[g] >= copies.far_limit):
            continue
        takes = min(over, min(need, best))
        if takes > taken or (takes == taken and (near > near_taker or (near == near_taker and need < need_of))):
            taker, taken, need_of, near_taker = r, takes, need, near
    return taker, taken


@kernel
def shed_row(target, order_G, rule, copies, placed):
    """Moves load from ranks above `target` to ranks below it, the most loaded first; in place.

    The taker is the fullest that can take the whole excess of one expert, of the giver's own node if there is one; if no rank
    can, the one that takes most. Every copy but the last of a giver fills a rank or empties an expert, and the last settles the
    giver: no chains, so some ranks may stay above the target, but as few copies as levelling one rank after the other allows.
    """
    expert_GS, quota_GS, load_G = placed
    num_base = rule.num_base
    G, S = quota_GS.shape
    free_G = np.zeros(G, np.int64)
    taker_I, num_takers = np.empty(G, np.int64), np.int64(0)
    for g in range(G):
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
        if load_G[g] < target and free_G[g] > 0:
            taker_I[num_takers] = g
            num_takers += 1
    _shed(target, order_G, rule, copies, placed, free_G, taker_I, num_takers)


@inner_kernel
def _shed(target, order_G, rule, copies, placed, free_G, taker_I, num_takers):
    """`shed_row` with the free slots of all ranks and the first takers."""
    (_, quota_GS, load_G), num_base = placed, rule.num_base
    for g in order_G:
        if load_G[g] <= target:
            break
        while load_G[g] > target:
            top = fullest_base(g, num_base, quota_GS)
            taker, taken = _taker(g, target, np.int64(quota_GS[g, top]), taker_I[:num_takers], rule, copies, load_G)
            if taken == 0:
                break
            for b in range(num_base):
                if taken <= quota_GS[g, b] < quota_GS[g, top]:
                    top = b
            free_G[taker] -= give(g, top, taker, taken, rule, copies, placed)[1]
            if load_G[taker] >= target or free_G[taker] == 0:
                num_takers = _without(taker, taker_I, num_takers)
