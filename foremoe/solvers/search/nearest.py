"""Replicas by settling ranks one after the other, each by the expert whose tokens come nearest to what they ask for."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.solvers.search.copies import fullest_base, give, top_left

# Letters: G ranks, S slots per rank, E experts, X places, I some ranks.

_NONE = np.int32(-(2**31))
_NOBODY = np.int32(2**31 - 1)


class Wants(NamedTuple):
    """Where tokens come from."""

    place_G: Array  # int64, what counts as near: the node of every rank, or the rank itself if there is one node
    want_XE: Array  # int32, pairs that a place's tokens send to an expert, less what replicas serve there; kept up to date


class _Experts(NamedTuple):
    """What every expert at home can give, int32 [E] each."""

    cap_E: Array  # the largest need in other places that it can fill alone
    inner_cap_E: Array  # the same in its home's place
    spare_E: Array  # what is left of it at home and not wanted in that place
    place_E: Array  # its home's place
    rank_E: Array  # its home
    gain_E: Array  # scratch


class _Ranks(NamedTuple):
    """State of ranks, int64 [G] each."""

    free_G: Array  # free slots
    need_G: Array  # pairs below the target
    giver_I: Array  # ranks above the target
    at_G: Array  # where a rank is in `giver_I`
    taker_I: Array  # ranks that can be filled, the emptiest last


@inner_kernel
def _gain(need, same, want, spare):
    """Pairs that come nearer: what the taker's place wants of them, less what the home's place would have to fetch."""
    gain = min(need, max(np.int32(0), want)) - min(need, max(np.int32(0), np.int32(need - spare)))
    return np.int32(0) if same else np.int32(gain)


@inner_kernel
def _nearest(need, x, want_E, experts):
    """The lowest rank with an expert of which `need` pairs gain most if place x serves them, -1 if no expert has so many.

    All int32, and everything read whether it is needed or not, so that it vectorises: this is the inner loop of planning.
    """
    cap_E, inner_cap_E, spare_E, place_E, rank_E, gain_E = experts
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


@inner_kernel
def _queue(g, need_G, taker_I, num_takers):
    """Adds a rank to takers in the order of their needs: the one that needs most is the last, of equal ones the lowest rank."""
    i = num_takers
    while i > 0 and (need_G[taker_I[i - 1]] > need_G[g] or (need_G[taker_I[i - 1]] == need_G[g] and taker_I[i - 1] < g)):
        taker_I[i] = taker_I[i - 1]
        i -= 1
    taker_I[i] = g
    return num_takers + 1


@inner_kernel
def _offer(g, target, one_node, rule, copies, free, placed, experts):
    """Sets the caps of every expert at home on rank g, which has `free` slots."""
    near = copies.near_G[g] < copies.near_limit
    far = near if one_node else copies.far_G[g] < copies.far_limit
    over = placed.load_G[g] - target
    for b in range(rule.num_base):
        e, left = placed.expert_GS[g, b], np.int64(placed.quota_GS[g, b])
        cap = max(np.int64(0), left if free > 0 and over > 0 else min(left, over))
        experts.cap_E[e] = cap if far else 0
        experts.inner_cap_E[e] = cap if near else 0


@inner_kernel
def _largest(r, target, rule, copies, free_G, placed):
    """The lowest rank that can give most to rank r, -1 if none can give anything."""
    node_G, load_G = rule.node_G, placed.load_G
    giver, most = np.int64(-1), np.int64(0)
    for g in range(load_G.size):
        over = load_G[g] - target
        near = node_G[g] == node_G[r]
        if over > 0 and (copies.near_G[g] < copies.near_limit if near else copies.far_G[g] < copies.far_limit):
            top = top_left(g, rule.num_base, placed.quota_GS)
            gives = top if free_G[g] > 0 else min(top, over)
            if gives > most:
                giver, most = g, gives
    return giver


@inner_kernel
def _expert(g, need, x, num_base, wants, spare_E, placed):
    """The base slot of rank g of whose expert `need` pairs gain most in place x; the least that suffices of equal ones."""
    expert_GS, quota_GS = placed.expert_GS, placed.quota_GS
    best, most = -1, np.int32(0)
    for b in range(num_base):
        left = quota_GS[g, b]
        if left >= need:
            e = expert_GS[g, b]
            gain = _gain(np.int32(need), wants.place_G[g] == x, wants.want_XE[x, e], spare_E[e])
            if best < 0 or gain > most or (gain == most and left < quota_GS[g, best]):
                best, most = b, gain
    return best


@kernel
def settle_nearest(target, rule, copies, wants, placed):
    """`settle_on` where any rank may give to any other and it is known where tokens come from; in place.

    The emptiest taker is filled to `target` by the giver and expert that bring most pairs nearer, of all that can fill it alone;
    ties go to the lowest rank, then to its smallest expert. If none can, the rank that can give most does.
    """
    one_node = rule.node_G.min() == rule.node_G.max()
    # One array for all of a kind: memory is asked for once.
    by_rank_5G = np.zeros((5, placed.load_G.size), np.int64)
    by_expert_6E = np.empty((6, wants.want_XE.shape[1]), np.int32)
    ranks = _Ranks(by_rank_5G[0], by_rank_5G[1], by_rank_5G[2], by_rank_5G[3], by_rank_5G[4])
    experts = _Experts(
        by_expert_6E[0], by_expert_6E[1], by_expert_6E[2], by_expert_6E[3], by_expert_6E[4], by_expert_6E[5]
    )  # fmt: skip
    _settle(target, rule, copies, wants, placed, (ranks, experts, one_node))


@inner_kernel
def _settle(target, rule, copies, wants, placed, state):
    """`settle_nearest` over the memory for its state."""
    (expert_GS, quota_GS, load_G), (ranks, experts, one_node) = placed, state
    place_G, want_XE, num_base = wants.place_G, wants.want_XE, rule.num_base
    free_G, need_G, giver_I, at_G, taker_I = ranks
    num_givers, num_takers = _begin(target, rule, wants, placed, ranks, experts)
    for g in range(load_G.size):
        _offer(g, target, one_node, rule, copies, free_G[g], placed, experts)
    while num_givers > 0 and num_takers > 0:
        num_takers -= 1
        r = taker_I[num_takers]
        x, need, g = place_G[r], need_G[r], np.int64(-1)
        if need < 2**31:
            g = np.int64(_nearest(np.int32(need), np.int32(x), want_XE[x], experts))
        if g >= 0:
            b = _expert(g, need, x, num_base, wants, experts.spare_E, placed)
        else:
            g = _largest(r, target, rule, copies, free_G, placed)
            if g < 0:  # nobody may give to this rank, and no giver will appear later
                continue
            b = fullest_base(g, num_base, quota_GS)
        e, amount = expert_GS[g, b], min(need, np.int64(quota_GS[g, b]))
        if free_G[g] == 0:
            amount = min(amount, load_G[g] - target)
        new = give(g, b, r, amount, rule, copies, placed)
        free_G[r] -= new
        want_XE[x, e] -= amount
        experts.spare_E[e] -= amount if place_G[g] != x else 0
        need_G[r] = target - load_G[r]
        if need_G[r] > 0 and (free_G[r] > 0 or not new):
            num_takers = _queue(r, need_G, taker_I, num_takers)
        over = load_G[g] - target
        if over <= 0:
            num_givers -= 1
            giver_I[at_G[g]], at_G[giver_I[num_givers]] = giver_I[num_givers], at_G[g]
            need_G[g] = -over
            if over < 0 and free_G[g] > 0:
                num_takers = _queue(g, need_G, taker_I, num_takers)
        _offer(g, target, one_node, rule, copies, free_G[g], placed, experts)


@inner_kernel
def _begin(target, rule, wants, placed, ranks, experts):
    """Fills the state of `settle_nearest` but for the caps. Returns the numbers of givers and takers."""
    expert_GS, quota_GS, load_G = placed
    free_G, need_G, giver_I, at_G, taker_I = ranks
    place_G, want_XE, num_base = wants.place_G, wants.want_XE, rule.num_base
    num_givers, num_takers = np.int64(0), np.int64(0)
    for g in range(load_G.size):
        for s in range(num_base, quota_GS.shape[1]):
            free_G[g] += expert_GS[g, s] < 0
        over = load_G[g] - target
        if over > 0:
            at_G[g], giver_I[num_givers] = num_givers, g
            num_givers += 1
        elif over < 0 and free_G[g] > 0:
            need_G[g] = -over
            num_takers = _queue(g, need_G, taker_I, num_takers)
        for b in range(num_base):
            e = expert_GS[g, b]
            experts.spare_E[e], experts.place_E[e] = quota_GS[g, b] - want_XE[place_G[g], e], place_G[g]
            experts.rank_E[e] = g
    return num_givers, num_takers
