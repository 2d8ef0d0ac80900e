"""What a placement holds for nothing: empty slots, and replicas that its maximum load does not need."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.flow import link_slots, split_linked

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.


@kernel
def home_of_experts(num_experts, num_base, expert_GS):  # type: ignore[no-untyped-def]
    """int64 [E]: home p = g*S + b of every expert."""
    home_E = np.empty(num_experts, np.int64)
    for g in range(expert_GS.shape[0]):
        for b in range(num_base):
            home_E[expert_GS[g, b]] = g * expert_GS.shape[1] + b
    return home_E


@kernel
def clean_row(num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Empties redundant slots without quota and sets `load_G`."""
    for g in range(expert_GS.shape[0]):
        load_G[g] = 0
        for s in range(expert_GS.shape[1]):
            load_G[g] += quota_GS[g, s]
            if s >= num_base and quota_GS[g, s] == 0:
                expert_GS[g, s] = -1


@kernel
def count_row(home_E, node_G, num_base, expert_GS):  # type: ignore[no-untyped-def]
    """Replicas outside the node of their home, and all replicas."""
    G, S = expert_GS.shape
    far = num = 0
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] >= 0:
                num += 1
                far += node_G[home_E[expert_GS[g, s]] // S] != node_G[g]
    return far, num


@kernel
def _unlink(p, e, first_E, next_P):  # type: ignore[no-untyped-def]
    """Takes slot p out of the list of its expert; see `link_slots`."""
    if first_E[e] == p:
        first_E[e] = next_P[p]
        return
    q = first_E[e]
    while next_P[q] != p:
        q = next_P[q]
    next_P[q] = next_P[p]


@kernel
def _link(p, e, first_E, next_P):  # type: ignore[no-untyped-def]
    """Puts slot p back into the list of its expert, in its place."""
    if first_E[e] > p or first_E[e] < 0:
        next_P[p], first_E[e] = first_E[e], p
        return
    q = first_E[e]
    while 0 <= next_P[q] < p:
        q = next_P[q]
    next_P[p], next_P[q] = next_P[q], p


@kernel
def prune_row(target, load_E, failures, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Drops replicas that a maximum load of `target` does not need, smallest quota first; in place.

    A replica goes if the exact split manages without it. Only those are tried whose rank could still be filled so far that
    the slack of all ranks together covers the rest; the search ends after `failures` vain tries.
    """
    G, S = quota_GS.shape
    slack = target * G - load_G.sum()
    if slack < G:
        return  # at the mean itself, a replica less would need loads that cancel out exactly
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    first_E, next_P, rank_P = link_slots(load_E.size, expert_GS)
    untried_GS = expert_GS >= 0
    for g in range(G):
        most = np.int64(0)
        for s in range(S):
            if expert_GS[g, s] >= 0:
                most += load_E[expert_GS[g, s]]
        for s in range(num_base, S):
            if untried_GS[g, s] and target - (most - load_E[expert_GS[g, s]]) > slack:
                untried_GS[g, s] = False
    old_quota_GS, old_load_G = np.empty_like(quota_GS), np.empty_like(load_G)
    while failures > 0:
        rank, slot = -1, -1
        for g in range(G):
            for s in range(num_base, S):
                if untried_GS[g, s] and (rank < 0 or quota_GS[g, s] < quota_GS[rank, slot]):
                    rank, slot = g, s
        if rank < 0:
            break
        untried_GS[rank, slot] = False
        e = expert_GS[rank, slot]
        home, amount = home_E[e] // S, quota_GS[rank, slot]
        _unlink(rank * S + slot, e, first_E, next_P)
        # Its home gets the load back and can pass on no more than what it holds of experts that have other slots.
        movable = np.int64(amount if next_P[first_E[e]] >= 0 else 0)
        for s in range(S):
            f = expert_GS[home, s]
            if f >= 0 and next_P[first_E[f]] >= 0:
                movable += quota_GS[home, s]
        reached = np.int64(-1)
        if movable >= load_G[home] + amount - target:
            old_quota_GS[:], old_load_G[:] = quota_GS, load_G
            quota_GS[home, home_E[e] - home * S] += amount
            load_G[home] += amount
            load_G[rank] -= amount
            expert_GS[rank, slot], quota_GS[rank, slot] = -1, 0
            reached = split_linked(target, target, first_E, next_P, rank_P, expert_GS, quota_GS, load_G)
            if reached < 0:
                quota_GS[:], load_G[:] = old_quota_GS, old_load_G
        if reached < 0:
            expert_GS[rank, slot] = e
            _link(rank * S + slot, e, first_E, next_P)
            failures -= 1
    clean_row(num_base, expert_GS, quota_GS, load_G)
