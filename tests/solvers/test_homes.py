"""Home solvers: permutations with few moves."""

import dataclasses
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import make_problem, node_maps, problems

from foremoe.base.parallel import row_runner
from foremoe.problem.cost import CostModel
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.assign import few_moves, home_slots
from foremoe.solvers.home.keep import Keep

SOLVERS = [Keep(), Anneal(sweeps=20), Anneal(sweeps=5, min_gain=0.0, move_price=0.0, state_bytes=0.0, seed=3)]


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@given(problem=problems(), objective=st.sampled_from(["balance", "time"]))
def test_homes_are_permutations_and_those_who_stay_keep_their_slot(solver, problem, objective):
    problem = dataclasses.replace(problem, cost=CostModel(objective=objective))
    home_LE = solver.solve(problem)
    assert home_LE.dtype == np.int32 and home_LE.shape == (problem.L, problem.E)
    assert (np.sort(home_LE, axis=1) == np.arange(problem.E)).all()
    stays_LE = home_LE // problem.B == problem.home_LE // problem.B
    assert (home_LE[stays_LE] == problem.home_LE[stays_LE]).all()
    assert (solver.solve(problem) == home_LE).all()
    dataclasses.replace(problem, home_LE=home_LE)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_nothing_to_balance_moves_nothing(solver):
    home_LE = np.random.default_rng(0).permutation(8)[None]
    problem = make_problem(np.zeros((2, 1, 8)), [0, 0, 1, 1], 1, home_LE=home_LE)
    assert (solver.solve(problem) == home_LE).all()


@given(data=st.data())
def test_renaming_ranks_changes_only_who_moves(data):
    num_ranks, base = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    node_G = data.draw(node_maps(num_ranks))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    rank_E, now_E = (rng.permutation(num_ranks * base) // base for _ in range(2))
    named_E = few_moves(rank_E, now_E, node_G)
    together = lambda group_E: group_E[:, None] == group_E  # noqa: E731
    assert (together(named_E) == together(rank_E)).all() and (together(node_G[named_E]) == together(node_G[rank_E])).all()
    sizes = np.bincount(node_G)
    assert (sizes[node_G[named_E]] == sizes[node_G[rank_E]]).all()
    assert (named_E == now_E).sum() >= (rank_E == now_E).sum()
    home_E = home_slots(named_E, now_E * base + np.argsort(np.argsort(now_E, kind="stable"), kind="stable") % base, base)
    assert (np.sort(home_E) == np.arange(num_ranks * base)).all() and (home_E // base == named_E).all()


def test_a_layer_is_planned_alike_alone_and_among_others_on_any_threads():
    rng = np.random.default_rng(1)
    problem = make_problem(rng.integers(0, 1000, (3, 4, 16)), [0, 0, 1, 1], 1)
    for solver in SOLVERS:
        home_LE = solver.solve(problem)
        assert (solver.solve(problem.layers([2]))[0] == home_LE[2]).all()
        with row_runner(2):
            assert (solver.solve(problem) == home_LE).all()


def test_a_cancelled_layer_keeps_its_homes():
    problem = make_problem(np.random.default_rng(2).integers(0, 1000, (3, 4, 16)), [0, 0, 1, 1], 1)
    solver, cancel = Anneal(sweeps=20, min_gain=0.0), threading.Event()
    with row_runner(1, lambda num: cancel.set(), cancel):
        home_LE = solver.solve(problem)
    assert (home_LE[1:] == problem.home_LE[1:]).all() and (home_LE[0] == solver.solve(problem)[0]).all()
