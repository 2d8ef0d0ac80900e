"""Changes of a set of replicas: the one that prices least by its bounds, and how it is made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.random import random_below
from foremoe.problem.rates import busiest_s, late_s
from foremoe.solvers.kernels.replica_bounds import count_copy, replica_s

# Letters: G ranks, R redundant slots per rank, P redundant slots, E experts, K bounds.

# A replica that left may not come back for TENURE to 2 * TENURE steps, a new one may not leave for up to half of TENURE.
TENURE = 10


class Change(NamedTuple):
    """A slot gets another expert or none, or the slots of two ranks exchange experts."""

    rank: int  # rank of the slot; -1 for no change
    place: int  # redundant slot of the rank
    expert: int  # the expert that it gets, -1 none
    other_rank: int  # rank of the slot that gets its own, -1 none
    other_place: int  # that slot


class Step(NamedTuple):
    """A step of the search."""

    time: int  # number of the step
    num: int  # bounds in use
    free_s: float  # seconds of copies that do not hide but do not count
    wanted_s: float  # A change that is barred counts if its price is below this
    until_EG: Array  # int64, steps before which an expert may neither come to a rank nor leave it


@kernel
def _largest(total_s_K, add_s_K, more_s_K, other_s, enough_s, first):
    """The largest of some bounds with two additions and more to each; it stops at one of `enough_s`.

    Looks at `first` before all others. Returns the largest, and the bound that reached `enough_s`, else `first`.
    """
    most_s = total_s_K[first] + add_s_K[first] + more_s_K[first] + other_s
    if most_s >= enough_s:
        return most_s, first
    for k in range(total_s_K.size):
        this_s = total_s_K[k] + add_s_K[k] + more_s_K[k] + other_s
        if this_s > most_s:
            most_s = this_s
            if most_s >= enough_s:
                return most_s, k
    return most_s, first


@kernel
def fans_s(fan_4G, rates, free_s):
    """Seconds of copies that do not hide, beyond `free_s`."""
    return max(0.0, late_s(busiest_s(fan_4G, rates), rates) - free_s)


@kernel
def _swap_copies(case, e, a, f, b, fan_4G):
    """Counts expert e as gone from rank a to b, and f from b to a; rank -1 is nowhere."""
    if a >= 0:
        count_copy(case, e, a, -1, fan_4G)
        count_copy(case, f, a, 1, fan_4G)
    if b >= 0:
        count_copy(case, e, b, 1, fan_4G)
        count_copy(case, f, b, -1, fan_4G)


@kernel
def _fans_after_s(case, e, a, f, b, fan_4G, free_s):
    """`fans_s` as it would be with expert e gone from rank a to b, and f from b to a."""
    _swap_copies(case, e, a, f, b, fan_4G)
    out_s = fans_s(fan_4G, case.rates, free_s)
    _swap_copies(case, f, a, e, b, fan_4G)
    return out_s


@kernel
def _barred(step, e, r):
    """Whether an expert (-1: none) may not come to a rank or leave it yet."""
    return e >= 0 and step.until_EG[e, r] > step.time


@kernel
def _best_expert(case, held, bounds, step, slot, without_s, best_s, change):
    """`change`, or what prices less: the slot gets another expert or none. And its price; all other replicas cost `without_s`."""
    (a, i), fan_4G = slot, held.fan_4G
    old, total_s_K, toggled_s_EGK = held.expert_GR[a, i], bounds.total_s_K[: step.num], bounds.toggled_s_EGK
    first = 0
    for e in range(-1, case.home_E.size):
        if e == old or (e >= 0 and (held.at_EG[e, a] or case.load_E[e] == 0)):
            continue
        if e >= 0 and case.node_only and case.node_G[case.home_E[e]] != case.node_G[a]:
            continue
        enough_s = min(best_s, step.wanted_s) if _barred(step, old, a) or _barred(step, e, a) else best_s
        other_s = without_s + replica_s(case, e, a)
        this_s, first = _largest(total_s_K, toggled_s_EGK[old, a], toggled_s_EGK[e, a], other_s, enough_s, first)
        if this_s < enough_s:
            this_s += _fans_after_s(case, old, a, e, -1, fan_4G, step.free_s)
        if this_s < enough_s:
            best_s, change = this_s, Change(a, i, e, -1, -1)
    return change, best_s


@kernel
def _best_exchange(case, held, bounds, step, slot, without_s, best_s, change):
    """`change`, or what prices less: the slot exchanges experts with one of a later rank. And its price."""
    (a, i), expert_GR, at_EG, node_G = slot, held.expert_GR, held.at_EG, case.node_G
    old, total_s_K, moved_s_PGK, (G, R) = expert_GR[a, i], bounds.total_s_K[: step.num], bounds.moved_s_PGK, expert_GR.shape
    first = 0
    for b in range(a + 1, G):
        if case.node_only and node_G[a] != node_G[b]:
            continue
        for j in range(R):
            e = expert_GR[b, j]
            if old == e or (e < 0 and j > 0 and expert_GR[b, j - 1] < 0):
                continue
            if (old >= 0 and at_EG[old, b]) or (e >= 0 and at_EG[e, a]):
                continue
            barred = _barred(step, old, a) or _barred(step, old, b) or _barred(step, e, a) or _barred(step, e, b)
            enough_s = min(best_s, step.wanted_s) if barred else best_s
            p, q = a * R + i if old >= 0 else -1, b * R + j if e >= 0 else -1
            other_s = without_s + replica_s(case, e, a)
            other_s += replica_s(case, old, b) - replica_s(case, e, b)
            this_s, first = _largest(total_s_K, moved_s_PGK[p, b], moved_s_PGK[q, a], other_s, enough_s, first)
            if this_s < enough_s:
                this_s += _fans_after_s(case, old, a, e, b, held.fan_4G, step.free_s)
            if this_s < enough_s:
                best_s, change = this_s, Change(a, i, e, b, j)
    return change, best_s


@kernel
def best_change(case, held, bounds, step):
    """The `Change` of the least price."""
    expert_GR = held.expert_GR
    G, R = expert_GR.shape
    copies_s, best_s, change = 0.0, np.inf, Change(-1, -1, -1, -1, -1)
    for r in range(G):
        for e in expert_GR[r]:
            copies_s += replica_s(case, e, r)
    for a in range(G):
        for i in range(R):
            old = expert_GR[a, i]
            if old < 0 and i > 0 and expert_GR[a, i - 1] < 0:
                continue  # one empty slot is as good as another
            without_s = copies_s - replica_s(case, old, a)
            change, best_s = _best_expert(case, held, bounds, step, (a, i), without_s, best_s, change)
            change, best_s = _best_exchange(case, held, bounds, step, (a, i), without_s, best_s, change)
    return change


@kernel
def make_change(case, held, change, step, state_1):
    """Makes a change and bars its return for some steps. Returns the expert that the slot held."""
    (a, i, e, b, j), t, until_EG = change, step.time, step.until_EG
    old = held.expert_GR[a, i]
    _swap_copies(case, old, a, e, b, held.fan_4G)
    held.expert_GR[a, i] = e
    wait = random_below(state_1, TENURE)
    if old >= 0:
        held.at_EG[old, a], until_EG[old, a] = False, t + TENURE + wait
    if e >= 0:
        held.at_EG[e, a], until_EG[e, a] = True, t + 1 + wait // 2
    if b >= 0:
        held.expert_GR[b, j] = old
        if old >= 0:
            held.at_EG[old, b], until_EG[old, b] = True, t + 1 + wait // 2
        if e >= 0:
            held.at_EG[e, b], until_EG[e, b] = False, t + TENURE + wait
    return old
