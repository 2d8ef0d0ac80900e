"""Moves of load from an expert's home to a replica. All methods of settling ranks use them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel

# Letters: G ranks, S slots per rank.


class Rule(NamedTuple):
    """The rules for settling ranks."""

    node_G: Array  # node of every rank
    num_base: int  # base slots of a rank
    node_only: bool  # whether replicas stay inside their home's node
    relay: bool  # whether ranks of a node may share the load that one larger replica takes over from another node
    blind: bool  # whether the choice of the giver ignores nodes
    weight_G: Array  # float64, favours givers; all 1.0 except in repeated tries


class Copies(NamedTuple):
    """The number of copies from every home rank so far, and its limits."""

    near_limit: int  # most copies out of a rank inside its node
    far_limit: int  # most copies out of a rank to other nodes
    near_G: Array  # int64, copies inside the node
    far_G: Array  # int64, copies to other nodes


@inner_kernel
def top_left(g, num_base, quota_GS):
    """Returns the largest number of pairs that are left at home for any expert whose home is rank g."""
    top = quota_GS[g, 0]
    for b in range(1, num_base):
        top = max(top, quota_GS[g, b])
    return np.int64(top)


@inner_kernel
def slot_for(expert, r, num_base, expert_GS):
    """Returns the redundant slot of rank r that holds the expert. If there is none, returns the first free slot or -1."""
    slot = -1
    for s in range(num_base, expert_GS.shape[1]):
        if expert_GS[r, s] == expert:
            return s
        if expert_GS[r, s] < 0 and slot < 0:
            slot = s
    return slot


@inner_kernel
def give(g, b, r, amount, rule, copies, placed):
    """Moves `amount` pairs of the expert in base slot b of rank g to rank r. Returns True if this made a new replica."""
    expert_GS, quota_GS, load_G = placed
    slot = slot_for(expert_GS[g, b], r, rule.num_base, expert_GS)
    new = expert_GS[r, slot] < 0
    if new:
        expert_GS[r, slot] = expert_GS[g, b]
        if rule.node_G[g] == rule.node_G[r]:
            copies.near_G[g] += 1
        else:
            copies.far_G[g] += 1
    quota_GS[r, slot] += amount
    quota_GS[g, b] -= amount
    load_G[r] += amount
    load_G[g] -= amount
    return new
