"""Row kernels of the split level, which set the quotas of given replicas for one row at a time."""

from collections.abc import Callable

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.problem.laws import require_slots
from foremoe.problem.problem import Problem
from foremoe.solvers.rows import Placed
from foremoe.solvers.split.flow import UNLIMITED, link_slots, split_linked

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), X = E + 1.


def split_all(problem: Problem, expert_NGS: Array, rows: Callable[[int, int, Array, Array, Array], None]) -> Array:
    """Returns the quotas that the function `rows` sets, int32 [N, G, S]. Rows that a cancellation skips are served at home."""
    require_slots(expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    quota_NGS = np.zeros(expert_NGS.shape, np.int32)
    load_NE = problem.load_NE
    done_N = for_rows(lambda low, high: rows(low, high, load_NE, expert_NGS, quota_NGS), len(load_NE))
    for left in np.flatnonzero(~done_N):
        home_row(load_NE[left], expert_NGS[left], quota_NGS[left])
    served_N, load_N = quota_NGS.sum(axis=(1, 2), dtype=np.int64), load_NE.sum(axis=1, dtype=np.int64)
    if (served_N != load_N).any():
        n = int(np.argmax(served_N != load_N))
        served = f"the slots of row {n} serve {served_N[n]} of {load_N[n]} pairs"
        raise InputError(f"{served}, because an expert with load has no slot; give every expert at least its home.")
    return quota_NGS


@kernel
def home_row(load_E, expert_GS, quota_GS):
    """Gives all load of every expert to its home and no load to its other slots.

    Base slots are the first slots of a rank. The home is therefore the expert's slot with the lowest s, and among several the
    slot on the lowest rank. Returns the home g*S + s of every expert, int64 [E], or -1 for an expert without a slot.
    """
    G, S = expert_GS.shape
    home_E = np.full(load_E.size, -1, np.int64)
    quota_GS[:, :] = 0
    for s in range(S):
        for g in range(G):
            e = expert_GS[g, s]
            if e >= 0 and home_E[e] < 0:
                home_E[e], quota_GS[g, s] = g * S + s, load_E[e]
    return home_E


@kernel
def start_at_home(load_E, num_base, expert_GS, quota_GS):
    """Empties redundant slots and serves all load at home. Returns the homes, as `home_row`, and the rank loads, int64 [G]."""
    expert_GS[:, num_base:] = -1
    home_E = home_row(load_E, expert_GS, quota_GS)
    return home_E, quota_GS.astype(np.int64).sum(axis=1)


@kernel
def even_targets(load_G, domain_G):
    """Returns the mean load of every rank's domain in whole pairs, int64 [G]. The most loaded ranks get the remainder."""
    total_V, size_V = np.zeros(domain_G.max() + 1, np.int64), np.zeros(domain_G.max() + 1, np.int64)
    for g in range(load_G.size):
        total_V[domain_G[g]] += load_G[g]
        size_V[domain_G[g]] += 1
    target_G = np.empty(load_G.size, np.int64)
    rest_V = total_V - total_V // np.maximum(size_V, 1) * size_V
    for g in np.argsort(-load_G, kind="mergesort"):
        v = domain_G[g]
        target_G[g] = total_V[v] // size_V[v] + (rest_V[v] > 0)
        rest_V[v] -= 1
    return target_G


@kernel
def even_row(load_E, expert_GS, quota_GS):
    """Gives every slot of an expert an equal share. The lowest slots get one pair each of the remainder."""
    G, S = expert_GS.shape
    num_E, done_E = np.zeros(load_E.size, np.int64), np.zeros(load_E.size, np.int64)
    for e in expert_GS.ravel():
        if e >= 0:
            num_E[e] += 1
    quota_GS[:, :] = 0
    for g in range(G):
        for s in range(S):
            e = expert_GS[g, s]
            if e >= 0:
                quota_GS[g, s] = load_E[e] // num_E[e] + (done_E[e] < load_E[e] % num_E[e])
                done_E[e] += 1


@kernel
def split_row(load_E, expert_GS, quota_GS):
    """Finds the split with the smallest possible maximum rank load in whole pairs, and returns that maximum.

    The split starts with all load at home and a target of ceil(mean rank load), and continues like `flow.split_linked` with one
    path at a time. When no rank is above the target, the target is reached and is also a lower bound. Earlier targets were lower
    and pushed away too much load. The last step therefore moves quota back home where the target leaves room. An expert without a
    slot is not served.
    """
    S = expert_GS.shape[1]
    home_E, links = home_row(load_E, expert_GS, quota_GS), link_slots(load_E.size, expert_GS)
    placed = Placed(expert_GS, quota_GS, quota_GS.astype(np.int64).sum(axis=1))
    load_G = placed.load_G
    target = split_linked(-(-load_G.sum() // load_G.size), UNLIMITED, np.bool_(True), links, placed)
    moved = True
    while moved:
        moved = False
        for e in range(load_E.size):
            home, p = home_E[e], links.first_E[e]
            while p >= 0:
                amount = min(target - load_G[home // S], quota_GS[p // S, p % S])
                if p != home and amount > 0:
                    quota_GS[p // S, p % S] -= amount
                    quota_GS[home // S, home % S] += amount
                    load_G[p // S] -= amount
                    load_G[home // S] += amount
                    moved = True
                p = links.next_P[p]
    return target


@kernel
def even_rows(low, high, load_NE, expert_NGS, quota_NGS):
    """Runs `even_row` on rows [low, high)."""
    for n in range(low, high):
        even_row(load_NE[n], expert_NGS[n], quota_NGS[n])


@kernel
def split_rows(low, high, load_NE, expert_NGS, quota_NGS):
    """Runs `split_row` on rows [low, high)."""
    for n in range(low, high):
        split_row(load_NE[n], expert_NGS[n], quota_NGS[n])
