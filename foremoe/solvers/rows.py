"""The placement of one row in the form that compiled functions read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel

# Letters: G ranks, S slots per rank, E experts.


class Placed(NamedTuple):
    """The placement of one row, which is changed in place. -1 marks an empty redundant slot."""

    expert_GS: Array  # int16, expert in every slot
    quota_GS: Array  # int32, pairs that every slot serves
    load_G: Array  # int64, sums of `quota_GS`


@kernel
def home_of_experts(num_base, expert_GS):
    """Returns the home slot p = g*S + b of every expert, int64 [E]."""
    G, S = expert_GS.shape
    home_E = np.empty(G * num_base, np.int64)
    for g in range(G):
        for b in range(num_base):
            home_E[expert_GS[g, b]] = g * S + b
    return home_E


@kernel
def bare_homes(load_E, num_base, expert_GS):
    """Returns a `Placed` without replicas, in which homes serve all load. `expert_GS` holds the homes."""
    G = expert_GS.shape[0]
    home_GS, quota_GS, load_G = expert_GS.copy(), np.zeros(expert_GS.shape, np.int32), np.zeros(G, np.int64)
    home_GS[:, num_base:] = -1
    for g in range(G):
        for b in range(num_base):
            quota_GS[g, b] = load_E[expert_GS[g, b]]
            load_G[g] += quota_GS[g, b]
    return Placed(home_GS, quota_GS, load_G)


@kernel
def copy_of(placed):
    """Returns a copy of a placement."""
    return Placed(placed.expert_GS.copy(), placed.quota_GS.copy(), placed.load_G.copy())


@inner_kernel
def assign(placed, other):
    """Overwrites the placement `placed` with `other`."""
    (expert_GS, quota_GS, load_G), (from_expert_GS, from_quota_GS, from_load_G) = placed, other
    for g in range(load_G.size):
        load_G[g] = from_load_G[g]
        for s in range(expert_GS.shape[1]):
            expert_GS[g, s], quota_GS[g, s] = from_expert_GS[g, s], from_quota_GS[g, s]


@kernel
def empty_idle(num_base, expert_GS, quota_GS):
    """Empties redundant slots without a quota, so that the row is canonical."""
    for g in range(expert_GS.shape[0]):
        for s in range(num_base, expert_GS.shape[1]):
            if quota_GS[g, s] == 0:
                expert_GS[g, s] = -1


@inner_kernel
def clean_row(num_base, placed):
    """Empties redundant slots without a quota and recomputes the rank loads."""
    expert_GS, quota_GS, load_G = placed
    for g in range(expert_GS.shape[0]):
        load_G[g] = 0
        for s in range(expert_GS.shape[1]):
            load_G[g] += quota_GS[g, s]
            if s >= num_base and quota_GS[g, s] == 0:
                expert_GS[g, s] = -1
