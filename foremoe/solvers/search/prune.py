"""Kernels that drop replicas without which a placement reaches the same maximum load."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inlined_kernel, inner_kernel, kernel
from foremoe.solvers.rows import assign, clean_row, copy_of, home_of_experts
from foremoe.solvers.split.flow import link_slots, split_linked

FAILURES = 4  # failed tries after which pruning ends

# Letters: G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s).


@inner_kernel
def count_row(home_E, node_G, num_base, expert_GS):
    """Returns the number of replicas outside the node of their home, and the number of all replicas."""
    G, S = expert_GS.shape
    far = num = 0
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] >= 0:
                num += 1
                far += node_G[home_E[expert_GS[g, s]] // S] != node_G[g]
    return far, num


@inner_kernel
def _smallest(untried_GS, quota_GS, num_base):
    """Returns the rank and slot of the untried replica with the smallest quota, or -1 and -1 if there is none."""
    rank, slot = -1, -1
    for g in range(quota_GS.shape[0]):
        for s in range(num_base, quota_GS.shape[1]):
            if untried_GS[g, s] and (rank < 0 or quota_GS[g, s] < quota_GS[rank, slot]):
                rank, slot = g, s
    return rank, slot


@inlined_kernel
def _without(rank, slot, home_E, target, placed, before):
    """Drops a replica and splits again in place. If the target is missed, undoes this and returns False.

    `before` is a copy of the placement, both before and after the call.
    """
    expert_GS, quota_GS, load_G = placed
    S, amount, home = quota_GS.shape[1], quota_GS[rank, slot], home_E[expert_GS[rank, slot]]
    expert_GS[rank, slot], quota_GS[rank, slot] = -1, 0
    # Its home gets the load back.
    quota_GS[home // S, home % S] += amount
    load_G[home // S] += amount
    load_G[rank] -= amount
    served = split_linked(target, target, np.bool_(False), link_slots(home_E.size, expert_GS), placed) >= 0
    if served:
        assign(before, placed)
    else:
        assign(placed, before)
    return served


@kernel
def prune_row(target, load_E, num_base, placed):
    """Drops replicas that are not needed for a maximum load of `target`, in place, starting with those of the smallest quota.

    A replica is dropped if the exact split reaches `target` without it. A replica is tried only if all ranks together have room
    for the pairs that its rank could no longer serve. Pruning ends after `FAILURES` failed tries.
    """
    expert_GS, quota_GS, load_G = placed
    G, S = quota_GS.shape
    slack = target * G - load_G.sum()
    if slack < G:
        return  # if the target is the mean, loads would have to cancel out exactly with fewer replicas
    home_E = home_of_experts(num_base, expert_GS)
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
        failures += not _without(rank, slot, home_E, target, placed, before)
    clean_row(num_base, placed)
