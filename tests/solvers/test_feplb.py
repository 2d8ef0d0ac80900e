"""Feplb: whole experts moved inside the node."""

import dataclasses

import numpy as np
import pytest
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
    served,
)

from foremoe.base.errors import InputError
from foremoe.planner.comparison import compare
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate import System, simulate_systems
from foremoe.solvers.published.feplb import Feplb
from foremoe.synthetic.counts import synthetic_workload

solvers = st.builds(Feplb, dyn=st.sampled_from((0, 1, 2, 4)))


def by_hand(load_of, base_GB, node_G, redundant, solver):
    """The rule from its description: {(rank, expert): pairs}."""
    pairs = {(g, e): load_of[e] for g, base_B in enumerate(base_GB) for e in base_B}
    for node in set(node_G):
        ranks = [g for g in range(len(base_GB)) if node_G[g] == node]
        taken = dict.fromkeys(ranks, 0)
        while True:
            now = {g: sum(amount for (rank, _), amount in pairs.items() if rank == g) for g in ranks}
            giver = max(ranks, key=lambda g: now[g])
            takers = [g for g in ranks if g != giver and taken[g] < min(solver.dyn, redundant)]
            if not takers:
                break
            to = min(takers, key=lambda g: now[g])
            dynamic_X = base_GB[giver][: solver.dyn]
            after = {e: max(now[giver] - pairs[giver, e], now[to] + pairs[giver, e]) for e in dynamic_X}
            best = min(after, key=lambda e: after[e], default=None)
            if best is None or after[best] >= now[giver]:
                break
            pairs[to, best], pairs[giver, best] = pairs[giver, best], 0
            taken[to] += 1
    return {place: amount for place, amount in pairs.items() if amount}


@given(problem=problems(), solver=solvers)
def test_equals_the_rule_written_plainly(problem, solver):
    placement = solver.solve(problem, problem.static())
    require_valid(problem, placement)
    require_no_worse_than_static(problem, placement)
    inside = dataclasses.replace(problem, replicas="node")
    assert served(placement) == rows_by_hand(inside, lambda *row: by_hand(*row, solver))


@given(problem=problems(), solver=solvers)
def test_experts_stay_whole_inside_their_node_and_few_move(problem, solver):
    placement = solver.solve(problem, problem.static())
    node_G = problem.cluster.node_of_rank_G
    for n, row in enumerate(served(placement)):
        assert sorted(e for _, e in row) == np.flatnonzero(problem.load_NE[n]).tolist()  # each once: none is split
        home_of = {int(e): g for g, base_B in enumerate(problem.base_NGB[n]) for e in base_B}
        moved = [(g, home_of[e]) for g, e in row if g != home_of[e]]
        assert all(node_G[g] == node_G[home] for g, home in moved)
        for end in zip(*moved, strict=True):
            assert np.bincount(end).max() <= solver.dyn


@given(problem=problems(), solver=solvers)
def test_start_does_not_matter(problem, solver):
    require_start_ignored(solver, problem)


@given(problem=problems(distinct=True), solver=solvers, seed=st.integers(0, 9))
def test_names_do_not_matter(problem, solver, seed):
    require_relabelling(solver, problem, seed)


def test_a_case_by_hand():
    # Node 0 has 15, 3 and 2: the 6 goes to rank 2, the 4 to rank 1, a 1 of rank 2 to rank 0. Node 1 is one rank.
    problem = make_problem([[[6, 5, 4, 1, 1, 1, 1, 1, 0, 20, 20, 0]]], [0, 0, 0, 1], 4)
    assert Feplb().solve(problem, problem.static()).load_NG().tolist() == [[6, 7, 7, 40]]
    # One expert each, given and taken: rank 0 gives its 6 to rank 2 and is done.
    assert Feplb(dyn=1).solve(problem, problem.static()).load_NG().tolist() == [[9, 3, 8, 40]]


def large():
    work = synthetic_workload("gpt-oss-20b", num_ranks=32, tokens_per_rank=64, micro_steps=1, num_layers=1, regime="mid")
    return make_problem(work.load_MLE, np.repeat(np.arange(4), 8), 4), work


def test_more_ranks_than_published_are_refused():
    problem, _ = large()
    with pytest.raises(InputError, match="at most 16 ranks; got 32"):
        Feplb().solve(problem, problem.static())
    with pytest.raises(InputError, match="at most 16 ranks; got 32"):
        STRATEGIES["feplb"].plan(problem)
    half = make_problem(problem.load_MLE, np.repeat(np.arange(2), 8), 4)
    require_no_worse_than_static(half, Feplb().solve(half, half.static()))


def test_tables_leave_it_out_and_say_why():
    problem, work = large()
    problem = dataclasses.replace(problem, load_MLGE=work.load_MLGE, tokens_MG=work.tokens_MG)
    planners = {name: STRATEGIES[name] for name in ("static", "feplb", "quota")}
    systems = {name: System(planner=planner) for name, planner in planners.items()} | {"even": System(even=True)}
    for rows in (compare(problem, planners), simulate_systems([problem], systems)):
        left, other = rows[1], rows[2]
        assert left["n_solved"] == 0 and "at most 16 ranks; got 32" in left["note"]
        assert set(left) - {"note"} == set(other)
        assert {value for key, value in left.items() if key not in ("solver", "n_solved", "note")} == {None}
        assert other["n_solved"] == problem.N and other["predicted_speedup_vs_static"] > 0
    with pytest.raises(InputError, match=r"no system plans these EP groups; feplb: left out: .* at most 16 ranks"):
        simulate_systems([problem], {"feplb": systems["feplb"]})


@pytest.mark.parametrize("dyn", [-1, 1.5, True])
def test_bad_options_are_refused(dyn):
    with pytest.raises(InputError, match="dyn"):
        Feplb(dyn=dyn)
