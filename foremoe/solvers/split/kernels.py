"""Row kernels of the split level: quotas for replicas that are already placed, one row at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.problem.laws import require_slots
from foremoe.problem.problem import Problem
from foremoe.solvers.kernels.flow import UNLIMITED, link_slots, split_linked
from foremoe.solvers.kernels.rows import Placed

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s); U slots in use, grouped by expert.


def split_all(problem: Problem, expert_NGS: Array, rows: Callable[[int, int, Array, Array, Array], None]) -> Array:
    """int32 [N, G, S]: the quotas that the driver `rows` gives to every row; rows that a cancel leaves out are served at home."""
    require_slots(expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    quota_NGS = np.zeros(expert_NGS.shape, np.int32)
    load_NE = problem.load_NE
    done_N = for_rows(lambda low, high: rows(low, high, load_NE, expert_NGS, quota_NGS), len(load_NE))
    for left in np.flatnonzero(~done_N):
        home_row(load_NE[left], expert_NGS[left], quota_NGS[left])
    served_N, load_N = quota_NGS.sum(axis=(1, 2), dtype=np.int64), load_NE.sum(axis=1, dtype=np.int64)
    if (served_N != load_N).any():
        n = int(np.argmax(served_N != load_N))
        raise InputError(
            f"the slots of row {n} serve {served_N[n]} of {load_N[n]} pairs: an expert with load has no slot; "
            "every expert needs at least its home."
        )
    return quota_NGS


@kernel
def _slots_by_expert(expert_GS, num_experts):
    """``(first_X, slot_U, home_E)``: expert e has the slots ``slot_U[first_X[e] : first_X[e + 1]]``, lowest p first.

    ``home_E`` is the slot in the lowest column (then of the lowest rank), -1 for an expert without one: base slots are the
    low columns, so this is the home wherever homes were kept.
    """
    (G, S), expert_P = expert_GS.shape, expert_GS.ravel()
    first_X = np.zeros(num_experts + 1, np.int64)
    for e in expert_P:
        if e >= 0:
            first_X[e + 1] += 1
    first_X = np.cumsum(first_X)
    slot_U = np.empty(first_X[num_experts], np.int64)
    home_E = np.full(num_experts, -1, np.int64)
    next_E = first_X[:num_experts].copy()
    for p in range(G * S):
        e = expert_P[p]
        if e >= 0:
            slot_U[next_E[e]] = p
            next_E[e] += 1
            if home_E[e] < 0 or p % S < home_E[e] % S:
                home_E[e] = p
    return first_X, slot_U, home_E


@kernel
def home_row(load_E, expert_GS, quota_GS):
    """All load to the slot in the lowest column (the home); the others get nothing. Returns `_slots_by_expert`."""
    S = expert_GS.shape[1]
    first_X, slot_U, home_E = _slots_by_expert(expert_GS, load_E.size)
    quota_GS[:, :] = 0
    for e in range(load_E.size):
        if home_E[e] >= 0:
            quota_GS[home_E[e] // S, home_E[e] % S] = load_E[e]
    return first_X, slot_U, home_E


@kernel
def even_row(load_E, expert_GS, quota_GS):
    """Every slot of an expert an equal share; the remainder goes to its lowest slots, one pair each."""
    S = expert_GS.shape[1]
    first_X, slot_U, _ = _slots_by_expert(expert_GS, load_E.size)
    quota_GS[:, :] = 0
    for e in range(load_E.size):
        low, high = first_X[e], first_X[e + 1]
        for i in range(low, high):
            quota_GS[slot_U[i] // S, slot_U[i] % S] = load_E[e] // (high - low) + (i - low < load_E[e] % (high - low))


@kernel
def water_fill_row(rounds, load_E, expert_GS, quota_GS):
    """Starts even; each round, every expert's load is poured anew so that it levels the ranks that hold it."""
    S = expert_GS.shape[1]
    first_X, slot_U, _ = _slots_by_expert(expert_GS, load_E.size)
    even_row(load_E, expert_GS, quota_GS)
    load_G = quota_GS.astype(np.int64).sum(axis=1)
    for _ in range(rounds):
        changed = False
        for e in range(load_E.size):
            low, high = first_X[e], first_X[e + 1]
            if high - low < 2 or load_E[e] == 0:
                continue
            other_I = np.empty(high - low, np.int64)
            for i in range(low, high):
                g, s = slot_U[i] // S, slot_U[i] % S
                other_I[i - low] = load_G[g] - quota_GS[g, s]
            # The level is where the load just fills the ranks below it: all of the lowest k ranks, the last one partly.
            order_I = np.argsort(other_I, kind="mergesort")
            poured = np.int64(load_E[e])
            wet = 1
            below = other_I[order_I[0]]
            while wet < high - low and other_I[order_I[wet]] * wet - below < poured:
                below += other_I[order_I[wet]]
                wet += 1
            level, rest = (poured + below) // wet, (poured + below) % wet
            wet_I = np.zeros(high - low, np.bool_)
            wet_I[order_I[:wet]] = True
            for i in range(low, high):
                g, s = slot_U[i] // S, slot_U[i] % S
                share = 0
                if wet_I[i - low]:
                    share = level - other_I[i - low] + (rest > 0)
                    rest -= 1
                changed |= share != quota_GS[g, s]
                load_G[g] = other_I[i - low] + share
                quota_GS[g, s] = share
        if not changed:
            break


@kernel
def split_row(load_E, expert_GS, quota_GS):
    """The split with the least possible maximum rank load, in whole pairs; returns that maximum.

    Starts with all load at home and a target of ceil(mean rank load), and goes on as `flow.split_linked` along one path at a
    time. When no rank is above the target, the target is both reached and a lower bound. The last step pulls quota back home
    where the target leaves room: earlier, lower targets pushed too much away. An expert without a slot is not served.
    """
    S = expert_GS.shape[1]
    first_X, slot_U, home_E = home_row(load_E, expert_GS, quota_GS)
    placed = Placed(expert_GS, quota_GS, quota_GS.astype(np.int64).sum(axis=1))
    load_G = placed.load_G
    target = -(-load_G.sum() // load_G.size)
    target = split_linked(target, UNLIMITED, np.bool_(True), link_slots(load_E.size, expert_GS), placed)
    moved = True
    while moved:
        moved = False
        for e in range(load_E.size):
            if first_X[e + 1] - first_X[e] < 2:
                continue
            home = home_E[e] // S
            for i in range(first_X[e], first_X[e + 1]):
                g, s = slot_U[i] // S, slot_U[i] % S
                amount = min(target - load_G[home], quota_GS[g, s])
                if slot_U[i] != home_E[e] and amount > 0:
                    quota_GS[g, s] -= amount
                    quota_GS[home, home_E[e] % S] += amount
                    load_G[g] -= amount
                    load_G[home] += amount
                    moved = True
    return target


@kernel
def even_rows(low, high, load_NE, expert_NGS, quota_NGS):
    """`even_row` for rows [low, high)."""
    for n in range(low, high):
        even_row(load_NE[n], expert_NGS[n], quota_NGS[n])


@kernel
def water_fill_rows(rounds, low, high, load_NE, expert_NGS, quota_NGS):
    """`water_fill_row` for rows [low, high)."""
    for n in range(low, high):
        water_fill_row(rounds, load_NE[n], expert_NGS[n], quota_NGS[n])


@kernel
def split_rows(low, high, load_NE, expert_NGS, quota_NGS):
    """`split_row` for rows [low, high)."""
    for n in range(low, high):
        split_row(load_NE[n], expert_NGS[n], quota_NGS[n])
