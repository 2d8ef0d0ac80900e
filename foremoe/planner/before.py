"""What comes before planning: one problem of a whole step, and whether a problem's batch and homes are a planner's own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from foremoe.base.errors import InputError
from foremoe.levels import HomeSolver, PackSolver
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.home.keep import Keep
from foremoe.workload.packing import AsGiven


def whole_step(problems: Sequence[Problem]) -> Problem:
    """One problem with the micro-steps of all stages, for the home level."""
    if not problems:
        raise InputError("homes needs at least one problem.")
    first = problems[0]
    for other in problems[1:]:
        if (other.L, other.E, other.G) != (first.L, first.E, first.G):
            raise InputError(
                f"homes are decided for one set of layers, experts and ranks; got {first.L}, {first.E}, {first.G} and"
                f" {other.L}, {other.E}, {other.G}."
            )
    if len(problems) == 1:
        return first
    arrays = Problem.join_arrays(problems, "M")
    return dataclasses.replace(first, schedule=Schedule.plain(first.stage, len(arrays["load_MLE"])), **arrays)


def pack_that_ran(pack: PackSolver, problem: Problem) -> PackSolver:
    """`pack`, or `AsGiven()` where nothing says how the load was dealt; raises InputError if another one dealt this problem."""
    if problem.dealt is None:
        return AsGiven()
    if pack != AsGiven() and problem.dealt.packer != repr(pack):
        raise InputError(
            f"{problem.dealt.packer} dealt this problem, not pack={pack!r}; deal it with Planner.workload, or leave pack out."
        )
    return pack


def require_decided(home: HomeSolver, problem: Problem) -> None:
    """Raises InputError if homes are still in order and `home` would move experts: it has not run."""
    if home == Keep() or (problem.home_LE != np.arange(problem.E)).any():
        return
    moved = int((home.solve(problem) != problem.home_LE).sum())
    if moved:
        raise InputError(
            f"home={home!r} has not run: it would move {moved} experts; decide homes with Planner.homes and give them to the"
            " problem as home_LE, or leave home out."
        )
