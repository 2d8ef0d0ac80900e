"""Every valid plan passes the check, and every law catches a plan that was broken in the one way it forbids."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from mutations import BREAKS, Breaker, copying_plans

from foremoe.base.errors import PlanError
from foremoe.plan.plan import Plan
from foremoe.problem.laws import placement_violations
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.testing.pasteable import describe
from foremoe.testing.samples import plan_of
from foremoe.testing.strategies import placements, plans, problems

# Many breaks share the profile's examples.
some = settings(max_examples=max(10, settings.default.max_examples // 3))

# What a break needs of the problem and of the plan to find a place for it.
EMPTY_SLOTS = {"density": 0.6, "min_redundant": 2}
NEEDS: dict[str, dict[str, Any]] = {
    "empty_slot_with_quota": EMPTY_SLOTS,
    "home_moved": {"density": 0.2},
    "replica_on_its_home_rank": EMPTY_SLOTS,
    "twice_on_a_rank": EMPTY_SLOTS,
    "replica_without_quota": {**EMPTY_SLOTS, "slot_depth": 2, "min_ranks": 3},
    "unknown_expert": EMPTY_SLOTS,
    "replica_across_nodes": {"density": 0.3, "min_redundant": 2, "min_ranks": 3, "replicas": ("node",)},
    "into_a_slot_that_holds_another": {"min_redundant": 2},
    "lands_before_its_buffer_was_used": {"slot_depth": 1},
    "two_copies_into_one_buffer": {"min_redundant": 2, "min_ranks": 3},
    "weights_from_a_rank_that_received_them": {"min_ranks": 3, "max_base": 1, "max_redundant": 1},
}


@given(st.data())
def test_valid_plans_pass(data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    plan = data.draw(plans(problem))
    assert plan.violations() == [] and plan.violations(problem) == []
    plan.check(problem)


@given(st.data())
def test_valid_placements_pass_and_plans_hold_them_unchanged(data: st.DataObject) -> None:
    problem = data.draw(problems())
    note(describe(problem))
    placement = data.draw(placements(problem))
    assert placement_violations(problem, placement) == []
    plan = plan_of(problem, placement)
    assert (plan.expert_NGS == placement.expert_NGS).all() and (plan.quota_NGS == placement.quotas_NGS).all()


@some
@pytest.mark.parametrize("break_one", BREAKS, ids=lambda f: f.__name__)
@given(data=st.data())
def test_each_broken_law_is_named(break_one: Callable[[Breaker], Plan], data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans(**NEEDS.get(break_one.__name__, {})))
    assert plan.violations(problem) == []
    broken = break_one(Breaker(problem, plan, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))))
    found = broken.violations()
    assert {error.law for error in found} == {BREAKS[break_one]}
    with pytest.raises(PlanError, match=rf"\[{BREAKS[break_one]}\]"):
        broken.check()
    assert all(len(str(error)) < 300 for error in found)


# A plan of one problem against another: the law is "problem".

OTHERS: dict[str, Callable[[Problem], dict[str, Any]]] = {
    "load": lambda p: {"load_MLE": p.load_MLE + 1, "load_MLGE": None},
    "homes": lambda p: {"home_LE": np.roll(p.home_LE, 1, axis=1)},
    "layer numbers": lambda p: {"moe_layer_L": p.moe_layer_L + 1},
    "cluster": lambda p: {"cluster": dataclasses.replace(p.cluster, peer_bytes_per_s=7e9)},
    "model": lambda p: {"model": dataclasses.replace(p.model, ffn_size=99)},
    "schedule": lambda p: {"schedule": dataclasses.replace(p.schedule, reforward=not p.schedule.reforward, block_L=None)},
    "slot depth": lambda p: {"slot_depth": 9},
    "redundant slots": lambda p: {"redundant": p.redundant + 1},
    "replica limit": lambda p: {"replicas": "node"},
}


@some
@pytest.mark.parametrize("name", OTHERS)
@given(data=st.data())
def test_a_plan_of_another_problem_is_named(name: str, data: st.DataObject) -> None:
    problem = data.draw(problems(min_ranks=2, max_ranks=3, min_redundant=1, max_redundant=1, replicas=("any",), slot_depth=3))
    note(describe(problem))
    plan = data.draw(plans(problem))
    other = dataclasses.replace(problem, **OTHERS[name](problem))
    assert plan.violations(problem) == []
    assert {error.law for error in plan.violations(other)} == {"problem"}


def test_a_plan_that_moves_homes_has_no_transfers() -> None:
    problem, plan = _some_plan()
    moved = dataclasses.replace(plan, header=dataclasses.replace(plan.header, keeps_homes=False))
    assert len(plan.transfers) > 0
    assert [error.law for error in moved.violations()] == ["residency"]
    assert moved.rederived().violations(problem) == []


def test_placements_of_the_wrong_shape_or_without_quotas_are_named() -> None:
    problem, plan = _some_plan()
    fewer = Placement(expert_NGS=plan.expert_NGS[1:], quota_NGS=plan.quota_NGS[1:])
    assert [error.law for error in placement_violations(problem, fewer)] == ["slots"]
    assert [error.law for error in placement_violations(problem, Placement(expert_NGS=plan.expert_NGS))] == ["tokens"]


def test_a_few_places_are_shown_and_the_rest_counted() -> None:
    _, plan = _some_plan()
    none = dataclasses.replace(plan, quota_MLGS=plan.quota_MLGS * 0, bound_ML=plan.bound_ML * 0, load_bound_ML=plan.bound_ML * 0)
    found = [error for error in none.violations() if error.law == "tokens"]
    assert len(found) == 4 and "more places" in str(found[0])
    assert "micro-step 0, layer 0, expert" in found[0].where


def _some_plan() -> tuple[Problem, Plan]:
    """A plan of some rows, all with copies."""
    from foremoe.testing.samples import many_row_problem, random_placement

    problem = many_row_problem(40)
    return problem, plan_of(problem, random_placement(problem, np.random.default_rng(0), density=1.0))
