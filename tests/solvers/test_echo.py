"""Echo: clones of hot experts in the slots of ranks that have room, by bin packing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from solver_util import (
    make_problem,
    problems,
    require_no_worse_than_static,
    require_relabelling,
    require_start_ignored,
    require_valid,
    rows_by_hand,
)

from foremoe.solvers.published.echo import Echo
from foremoe.solvers.split.exact import ExactSplit


def clones_by_hand(load_of, base_GB, node_G, redundant):
    """(rank, expert) of every clone that the rule makes, from its description."""
    room, spill = {}, {}
    for node in set(node_G):
        ranks = [g for g in range(len(base_GB)) if node_G[g] == node]
        mean = -(-sum(load_of[e] for g in ranks for e in base_GB[g]) // len(ranks))
        for g in ranks:
            kept = 0
            for e in sorted(base_GB[g], key=lambda e: load_of[e]):
                spill[g, e] = load_of[e] - min(load_of[e], mean - kept)
                kept += load_of[e] - spill[g, e]
            room[g] = mean - sum(load_of[e] for e in base_GB[g])
    clones = []
    while any(spill.values()):
        home, e = max(spill, key=lambda place: spill[place])
        free = [
            g
            for g in room
            if node_G[g] == node_G[home] and room[g] > 0 and sum(rank == g for rank, _ in clones) < redundant
        ]  # fmt: skip
        fits = [g for g in free if room[g] >= spill[home, e]]
        if not free:
            spill[home, e] = 0
            continue
        to = min(fits, key=lambda g: (room[g], g)) if fits else min(free, key=lambda g: (-room[g], g))
        clones.append((to, e))
        amount = min(room[to], spill[home, e])
        room[to] -= amount
        spill[home, e] -= amount
    return clones


@given(problem=problems(distinct=True))
def test_is_the_best_split_over_the_packed_clones(problem):
    placement = Echo().solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    expert_NGS = problem.static().expert_NGS.copy()
    for expert_GS, clones in zip(expert_NGS, rows_by_hand(problem, clones_by_hand), strict=True):
        used_G = np.full(problem.G, problem.B)
        for g, e in clones:
            expert_GS[g, used_G[g]] = e
            used_G[g] += 1
    quota_NGS = ExactSplit().solve(problem, expert_NGS)
    expert_NGS[:, :, problem.B :][quota_NGS[:, :, problem.B :] == 0] = -1
    assert (placement.expert_NGS == expert_NGS).all() and (placement.quotas_NGS == quota_NGS).all()


@given(problem=problems())
def test_start_does_not_matter(problem):
    require_start_ignored(Echo(), problem)


@given(problem=problems(distinct=True), seed=st.integers(0, 9))
def test_names_do_not_matter(problem, seed):
    require_relabelling(Echo(), problem, seed)


def test_a_case_by_hand():
    # Mean 10. Rank 0 keeps 2 and 8 of its 16: 8 spill. They fill rank 2, which has room for 8, and not rank 1 with room for 9.
    problem = make_problem([[[16, 2, 1, 0, 2, 0, 19, 0]]], [0, 0, 0, 0], 1)
    placement = Echo().solve(problem, problem.static())
    assert placement.load_NG().tolist() == [[10, 10, 10, 10]]
    assert placement.expert_NGS[0, :, 2].tolist() == [-1, 6, 0, -1]
