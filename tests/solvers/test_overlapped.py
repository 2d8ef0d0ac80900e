"""Overlapped: `Chain` with more or less time for copies."""

import dataclasses

import numpy as np
import pytest

import foremoe
from foremoe.base.errors import InputError
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.simulate import plan_judged, simulate
from foremoe.solvers import Chain, Greedy, Overlapped
from foremoe.testing import SolverTests


class TestOverlapped(SolverTests):
    solver = Overlapped(times=2.0)


def slow_links():
    """A stage whose copies hardly hide."""
    work = foremoe.synthetic_workload(
        "gpt-oss-20b", num_ranks=16, tokens_per_rank=2048, micro_steps=4, num_layers=4, regime="mid", seed=37
    )
    return Problem.of(work, Cluster.preset("8xpcie", 16), redundant=4)


def test_once_is_chain_and_more_time_allows_more_copies():
    problem = slow_links()
    placed = [Overlapped(times).solve(problem, problem.static()).expert_NGS for times in (0.0, 1.0, 2.0)]
    assert (placed[1] == Chain().solve(problem, problem.static()).expert_NGS).all()
    copies = [np.count_nonzero(expert_NGS[..., problem.B :] >= 0) for expert_NGS in placed]
    assert copies[0] < copies[1] < copies[2]


def test_it_is_the_cost_model_with_that_overlap():
    problem = slow_links()
    half = dataclasses.replace(problem, cost=CostModel(overlap=0.5))
    expert_NGS = Overlapped(0.5).solve(problem, problem.static()).expert_NGS
    assert (expert_NGS == Chain().solve(half, half.static()).expert_NGS).all()


def test_the_plan_is_priced_by_the_problem_and_the_judge_finds_it_shorter():
    problem = slow_links()
    plan, _ = Planner(rank=(Overlapped(2.0),), guard=False).plan(problem)
    plan.check(problem)
    assert plan.header.cost == problem.cost and "Overlapped(times=2.0" in plan.header.planner
    alone_s = simulate(problem, plan_judged(problem, candidates=())[0]).total_s
    assert simulate(problem, plan_judged(problem)[0]).total_s < 0.98 * alone_s


@pytest.mark.parametrize(("times", "chain"), [(-1.0, Chain()), (float("nan"), Chain()), (101.0, Chain()), (1.0, Greedy())])
def test_options_are_checked(times, chain):
    with pytest.raises(InputError, match="of Overlapped"):
        Overlapped(times, chain)
