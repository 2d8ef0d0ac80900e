"""PlanSummary: how planning went, beside the plan; the plan itself holds only what is a function of its input."""

from __future__ import annotations

from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.workload.skew import skew

# Letters: N rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """One level's part in a plan: mean skew and summed objective of what is kept after it (on the load it saw), and in how many
    rows its own output beats the start.

    `seconds` is wall time and `cpu_s` the calling thread's CPU time of the solver and its split: with one thread, all of it.
    """

    solver: str
    seconds: float
    cpu_s: float
    skew_mean: float
    objective_sum: float
    rows_improved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """Everything about planning that is not a function of the input.

    Attributes:
        plan_s: wall seconds for the whole plan.
        levels: `LevelSummary` of the start and of every level, in order.
        rows: number of rows.   rows_kept_at_start: rows where no level beat the start (0 without the guard).
        stops: how many rows stopped for which `Stop`.
        warnings: sentences for the user.
    """

    plan_s: float
    levels: tuple[LevelSummary, ...]
    rows: int
    rows_kept_at_start: int
    stops: dict[str, int]
    warnings: tuple[str, ...]


def level_summary(
    solver: str, spent: tuple[float, float], problem: Problem, placement: Placement, objective_N: Array, improved: int
) -> LevelSummary:
    """The report of one level, from what is kept after it."""
    skew_N = skew(placement.load_NG())
    return LevelSummary(
        solver=solver, seconds=spent[0], cpu_s=spent[1], skew_mean=float(skew_N.mean()),
        objective_sum=float(objective_N.sum()), rows_improved=improved,
    )  # fmt: skip
