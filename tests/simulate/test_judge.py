"""The judge: no candidate is shorter on the simulated timeline."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe import Cluster, CostModel, InputError, Planner, Problem
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate import plan_judged, simulate
from foremoe.testing import strategies as draws

RIVALS = ("static", "quota", "greedy", "least_loaded")


@examples(40)
@given(st.data())
def test_no_rival_is_shorter(data):
    problem = data.draw(draws.problems(sources=True))
    rivals = [STRATEGIES[name] for name in RIVALS]
    plan, summary = plan_judged(problem, candidates=rivals)
    judged_s = simulate(problem, plan).total_s
    for objective in ("time", "balance"):
        posed = dataclasses.replace(problem, cost=CostModel(objective=objective, overlap=problem.cost.overlap))
        for planner in (Planner(), *rivals) if objective == problem.cost.objective else (Planner(),):
            assert judged_s <= simulate(problem, planner.plan(posed)[0]).total_s * (1 + 1e-9)
    assert summary.rows == problem.N


def test_it_mends_what_the_closed_form_misses():
    work = foremoe.synthetic_workload(
        "glm-4.5-air", num_ranks=32, tokens_per_rank=512, micro_steps=4, num_layers=4, regime="skew", stage="recompute"
    )
    problem = Problem.of(work, Cluster.preset("8xpcie", 32), redundant=2)
    alone_s, judged_s = (simulate(problem, plan).total_s for plan, _ in (Planner().plan(problem), plan_judged(problem)))
    assert judged_s < 0.97 * alone_s


def test_candidates_that_move_homes_are_refused():
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=4, tokens_per_rank=64, micro_steps=1, num_layers=1)
    with pytest.raises(InputError, match="moves homes"):
        plan_judged(Problem.of(work, Cluster.preset("8xh100", 4)), candidates=[STRATEGIES["eplb-exact"]])
