"""Checks of a solver's result before compiled code reads it. An unusable result raises an error that names the solver."""

import dataclasses
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.errors import InputError, PlanError
from foremoe.levels import HomeSolver, PathSolver, RankSolver, SplitSolver
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.problem.laws import placement_violations, slot_violations
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, S slots, L layers, E experts, M micro-steps.


def slots_of(solver: RankSolver, problem: Problem, placement: Any) -> Placement:
    """Returns the placement of a rank solver after a check that its slots exist. Quotas may still be missing or wrong."""
    if not isinstance(placement, Placement):
        raise PlanError("slots", "", f"{solver!r} must return a Placement; got {type(placement).__name__}.")
    refuse(solver, slot_violations(placement.expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L))
    return placement


def placement_of(solver: RankSolver, problem: Problem, placement: Any, keeps_homes: bool) -> Placement:
    """Returns the placement of a rank solver after a check of all laws of placements."""
    if not isinstance(placement, Placement):
        raise PlanError("slots", "", f"{solver!r} must return a Placement; got {type(placement).__name__}.")
    refuse(solver, placement_violations(problem, placement, keeps_homes=keeps_homes))
    return placement


def quotas_of(split: SplitSolver, problem: Problem, expert_NGS: Array) -> Array:
    """Returns the quotas of the split level, int32 with the shape of the slots. Quotas are not checked against the load."""
    return _array(split, "quota", split.solve(problem, expert_NGS), "quota_NGS", expert_NGS.shape)


def homes_of(solver: HomeSolver, problem: Problem) -> Array:
    """Returns the permutations that the home level chooses, int32 [L, E], after a check."""
    home_LE = _array(solver, "homes", solver.solve(problem), "home_LE", (problem.L, problem.E))
    wrong_L = (np.sort(home_LE, axis=1) != np.arange(problem.E)).any(axis=1)
    if wrong_L.any():
        where = f"layer {int(np.argmax(wrong_L))}"
        raise PlanError("homes", where, f"{solver!r} must return a permutation of the {problem.E} home slots.")
    return home_LE


def linked(plan: Plan, path: PathSolver, problem: Problem) -> Plan:
    """Returns the plan with the links that the path level chooses for its copies, after a check of the plan."""
    given, found = plan.transfers, path.solve(problem, plan.transfers)
    if not isinstance(found, TransferList):
        raise PlanError("residency", "", f"{path!r} must return a TransferList; got {type(found).__name__}.")
    for name in TransferList.array_fields().keys() - {"link_C", "src_C"}:
        if not np.array_equal(getattr(given, name), getattr(found, name)):
            raise PlanError("residency", "", f"{path!r} may change only link_C and src_C; it changed {name}.")
    return valid(dataclasses.replace(plan, transfers=found))


def valid(plan: Plan) -> Plan:
    """Returns the plan after a check of its laws. The error for a broken law names the planner."""
    try:
        plan.check()
    except PlanError as error:
        raise PlanError(error.law, error.where, f"{plan.header.planner} made an invalid plan: {error.message}") from None
    return plan


def refuse(solver: RankSolver, broken: list[PlanError]) -> None:
    """Raises an error for the first of the broken laws. The error names the solver."""
    if broken:
        raise PlanError(broken[0].law, broken[0].where, f"{solver!r} returned an invalid placement: {broken[0].message}")


def _array(solver: Any, law: str, value: Any, name: str, shape: tuple[int, ...]) -> Array:
    try:
        return frozen_array(value, np.int32, name, shape)
    except InputError as error:
        raise PlanError(law, "", f"{solver!r} returned a result that cannot be read: {error}") from None
