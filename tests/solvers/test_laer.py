"""Laer: all experts placed anew, as many copies of each as its load deserves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from solver_util import make_problem, problems, require_valid

from foremoe.planner.strategies import STRATEGIES
from foremoe.solvers.published.laer import Laer


@given(problem=problems(), tries=st.sampled_from((0, 3)))
def test_placements_are_valid_and_rows_without_load_keep_the_start(problem, tries):
    placement = Laer(tries=tries).solve(problem, problem.static())
    require_valid(problem, placement, keeps_homes=False)
    idle_N = problem.load_NE.max(axis=1) == 0
    assert (placement.expert_NGS[idle_N] == problem.static().expert_NGS[idle_N]).all()


@given(problem=problems())
def test_perturbed_counts_never_cost_balance(problem):
    plain, tried = (Laer(tries=tries).solve(problem, problem.static()) for tries in (0, 16))
    # Shares are whole pairs, which may differ by one pair per slot.
    assert (tried.load_NG().max(axis=1) <= plain.load_NG().max(axis=1) + problem.S).all()


def test_copies_follow_load_and_spread_over_nodes():
    # Slots for one copy per node: both nodes have all experts, however loads differ.
    problem = make_problem([[[12, 4, 3, 2]]], [0, 0, 1, 1], 1)
    placement = Laer(tries=0).solve(problem, problem.static())
    for node in (0, 1):
        assert sorted(placement.expert_NGS[0, 2 * node : 2 * node + 2].ravel().tolist()) == [0, 1, 2, 3]
    # One node: what is left after one copy each goes to the expert with the most load per copy, 12 / 3 in the end.
    alone = make_problem([[[12, 4, 3, 2, 1, 0]]], [0, 0, 0], 1)
    found = Laer(tries=0).solve(alone, alone.static())
    assert np.bincount(found.expert_NGS[0].ravel() + 1, minlength=7).tolist() == [0, 3, 2, 1, 1, 1, 1]
    assert found.load_NG().tolist() == [[7, 8, 7]]


def test_it_sees_the_micro_step_before():
    problem = make_problem([[[9, 1, 1, 1]], [[1, 1, 1, 9]]], [0, 0], 1)
    plan, _ = STRATEGIES["laer"].plan(problem)
    assert not plan.executable
    assert (plan.expert_MLGS[0, 0, :, :2] == [[0, 1], [2, 3]]).all()  # nothing is known
    assert (plan.expert_MLGS[1, 0] == 0).sum() == 2 and (plan.expert_MLGS[1, 0] == 3).sum() == 1
