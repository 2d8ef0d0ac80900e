"""Row kernels of the split level: quotas for replicas that are already placed, one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.problem.laws import require_slots

if TYPE_CHECKING:
    from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s); U slots in use, grouped by expert.


def split_all(problem: Problem, expert_NGS: Array, rows: Callable[[int, int, Array, Array, Array], None]) -> Array:
    """int32 [N, G, S]: the quotas that the driver `rows` gives to every row.

    Rows that a cancel leaves out are served at home, so that the result is valid all the same.

    Raises:
        InputError: an expert that has load has no slot.   PlanError: a slot holds an expert that does not exist.
    """
    require_slots(expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    quota_NGS = np.zeros(expert_NGS.shape, np.int32)
    load_NE = problem.load_NE

    def block(low: int, high: int) -> None:
        rows(low, high, load_NE, expert_NGS, quota_NGS)

    done_N = for_rows(block, len(load_NE))
    for left in np.flatnonzero(~done_N):
        home_rows(left, left + 1, load_NE, expert_NGS, quota_NGS)
    served_N, load_N = quota_NGS.sum(axis=(1, 2), dtype=np.int64), load_NE.sum(axis=1, dtype=np.int64)
    if (served_N != load_N).any():
        n = int(np.argmax(served_N != load_N))
        raise InputError(
            f"the slots of row {n} serve {served_N[n]} of {load_N[n]} pairs: an expert with load has no slot; "
            "every expert needs at least its home."
        )
    return quota_NGS


@kernel
def _slots_by_expert(expert_GS, num_experts):  # type: ignore[no-untyped-def]
    """``(first_X, slot_U, home_E)``: expert e has the slots ``slot_U[first_X[e] : first_X[e + 1]]``, lowest p first.

    ``home_E`` is the slot in the lowest column (then of the lowest rank), -1 for an expert without one: base slots are the
    low columns, so this is the home wherever homes were kept.
    """
    G, S = expert_GS.shape
    first_X = np.zeros(num_experts + 1, np.int64)
    for g in range(G):
        for s in range(S):
            if expert_GS[g, s] >= 0:
                first_X[expert_GS[g, s] + 1] += 1
    for e in range(num_experts):
        first_X[e + 1] += first_X[e]
    slot_U = np.empty(first_X[num_experts], np.int64)
    home_E = np.full(num_experts, -1, np.int64)
    next_E = first_X[:num_experts].copy()
    for g in range(G):
        for s in range(S):
            e = expert_GS[g, s]
            if e >= 0:
                slot_U[next_E[e]] = g * S + s
                next_E[e] += 1
                if home_E[e] < 0 or s < home_E[e] % S:
                    home_E[e] = g * S + s
    return first_X, slot_U, home_E


@kernel
def home_row(load_E, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """All load to the slot in the lowest column (the home); the others get nothing."""
    S = expert_GS.shape[1]
    _, _, home_E = _slots_by_expert(expert_GS, load_E.size)
    quota_GS[:, :] = 0
    for e in range(load_E.size):
        if home_E[e] >= 0:
            quota_GS[home_E[e] // S, home_E[e] % S] = load_E[e]


@kernel
def even_row(load_E, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """Every slot of an expert an equal share; the remainder goes to its lowest slots, one pair each."""
    S = expert_GS.shape[1]
    first_X, slot_U, _ = _slots_by_expert(expert_GS, load_E.size)
    quota_GS[:, :] = 0
    for e in range(load_E.size):
        low, high = first_X[e], first_X[e + 1]
        for i in range(low, high):
            share = load_E[e] // (high - low)
            if i - low < load_E[e] % (high - low):
                share += 1
            quota_GS[slot_U[i] // S, slot_U[i] % S] = share


@kernel
def water_fill_row(load_E, expert_GS, rounds, quota_GS):  # type: ignore[no-untyped-def]
    """Starts even; each round, every expert's load is poured anew so that it levels the ranks that hold it."""
    G, S = expert_GS.shape
    first_X, slot_U, _ = _slots_by_expert(expert_GS, load_E.size)
    even_row(load_E, expert_GS, quota_GS)
    load_G = np.zeros(G, np.int64)
    for g in range(G):
        for s in range(S):
            load_G[g] += quota_GS[g, s]
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
                    share = level - other_I[i - low]
                    if rest > 0:
                        share += 1
                        rest -= 1
                changed |= share != quota_GS[g, s]
                load_G[g] = other_I[i - low] + share
                quota_GS[g, s] = share
        if not changed:
            break


