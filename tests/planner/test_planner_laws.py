"""Laws 4, 6 and 7 and exactness, for the planner with every built-in solver that claims them."""

import dataclasses
import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from profiles import examples

import foremoe.solvers
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.bounds import row_bound
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import Exact, Keep, RankSolver
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import many_row_problem, random_placement
from foremoe.testing.strategies import placements, plans, problems

SMALL: dict[str, Any] = {"max_ranks": 4, "max_base": 2, "max_redundant": 2, "max_micro_steps": 2, "max_layers": 2}
TINY: dict[str, Any] = {
    **SMALL,
    "min_ranks": 2,
    "max_ranks": 3,
    "min_redundant": 1,
    "max_pairs": 12,
    "max_layers": 1,
    "objectives": ("balance",),
}
# Ten strategies share the profile's examples.
some = settings(max_examples=max(10, settings.default.max_examples // 2))
CLOSE = 1.0 + 1e-9  # costs are sums of floats


def runnable(solver: RankSolver) -> bool:
    return all(importlib.util.find_spec(name) for name in solver.requires)


def built_in_solvers() -> list[RankSolver]:
    """Every rank-level solver of the package with its default configuration."""
    types = [getattr(foremoe.solvers, name) for name in foremoe.solvers.__all__]
    ranks = [t for t in types if issubclass(t, RankSolver) and not t.__abstractmethods__]
    return [solver for solver in (t() for t in ranks) if runnable(solver)]


SOLVERS = built_in_solvers()
FAST = [solver for solver in SOLVERS if not solver.exact]
RUNNABLE = {
    name: planner for name, planner in STRATEGIES.items() if all(runnable(s) for s in planner.rank) and planner.home == Keep()
}
needs_scip = pytest.mark.skipif(importlib.util.find_spec("pyscipopt") is None, reason="exact needs pyscipopt")


def objective_N(problem: Problem, plan: Plan) -> np.ndarray:
    """The plan's objective, priced anew."""
    return row_objective(problem, plan.placement)


def guarded(planner: Planner) -> Planner:
    return dataclasses.replace(planner, guard=True, foresight="exact")


@pytest.mark.parametrize("name", RUNNABLE)
@some
@given(data=st.data())
def test_every_strategy_makes_valid_plans_and_bounds_hold(name: str, data: st.DataObject) -> None:
    problem = data.draw(problems(**TINY if name == "exact" else SMALL))
    note(describe(problem))
    plan, _ = RUNNABLE[name].plan(problem, num_threads=1)
    plan.check(problem)
    assert plan.executable == RUNNABLE[name].keeps_homes
    np.testing.assert_allclose(plan.objective_ML.ravel(), objective_N(problem, plan), rtol=1e-12)


# The guard knows nothing of solvers but whether they move homes; from a start, below, all are tried.
@pytest.mark.parametrize("name", [name for name in ("foremoe", "eplb-exact", "exact") if name in RUNNABLE])
@some
@given(data=st.data())
def test_with_the_guard_no_row_is_worse_than_static(name: str, data: st.DataObject) -> None:
    problem = data.draw(problems(**TINY if name == "exact" else SMALL))
    note(describe(problem))
    plan, _ = guarded(RUNNABLE[name]).plan(problem, num_threads=1)
    assert (objective_N(problem, plan) <= row_objective(problem, problem.static())).all()


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "exact"])
@some
@given(data=st.data())
def test_with_the_guard_no_row_is_worse_than_static_or_its_start_on_the_new_load(name: str, data: st.DataObject) -> None:
    problem = data.draw(problems(**SMALL))
    note(describe(problem))
    earlier = data.draw(plans(problem))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    load_MLE = rng.permuted(problem.load_MLE, axis=2)
    later = dataclasses.replace(problem, load_MLE=load_MLE, load_MLGE=None)
    # What the start is worth on the new load: its replicas, with quotas split anew, and nothing else done.
    planner = guarded(RUNNABLE[name])
    start, _ = dataclasses.replace(planner, rank=()).plan(later, earlier, num_threads=1)
    plan, _ = planner.plan(later, earlier, num_threads=1)
    assert (objective_N(later, plan) <= objective_N(later, start)).all()
    assert (objective_N(later, plan) <= row_objective(later, later.static())).all()
    plan.check(later)


@given(st.data())
def test_a_bad_start_still_gives_no_row_worse_than_static(data: st.DataObject) -> None:
    problem = data.draw(problems(**SMALL))
    note(describe(problem))
    plan, _ = Planner().plan(problem, data.draw(placements(problem)), num_threads=1)
    assert (objective_N(problem, plan) <= row_objective(problem, problem.static())).all()


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name != "exact"])
def test_any_number_of_threads_gives_the_same_plan(name: str) -> None:
    problem = many_row_problem(600)
    first, *others = (RUNNABLE[name].plan(problem, num_threads=threads)[0] for threads in (1, 2, 5))
    assert all(first.same_as(other) for other in others)


@given(st.data())
def test_saving_then_loading_is_identity(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    plan = data.draw(plans(problem))
    path = tmp_path_factory.mktemp("plans") / "plan.safetensors"
    plan.save(path)
    written = path.read_bytes()
    loaded = Plan.load(path)
    assert loaded.same_as(plan)
    loaded.check(problem)
    loaded.save(path)
    assert path.read_bytes() == written


@pytest.mark.heavy
@needs_scip
@examples(15)
@given(data=st.data())
def test_bound_exact_and_every_other_solver_stand_in_order(data: st.DataObject) -> None:
    problem = data.draw(problems(**TINY))
    note(describe(problem))
    exact, _ = Planner(rank=(Exact(),)).plan(problem, num_threads=1)
    exact_N, bound_N = objective_N(problem, exact), exact.bound_ML.ravel()
    assert (row_bound(problem) <= exact_N * CLOSE).all() and (bound_N <= exact_N * CLOSE).all()
    # Rows that a node limit cut short prove nothing about other solvers; their bound still does.
    optimal_N = exact.stop_ML.ravel() == foremoe.Stop.OPTIMAL
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    others = {repr(solver): Planner(rank=(solver,), guard=False) for solver in FAST if solver.keeps_homes}
    found = {name: objective_N(problem, planner.plan(problem, num_threads=1)[0]) for name, planner in others.items()}
    found["random"] = row_objective(problem, random_placement(problem, rng, evenness=20.0))
    for name, other_N in found.items():
        assert (exact_N <= other_N)[optimal_N].all(), name
        assert (bound_N <= other_N * CLOSE).all(), name
