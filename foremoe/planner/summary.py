"""PlanSummary: how planning went; the plan itself holds only what is a function of its input."""

from __future__ import annotations

import time
from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.workload.skew import skew

# Letters: N rows.


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """One level's part in a plan.

    Attributes:
        solver: Its repr, or "start".
        seconds: Wall time of the solver and its split.
        cpu_s: CPU time of the calling thread; with one thread, all of it.
        skew_mean: Mean skew of what is kept after the level, on the load that it saw.
        objective_sum: Sum of the objective over the same rows.
        rows_improved: Rows where the level's own output beats the start.
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
        plan_s: Wall seconds for the whole plan.
        levels: `LevelSummary` of the start and of every level, in order.
        rows: Number of rows.
        rows_kept_at_start: Rows where no level beat the start (0 without the guard).
        stops: Rows by name of the `Stop` that ended them.
        warnings: Sentences for the user.
    """

    plan_s: float
    levels: tuple[LevelSummary, ...]
    rows: int
    rows_kept_at_start: int
    stops: dict[str, int]
    warnings: tuple[str, ...]


class Stopwatch:
    """Wall time, and CPU time of the thread that reads it, since it was made."""

    def __init__(self) -> None:
        self._wall_s, self._cpu_s = time.perf_counter(), time.thread_time()

    def spent(self) -> tuple[float, float]:
        """Wall seconds and CPU seconds."""
        return time.perf_counter() - self._wall_s, time.thread_time() - self._cpu_s


def level_summary(
    solver: str, spent: tuple[float, float], problem: Problem, placement: Placement, objective_N: Array, improved: int
) -> LevelSummary:
    """The summary of one level, from what is kept after it."""
    skew_N = skew(placement.load_NG())
    return LevelSummary(
        solver=solver, seconds=spent[0], cpu_s=spent[1], skew_mean=float(skew_N.mean()),
        objective_sum=float(objective_N.sum()), rows_improved=improved,
    )  # fmt: skip


def count_stops(stop_ML: Array) -> dict[str, int]:
    """Rows by name of their `Stop`; only those that occur."""
    return {stop.name: int((stop_ML == stop).sum()) for stop in Stop if (stop_ML == stop).any()}
