"""Robust: replicas for loads that are foreseen as several scenarios."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from solver_util import balance, make_problem, problems, require_valid

import foremoe
from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Noisy, Rerouted, foreseen
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers import Eplb, ExactSplit, Robust, Search
from foremoe.synthetic.counts import synthetic_workload


def with_scenarios(load_XE: object, node_G: object, redundant: int, *, complete: bool) -> Problem:
    """One row that foresees these loads under the objective balance; the problem's load is their sum."""
    scenario_XMLE = np.asarray(load_XE, np.int32)[:, None, None]
    problem = balance(make_problem(scenario_XMLE.sum(axis=0), node_G, redundant))
    return dataclasses.replace(problem, scenario_XMLE=scenario_XMLE, scenarios_complete=complete)


def largest(problem: Problem, placement: Placement, load_E: Array) -> int:
    """The largest rank load when the one row turns out to have this load."""
    real = problem.with_load(np.asarray(load_E, np.int32)[None, None])
    return int(ExactSplit().solve(real, placement.expert_NGS).sum(axis=2).max())


def step_problem(redundant: int, micro_steps: int = 5, seed: int = 0, objective: str = "balance") -> Problem:
    """A synthetic step of 32 experts on 16 ranks in two nodes."""
    model = dataclasses.replace(foremoe.Model.preset("gpt-oss-20b"), num_layers=4)
    work = synthetic_workload(model, num_ranks=16, tokens_per_rank=2048, micro_steps=micro_steps, seed=seed, regime="mid")
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=16)
    return Problem.of(work, cluster, model=model, redundant=redundant, cost=foremoe.CostModel(objective=objective))


def skew(planner: Planner, problem: Problem) -> float:
    """Mean of largest over mean rank load, counted from quotas, without the first micro-step, of which nothing is known."""
    load_MLG = planner.plan(problem)[0].quota_MLGS.sum(axis=3)[1:]
    return float((load_MLG.max(axis=2) / load_MLG.mean(axis=2)).mean())


def test_scenarios_that_need_different_replicas_all_get_theirs():
    # Expert 0 is hot in one scenario, expert 2 in the other; each is alone with a cold one on its rank.
    loads = [[12, 2, 2, 0], [2, 0, 12, 2]]
    problem = with_scenarios(loads, [0, 0], 1, complete=True)
    placement = Robust().solve(problem, problem.static())
    assert placement.expert_NGS[0].tolist() == [[0, 1, 2], [2, 3, 0]]
    assert [largest(problem, placement, load_E) for load_E in loads] == [8, 8]
    # Planned for either alone, the other scenario is not balanced.
    alone = with_scenarios(loads[:1], [0, 0], 1, complete=True)
    assert largest(problem, Robust().solve(alone, alone.static()), loads[1]) == 14


def test_complete_scenarios_that_are_balanced_at_home_get_no_replicas_and_samples_do():
    loads = [[5, 3, 4, 4], [4, 4, 2, 6]]
    problem = with_scenarios(loads, [0, 0], 2, complete=True)
    assert (Robust().solve(problem, problem.static()).expert_NGS[..., 2:] == -1).all()
    samples = dataclasses.replace(problem, scenarios_complete=False)
    assert (Robust().solve(samples, samples.static()).expert_NGS[..., 2:] >= 0).all()


def test_under_time_slots_stay_empty_where_copies_save_nothing():
    problem = make_problem([[[400, 400, 400, 400]]], [0, 0], 2)
    for complete in (True, False):
        posed = dataclasses.replace(problem, scenario_XMLE=problem.load_MLE[None], scenarios_complete=complete)
        placement = Robust(noise=0.0).solve(posed, posed.static())
        assert (placement.expert_NGS[..., 2:] == -1).all()


def test_a_cold_expert_may_get_a_copy_unless_spread_is_zero():
    problem = balance(make_problem([[[90, 6, 0, 0]]], [0, 1], 2))
    quiet = Robust(spread=0.0).solve(problem, problem.static())
    assert quiet.expert_NGS[0, 1, 2:].tolist() == [0, 1] and (quiet.expert_NGS[0, 0, 2:] == -1).all()
    assert (Robust().solve(problem, problem.static()).expert_NGS[0, 0, 2:] == -1).all(), "nothing serves an expert without pairs"
    warm = balance(make_problem([[[90, 6, 2, 2]]], [0, 1], 2))
    assert sorted(Robust().solve(warm, warm.static()).expert_NGS[0, 0, 2:].tolist()) == [2, 3]


