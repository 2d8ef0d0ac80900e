"""Report: how planning went, beside the plan; the plan itself holds only what is a function of its input."""

from __future__ import annotations

from dataclasses import dataclass

from foremoe.arrays import Array
from foremoe.placement import Placement, skew
from foremoe.problem import Problem

# Letters: N rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelReport:
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
class Report:
    """Everything about planning that is not a function of the input.

    Attributes:
        plan_s: wall seconds for the whole plan.
        levels: `LevelReport` of the start and of every level, in order.
        rows: number of rows.   rows_kept_at_start: rows where no level beat the start (0 without the guard).
        stops: how many rows stopped for which `Stop`.
        warnings: sentences for the user.
    """

    plan_s: float
    levels: tuple[LevelReport, ...]
    rows: int
    rows_kept_at_start: int
    stops: dict[str, int]
    warnings: tuple[str, ...]


def level_report(
    solver: str, spent: tuple[float, float], problem: Problem, placement: Placement, objective_N: Array, improved: int
) -> LevelReport:
    """The report of one level, from what is kept after it."""
    skew_N = skew(placement.load_NG())
    return LevelReport(
        solver=solver, seconds=spent[0], cpu_s=spent[1], skew_mean=float(skew_N.mean()),
        objective_sum=float(objective_N.sum()), rows_improved=improved,
    )  # fmt: skip
