"""Drops replicas that a placement does not need for its maximum load."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inlined_kernel, inner_kernel, kernel
from foremoe.solvers.rows import assign, clean_row, copy_of, home_of_experts
from foremoe.solvers.split.flow import link_slots, split_linked

FAILURES = 4  # vain tries after which pruning ends

# Letters: G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s).


@inner_kernel
def count_row(home_E, node_G, num_base, expert_GS):
    """Replicas outside the node of their home, and all replicas."""
    G, S = expert_GS.shape
    far = num = 0
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] >= 0:
                num += 1
                far += node_G[home_E[expert_GS[g, s]] // S] != node_G[g]
    return far, num


@inner_kernel
def _unlink(p, e, links):
    """Takes slot p out of the list of its expert."""
    first_E, next_P = links.first_E, links.next_P
    if first_E[e] == p:
        first_E[e] = next_P[p]
        return
    q = first_E[e]
    while next_P[q] != p:
        q = next_P[q]
    next_P[q] = next_P[p]


@inner_kernel
def _link(p, e, links):
    """Puts slot p back into the list of its expert, in its place."""
    first_E, next_P = links.first_E, links.next_P
    if first_E[e] > p or first_E[e] < 0:
        next_P[p], first_E[e] = first_E[e], p
        return
    q = first_E[e]
    while 0 <= next_P[q] < p:
        q = next_P[q]
    next_P[p], next_P[q] = next_P[q], p


@inner_kernel
def _smallest(untried_GS, quota_GS, num_base):
    """Rank and slot of the untried replica with the smallest quota, -1 and -1 if there is none."""
    rank, slot = -1, -1
    for g in range(quota_GS.shape[0]):
        for s in range(num_base, quota_GS.shape[1]):
            if untried_GS[g, s] and (rank < 0 or quota_GS[g, s] < quota_GS[rank, slot]):
                rank, slot = g, s
    return rank, slot


@inner_kernel
def _movable(rank, slot, h, links, placed):
    """Pairs that home rank h can pass on once it has the quota of a slot back: what it holds of experts that have other slots."""
    expert_GS, quota_GS = placed.expert_GS, placed.quota_GS
    first_E, next_P = links.first_E, links.next_P
    movable = np.int64(quota_GS[rank, slot] if next_P[first_E[expert_GS[rank, slot]]] >= 0 else 0)
    for s in range(quota_GS.shape[1]):
        f = expert_GS[h, s]
        if f >= 0 and next_P[first_E[f]] >= 0:
            movable += quota_GS[h, s]
    return movable


@inlined_kernel
def _without(rank, slot, home, target, links, placed, before):
    """Splits without the quota of a slot that `links` no longer has, in place; False, and unchanged, if the target is missed.

    `before` equals the placement, before and after.
    """
    expert_GS, quota_GS, load_G = placed
    S, amount = quota_GS.shape[1], quota_GS[rank, slot]
    h = home // S
    # Its home gets the load back.
    if _movable(rank, slot, h, links, placed) < load_G[h] + amount - target:
        return False
    quota_GS[h, home - h * S] += amount
    load_G[h] += amount
    load_G[rank] -= amount
    expert_GS[rank, slot], quota_GS[rank, slot] = -1, 0
    served = split_linked(target, target, np.bool_(False), links, placed) >= 0
    if served:
        assign(before, placed)
    else:
        assign(placed, before)
    return served


@kernel
def prune_row(target, load_E, num_base, placed):
    """Drops replicas that a maximum load of `target` does not need, smallest quota first; in place.

    A replica goes if the exact split manages without it. Only those are tried whose rank could still be filled so far that
    the slack of all ranks together covers the rest; the search ends after `FAILURES` vain tries.
    """
    expert_GS, quota_GS, load_G = placed
    G, S = quota_GS.shape
    slack = target * G - load_G.sum()
    if slack < G:
        return  # at the mean itself, a replica less would need loads that cancel out exactly
    home_E = home_of_experts(num_base, expert_GS)
    links = link_slots(load_E.size, expert_GS)
    untried_GS, before = expert_GS >= 0, copy_of(placed)
    for g in range(G):
        most = np.int64(0)
        for s in range(S):
            if expert_GS[g, s] >= 0:
                most += load_E[expert_GS[g, s]]
        for s in range(num_base, S):
            if untried_GS[g, s] and target - (most - load_E[expert_GS[g, s]]) > slack:
                untried_GS[g, s] = False
    failures = 0
    while failures < FAILURES:
        rank, slot = _smallest(untried_GS, quota_GS, num_base)
        if rank < 0:
            break
        untried_GS[rank, slot] = False
        e = expert_GS[rank, slot]
        _unlink(rank * S + slot, e, links)
        if not _without(rank, slot, home_E[e], target, links, placed, before):
            _link(rank * S + slot, e, links)
            failures += 1
    clean_row(num_base, placed)
