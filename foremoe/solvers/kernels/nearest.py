"""Replicas by settling ranks one after the other, each by the expert whose tokens come nearest to what they ask for."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.settle import slot_for, top_left

# Letters: G ranks, S slots per rank, E experts, X places, C moves, I some ranks.

_NONE = np.int32(-(2**31))
_NOBODY = np.int32(2**31 - 1)


@kernel
def _gain(need, same, want, spare):  # type: ignore[no-untyped-def]
    """Pairs that come nearer: what the taker's place wants of them, less what the home's place would have to fetch."""
    gain = min(need, max(np.int32(0), want)) - min(need, max(np.int32(0), np.int32(need - spare)))
    return np.int32(0) if same else np.int32(gain)


@kernel
def _nearest(need, x, want_E, spare_E, cap_E, inner_cap_E, place_E, rank_E, gain_E):  # type: ignore[no-untyped-def]
    """The lowest rank with an expert of which `need` pairs gain most if place x serves them, -1 if no expert has so many.

    All int32, and everything read whether it is needed or not, so that it vectorises: this is the inner loop of planning.
    `gain_E` is scratch.
    """
    most = _NONE
    for e in range(want_E.size):
        same, cap, inner_cap = place_E[e] == x, cap_E[e], inner_cap_E[e]
        gain = _gain(need, same, want_E[e], spare_E[e])
        gain_E[e] = gain if (inner_cap if same else cap) >= need else _NONE
        most = max(most, gain_E[e])
    if most == _NONE:
        return np.int32(-1)
    rank = _NOBODY
    for e in range(want_E.size):
        rank = min(rank, rank_E[e] if gain_E[e] == most else _NOBODY)
    return rank


@kernel
def _queue(g, need_G, taker_I, num_takers):  # type: ignore[no-untyped-def]
    """Adds a rank to takers in the order of their needs: the one that needs most is the last, of equal ones the lowest rank."""
    i = num_takers
    while i > 0 and (need_G[taker_I[i - 1]] > need_G[g] or (need_G[taker_I[i - 1]] == need_G[g] and taker_I[i - 1] < g)):
        taker_I[i] = taker_I[i - 1]
        i -= 1
    taker_I[i] = g
    return num_takers + 1


@kernel
def _offer(g, over, to_others, inside, num_base, free_G, expert_GS, quota_GS, cap_E, inner_cap_E):  # type: ignore[no-untyped-def]
    """Sets of every expert at home on rank g the largest need that it can fill alone, in other places and in its own."""
    for b in range(num_base):
        left = np.int64(quota_GS[g, b])
        cap = max(np.int64(0), left if free_G[g] > 0 and over > 0 else min(left, over))
        cap_E[expert_GS[g, b]] = cap if to_others else 0
        inner_cap_E[expert_GS[g, b]] = cap if inside else 0


@kernel
def _twin(r, need, spare, giver_I, target, num_base, near_limit, far_limit, node_G, near_G, far_G, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """The giver whose whole excess falls least short of `need`, by less than twice its share of `spare`, -1 if there is none; and
    how much it falls short."""
    twin, gap = np.int64(-1), min(spare, 2 * spare // giver_I.size)
    for g in giver_I:
        over = load_G[g] - target
        if over > need or need - over >= gap or top_left(g, num_base, quota_GS) < over:
            continue
        if near_G[g] < near_limit if node_G[g] == node_G[r] else far_G[g] < far_limit:
            twin, gap = g, need - over
    return twin, gap


@kernel
def _largest(r, target, num_base, near_limit, far_limit, node_G, near_G, far_G, free_G, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """The lowest rank that can give most to r, -1 if none can give anything."""
    giver, most = -1, np.int64(0)
    for g in range(load_G.size):
        over = load_G[g] - target
        if over > 0 and (near_G[g] < near_limit if node_G[g] == node_G[r] else far_G[g] < far_limit):
            top = top_left(g, num_base, quota_GS)
            gives = top if free_G[g] > 0 else min(top, over)
            if gives > most:
                giver, most = g, gives
    return giver


@kernel
def settle_nearest(  # type: ignore[no-untyped-def]
    target, near_limit, far_limit, thrifty, node_G, num_base, place_G, want_XE, near_G, far_G, log_C6, num_moves, expert_GS,
    quota_GS, load_G,
):  # fmt: skip
    """`settle_on` where any rank may give to any other and it is known where tokens come from; in place.

    The emptiest taker is filled to `target` by the giver and expert that bring most pairs nearer, of all that can fill it alone;
    ties go to the lowest rank, then to its smallest expert. If none can, the rank that can give most does. What a taker lacks,
    who becomes one, `thrifty` and all other arguments are as in `settle_on`.

    Args:
        place_G: int64, what counts as near: the node of every rank, or the rank itself if there is one node.
        want_XE: int32, pairs that a place's tokens send to an expert, less what replicas serve there; kept up to date.

    Returns:
        the number of moves in the log.
    """
    G, S = quota_GS.shape
    E = want_XE.shape[1]
    one_node = node_G.min() == node_G.max()
    # One array for all of a kind: memory is asked for once.
    by_rank_5G, by_expert_6E = np.zeros((5, G), np.int64), np.empty((6, E), np.int32)
    free_G, need_G, giver_I, at_G, taker_I = by_rank_5G[0], by_rank_5G[1], by_rank_5G[2], by_rank_5G[3], by_rank_5G[4]
    num_givers = num_takers = 0
    # See `_offer`; what is left of an expert at home and its place does not want; where its home is.
    cap_E, inner_cap_E, spare_E, place_E, rank_E, gain_E = (
        by_expert_6E[0], by_expert_6E[1], by_expert_6E[2], by_expert_6E[3], by_expert_6E[4], by_expert_6E[5]
    )  # fmt: skip
    spare = np.int64(0)
    for g in range(G):
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
        over = load_G[g] - target
        spare -= over if thrifty else 0
        if over > 0:
            at_G[g], giver_I[num_givers] = num_givers, g
            num_givers += 1
        elif over < 0 and free_G[g] > 0:
            need_G[g] = -over
            num_takers = _queue(g, need_G, taker_I, num_takers)
        to_others, inside = (near_G[g] < near_limit) if one_node else (far_G[g] < far_limit), near_G[g] < near_limit
        _offer(g, over, to_others, inside, num_base, free_G, expert_GS, quota_GS, cap_E, inner_cap_E)
        for b in range(num_base):
            e = expert_GS[g, b]
            spare_E[e], place_E[e], rank_E[e] = quota_GS[g, b] - want_XE[place_G[g], e], place_G[g], g
    while num_givers > 0 and num_takers > 0:
        num_takers -= 1
        r = taker_I[num_takers]
        x, need, g = place_G[r], need_G[r], -1
        if spare > 0:
            g, gap = _twin(
                r, need, spare, giver_I[:num_givers], target, num_base, near_limit, far_limit, node_G, near_G, far_G, quota_GS,
                load_G,
            )  # fmt: skip
            if g >= 0:
                spare -= gap
                need -= gap
        if g < 0 and need < 2**31:
            g = _nearest(np.int32(need), np.int32(x), want_XE[x], spare_E, cap_E, inner_cap_E, place_E, rank_E, gain_E)
        alone = g >= 0
        if not alone:
            g = _largest(r, target, num_base, near_limit, far_limit, node_G, near_G, far_G, free_G, quota_GS, load_G)
            if g < 0:  # nobody may give to this rank, and no giver will appear later
                continue
        best, most = -1, np.int32(0)
        for b in range(num_base):
            left = quota_GS[g, b]
            if alone and left >= need:
                gain = _gain(np.int32(need), place_G[g] == x, want_XE[x, expert_GS[g, b]], spare_E[expert_GS[g, b]])
                if best < 0 or gain > most or (gain == most and left < quota_GS[g, best]):
                    best, most = b, gain
            elif not alone and left > (quota_GS[g, best] if best >= 0 else 0):
                best = b
        e, over = expert_GS[g, best], load_G[g] - target
        amount = min(need, np.int64(quota_GS[g, best]))
        if free_G[g] == 0:
            amount = min(amount, over)
        slot = slot_for(e, r, num_base, expert_GS)
        fresh = expert_GS[r, slot] < 0
        if fresh:
            expert_GS[r, slot] = e
            free_G[r] -= 1
            if node_G[g] == node_G[r]:
                near_G[g] += 1
            else:
                far_G[g] += 1
        if num_moves == log_C6.shape[0]:
            break
        log_C6[num_moves, 0], log_C6[num_moves, 1], log_C6[num_moves, 2] = g, best, r
        log_C6[num_moves, 3], log_C6[num_moves, 4], log_C6[num_moves, 5] = slot, amount, fresh
        num_moves += 1
        want_XE[x, e] -= amount
        spare_E[e] -= amount if place_G[g] != x else 0
        quota_GS[r, slot] += amount
        quota_GS[g, best] -= amount
        load_G[r] += amount
        load_G[g] -= amount
        over -= amount
        need_G[r] = target - load_G[r]
        if need_G[r] > 0 and (free_G[r] > 0 or not fresh):
            num_takers = _queue(r, need_G, taker_I, num_takers)
        if over <= 0:
            num_givers -= 1
            giver_I[at_G[g]], at_G[giver_I[num_givers]] = giver_I[num_givers], at_G[g]
            need_G[g] = -over
            if over < 0 and free_G[g] > 0:
                num_takers = _queue(g, need_G, taker_I, num_takers)
        to_others, inside = (near_G[g] < near_limit) if one_node else (far_G[g] < far_limit), near_G[g] < near_limit
        _offer(g, over, to_others, inside, num_base, free_G, expert_GS, quota_GS, cap_E, inner_cap_E)
    return num_moves