@given(problem=problems(), complete=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_placements_of_scenarios_are_valid(problem, complete, seed):
    rng = np.random.default_rng(seed)
    scenario_XMLE = rng.integers(0, 50, (3, *problem.load_MLE.shape)) * rng.integers(0, 2, (3, *problem.load_MLE.shape[:2], 1))
    posed = dataclasses.replace(problem, scenario_XMLE=scenario_XMLE, scenarios_complete=complete)
    for one in (posed, balance(posed)):
        require_valid(one, Robust().solve(one, one.static()))


def test_scenarios_of_foresight_are_what_has_been_and_what_the_step_holds():
    problem = step_problem(1, micro_steps=4)
    load_MLE = problem.load_MLE
    before = foreseen(problem, "previous", None)
    assert before.scenario_XMLE is not None and not before.scenarios_complete
    assert (before.scenario_XMLE[:, 0] == 0).all(), "nothing has been"
    assert (before.scenario_XMLE[0, 1] == load_MLE[0]).all() and (before.scenario_XMLE[1:, 1] == 0).all()
    assert (before.scenario_XMLE[:, 3] == load_MLE[[2, 1, 0]]).all()
    after = foreseen(problem, "previous", load_MLE[3]).scenario_XMLE
    assert after is not None and (after[0, 0] == load_MLE[3]).all() and (after[:2, 1] == load_MLE[[0, 3]]).all()
    step = foreseen(problem, "step", None)
    assert step.scenario_XMLE is not None and step.scenarios_complete
    assert all((step.scenario_XMLE[:, m] == load_MLE).all() for m in range(4))
    for view in ("exact", Noisy(0.3), Rerouted(0.3)):
        assert foreseen(problem, view, None).scenario_XMLE is None


def test_scenarios_must_fit_the_load():
    problem = step_problem(1, micro_steps=2)
    with pytest.raises(InputError, match="scenario_XMLE must have shape"):
        dataclasses.replace(problem, scenario_XMLE=problem.load_MLE[None, :1])


def test_one_placement_serves_all_micro_steps_of_a_step():
    for objective in ("balance", "time"):
        problem = foreseen(step_problem(2, objective=objective), "step", None)
        placement = Robust().solve(problem, problem.static())
        expert_MLGS = placement.expert_NGS.reshape(problem.M, problem.L, problem.G, problem.S)
        assert (expert_MLGS == expert_MLGS[:1]).all()


def test_the_default_rank_level_follows_foresight_and_a_given_one_stays():
    assert Planner().rank == Planner(foresight=Rerouted(0.1)).rank == (Search(),)
    for view in ("previous", "step", Noisy(0.1)):
        assert Planner(foresight=view).rank == (Robust(),)
        assert dataclasses.replace(Planner(), foresight=view).rank == (Robust(),)
        assert dataclasses.replace(Planner(foresight=view), foresight="exact").rank == (Search(),)
        assert Planner(rank=(Search(),), foresight=view).rank == (Search(),)
        assert foremoe.resolve(repr(Planner(foresight=view))) == Planner(foresight=view)


@pytest.mark.parametrize("view", ["previous", "step", Noisy(0.5)])
@pytest.mark.parametrize("redundant", [1, 2, 4])
def test_replicas_for_scenarios_balance_better_than_replicas_for_one_load(view, redundant):
    for seed in range(3):
        problem = step_problem(redundant, seed=seed)
        robust, one_load = (skew(Planner(rank=(solver,), foresight=view), problem) for solver in (Robust(), Search()))
        assert robust < one_load
        if redundant > 1:
            assert robust < 1.0 + 0.5 * (one_load - 1.0), "more slots are used"


def test_a_plan_for_a_foreseen_load_has_every_copy_that_was_made():
    problem = step_problem(2)
    seen = foreseen(problem, "previous", None)
    made = Robust().solve(seen, seen.static())
    plan, _ = Planner(foresight="previous").plan(problem)
    plan.check(problem)
    later = slice(problem.L, None)
    there_NGS = problem.load_NE[later][np.arange(problem.N - problem.L)[:, None, None], made.expert_NGS[later]] > 0
    assert (plan.expert_NGS[later] == np.where(there_NGS, made.expert_NGS[later], -1))[..., problem.B :].all()
    moved = Planner(rank=(Eplb(),), foresight="previous", guard=False).plan(problem)[0]
    assert not moved.executable, "what places experts anew has no copies to keep"


@pytest.mark.parametrize("seed", range(3))
def test_copies_that_serve_one_pair_cost_no_balance(seed):
    # So few pairs that one more on a full rank shows.
    model = dataclasses.replace(foremoe.Model.preset("gpt-oss-20b"), num_layers=4)
    work = synthetic_workload(model, num_ranks=16, tokens_per_rank=64, micro_steps=4, seed=seed, regime="mid")
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=16)
    problem = balance(Problem.of(work, cluster, model=model, redundant=6))
    plan = Planner(foresight="previous").plan(problem)[0]
    plan.check(problem)
    least_N = ExactSplit().solve(problem, plan.expert_NGS).sum(axis=2).max(axis=1)
    assert (plan.quota_NGS.sum(axis=2).max(axis=1) <= least_N).all()


def test_any_number_of_threads_gives_the_same_plan():
    for view in ("previous", "step"):
        problem = step_problem(2, micro_steps=80, objective="time")
        first = Planner(foresight=view).plan(problem, num_threads=1)[0]
        assert first.same_as(Planner(foresight=view).plan(problem, num_threads=3)[0])
