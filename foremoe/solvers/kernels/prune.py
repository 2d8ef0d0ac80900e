"""What a placement holds for nothing: empty slots, and replicas that its maximum load does not need."""

from __future__ import annotations

import numpy as np

from foremoe.solvers.kernels.compiled import kernel
from foremoe.solvers.kernels.flow import split_row

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
    untried_GS = expert_GS >= 0
    for g in range(G):
        most = np.int64(0)
        for s in range(S):
            if expert_GS[g, s] >= 0:
                most += load_E[expert_GS[g, s]]
        for s in range(num_base, S):
            if untried_GS[g, s] and target - (most - load_E[expert_GS[g, s]]) > slack:
                untried_GS[g, s] = False
    while failures > 0:
        rank, slot = -1, -1
        for g in range(G):
            for s in range(num_base, S):
                if untried_GS[g, s] and (rank < 0 or quota_GS[g, s] < quota_GS[rank, slot]):
                    rank, slot = g, s
        if rank < 0:
            break
        untried_GS[rank, slot] = False
        old_expert_GS, old_quota_GS, old_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
        home, amount = home_E[expert_GS[rank, slot]], quota_GS[rank, slot]
        quota_GS[home // S, home % S] += amount
        load_G[home // S] += amount
        load_G[rank] -= amount
        expert_GS[rank, slot], quota_GS[rank, slot] = -1, 0
        if split_row(target, target, load_E.size, expert_GS, quota_GS, load_G) < 0:
            expert_GS[:], quota_GS[:], load_G[:] = old_expert_GS, old_quota_GS, old_load_G
            failures -= 1
    clean_row(num_base, expert_GS, quota_GS, load_G)