@kernel
def split_row(load_E, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """The split with the least possible maximum rank load, in whole pairs; returns that maximum.

    Starts with all load at home and a target of ceil(mean rank load). The most loaded rank above the target pushes its excess
    along a shortest path of moves (out of a slot into another slot of the same expert, again and again) to a rank below the
    target. Where no such rank can be reached, the load of the ranks that were reached can only move among them, so no split
    does better than ceil(their load / their number): that is the new target. When no rank is above the target, the target is
    both reached and a lower bound (Newton's method on the minimum cut of the max-flow formulation).

    The last step pulls quota back home where the target leaves room: earlier, lower targets pushed too much away.

    Args:
        load_E: int32, pairs per expert; an expert without a slot is not served.
        expert_GS: int16, expert of each slot, -1 empty; homes may have been moved.
        quota_GS: int32, written.
    """
    G, S = expert_GS.shape
    first_X, slot_U, home_E = _slots_by_expert(expert_GS, load_E.size)
    quota_GS[:, :] = 0
    load_G = np.zeros(G, np.int64)
    total = np.int64(0)
    for e in range(load_E.size):
        if home_E[e] >= 0:
            quota_GS[home_E[e] // S, home_E[e] % S] = load_E[e]
            load_G[home_E[e] // S] += load_E[e]
            total += load_E[e]
    target = -(-total // G)
    queue_G = np.empty(G, np.int64)
    from_G, out_G, in_G = np.empty(G, np.int64), np.empty(G, np.int64), np.empty(G, np.int64)
    seen_G, seen_E = np.zeros(G, np.int64), np.zeros(load_E.size, np.int64)
    search = 0
    while True:
        source = np.argmax(load_G)
        if load_G[source] <= target:
            break
        search += 1
        queue_G[0], reached, sink = source, 1, -1
        seen_G[source] = search
        head = 0
        while head < reached and sink < 0:
            g = queue_G[head]
            head += 1
            for s in range(S):
                e = expert_GS[g, s]
                if e < 0 or quota_GS[g, s] == 0 or seen_E[e] == search:
                    continue
                seen_E[e] = search
                for i in range(first_X[e], first_X[e + 1]):
                    to = slot_U[i] // S
                    if seen_G[to] == search:
                        continue
                    seen_G[to] = search
                    from_G[to], out_G[to], in_G[to] = g, s, slot_U[i] % S
                    queue_G[reached] = to
                    reached += 1
                    if load_G[to] < target:
                        sink = to
                        break
                if sink >= 0:
                    break
        if sink < 0:
            stuck = np.int64(0)
            for i in range(reached):
                stuck += load_G[queue_G[i]]
            target = -(-stuck // reached)
            continue
        amount = min(load_G[source] - target, target - load_G[sink])
        g = sink
        while g != source:
            amount = min(amount, quota_GS[from_G[g], out_G[g]])
            g = from_G[g]
        g = sink
        while g != source:
            quota_GS[g, in_G[g]] += amount
            quota_GS[from_G[g], out_G[g]] -= amount
            g = from_G[g]
        load_G[source] -= amount
        load_G[sink] += amount
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
def home_rows(low, high, load_NE, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`home_row` for rows [low, high)."""
    for n in range(low, high):
        home_row(load_NE[n], expert_NGS[n], quota_NGS[n])


@kernel
def even_rows(low, high, load_NE, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`even_row` for rows [low, high)."""
    for n in range(low, high):
        even_row(load_NE[n], expert_NGS[n], quota_NGS[n])


@kernel
def water_fill_rows(low, high, load_NE, expert_NGS, rounds, quota_NGS):  # type: ignore[no-untyped-def]
    """`water_fill_row` for rows [low, high)."""
    for n in range(low, high):
        water_fill_row(load_NE[n], expert_NGS[n], rounds, quota_NGS[n])


@kernel
def split_rows(low, high, load_NE, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`split_row` for rows [low, high)."""
    for n in range(low, high):
        split_row(load_NE[n], expert_NGS[n], quota_NGS[n])
