"""What solvers, users and files answer is refused in one sentence; read unchecked, the first four killed the interpreter."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, PlanError
from foremoe.levels import HomeSolver, PathSolver, RankSolver, SplitSolver
from foremoe.plan.transfers import TransferList
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate
from foremoe.solvers import ExactSplit, Search
from foremoe.testing.samples import many_row_problem, random_sources

# Pairs so dear that replicas pay for loads so small.
POSED = dataclasses.replace(many_row_problem(16), cost=CostModel())
POSED = dataclasses.replace(POSED, cluster=dataclasses.replace(POSED.cluster, pair_overhead_s=1e-5))
PROBLEM = dataclasses.replace(POSED, load_MLGE=random_sources(POSED, np.random.default_rng(0)))


def beyond(expert_NGS: Array) -> Array:
    """An expert number one too large."""
    found = expert_NGS.copy()
    found[0, 0, 0] = PROBLEM.E
    return found


def answering(level: type, answer: Any) -> Any:
    body = {"solve": lambda self, *given: answer(*given), "__repr__": lambda self: "Mine()"}
    return type("Mine", (level,), body)()


def rank(answer: Any) -> Any:
    return lambda: Planner(rank=(answering(RankSolver, answer),)).plan(PROBLEM)


def path(answer: Any) -> Any:
    return lambda: Planner(path=answering(PathSolver, answer)).plan(PROBLEM)


STATIC = PROBLEM.static()
OTHER_SOURCE = "may change only link_C and src_C; it changed need_C"

REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "a rank level loses pairs": (
        rank(lambda p, s: Placement(expert_NGS=s.expert_NGS, quota_NGS=np.maximum(s.quotas_NGS - 1, 0))),
        PlanError,
        r"Mine\(\) returned an invalid placement",
    ),
    "what is split are fractions": (
        lambda: ExactSplit().solve(PROBLEM, STATIC.expert_NGS.astype(float)),
        PlanError,
        "expert_NGS is float64 of shape",
    ),
    "what is split is a list": (lambda: ExactSplit().solve(PROBLEM, [1]), PlanError, "got list"),  # type: ignore[arg-type]
    "a solver is given such a start": (
        lambda: Search().solve(PROBLEM, dataclasses.replace(STATIC, expert_NGS=beyond(STATIC.expert_NGS))),
        InputError,
        "the start is not valid",
    ),
    "a plan of other slots is simulated": (
        lambda: simulate(dataclasses.replace(PROBLEM, redundant=2), Planner().plan(PROBLEM)[0]),
        InputError,
        "slots per rank 3 and the problem 4",
    ),
    "a rank level returns no placement": (rank(lambda p, s: s.expert_NGS), PlanError, "must return a Placement; got ndarray"),
    "a rank level has reasons of its own to stop": (
        rank(lambda p, s: dataclasses.replace(s, stop_N=np.full(p.N, 200))),
        PlanError,
        "200 is not a code of Stop",
    ),
    "a rank level proves infinity": (
        rank(lambda p, s: dataclasses.replace(s, bound_N=np.full(p.N, np.inf))),
        PlanError,
        "the bound is infinite",
    ),
    "a split level returns fractions": (
        lambda: Planner(split=answering(SplitSolver, lambda p, e: np.full(e.shape, 0.5))).plan(PROBLEM),
        PlanError,
        "whole numbers",
    ),
    "a split level returns too few rows": (
        lambda: Planner(split=answering(SplitSolver, lambda p, e: ExactSplit().solve(p, e)[1:])).plan(PROBLEM),
        PlanError,
        r"Mine\(\) .* must have shape \[16, 4, 3\]; got \[15, 4, 3\]",
    ),
    "a home level gives a slot to all": (
        lambda: Planner(home=answering(HomeSolver, lambda p: np.zeros((p.L, p.E), np.int32))).homes(PROBLEM),
        PlanError,
        "permutation",
    ),
    "a path level returns none": (path(lambda p, t: None), PlanError, "must return a TransferList; got NoneType"),
    "a path level loses copies": (path(lambda p, t: TransferList.none()), PlanError, "may change only link_C and src_C"),
    "a path level moves a need": (path(lambda p, t: t.replace(need_C=t.need_C + 1)), PlanError, OTHER_SOURCE),
    "a path level takes weights from anywhere": (
        path(lambda p, t: t.replace(src_C=(t.src_C + 1) % p.G, link_C=t.link_C * 0)),
        PlanError,
        r"\[residency\].*made an invalid plan",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_in_one_sentence(case: str) -> None:
    do, error, sentence = REFUSED[case]
    with pytest.raises(error, match=sentence):
        do()


def test_what_no_bound_proves_is_not_called_optimal() -> None:
    def boast(problem: Problem, start: Placement) -> Placement:
        return dataclasses.replace(Search().solve(problem, start), stop_N=np.full(problem.N, Stop.OPTIMAL))

    plan, _ = Planner(rank=(answering(RankSolver, boast),)).plan(PROBLEM)
    proven_ML = plan.objective_ML <= plan.bound_ML * (1 + 1e-5)
    assert not proven_ML.all() and ((plan.stop_ML == Stop.OPTIMAL) <= proven_ML).all()
