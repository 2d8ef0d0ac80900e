"""PlanSummary: how planning went; the plan itself holds only what is a function of its input."""

import logging
import time
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import compile_seconds
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.workload.skew import mean_skew

# Letters: N rows.

_logger = logging.getLogger(__name__)


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
        plan_s: Wall seconds for the whole plan, without those of `compile_s`.
        levels: `LevelSummary` of the start and of every level, in order.
        rows_kept_at_start: Rows where no level beat the start (0 without the guard).
        stops: Rows by name of the `Stop` that ended them.
        warnings: Sentences for the user.
        unknown_share: Share of the tokens' pairs whose routing is not known: they are in no load. 0 where tokens are not counted.
        compile_s: Wall seconds that compiling took; zero once a machine has planned, see `foremoe.warm_up`.
    """

    plan_s: float
    levels: tuple[LevelSummary, ...]
    rows: int
    rows_kept_at_start: int
    stops: dict[str, int]
    warnings: tuple[str, ...]
    unknown_share: float = 0.0
    compile_s: float = 0.0

    def __repr__(self) -> str:
        skews = " -> ".join(f"{level.skew_mean:.3f}" for level in self.levels)
        return f"PlanSummary(plan_s={self.plan_s:.3g}, {self.rows} rows, skew {skews}, {len(self.warnings)} warnings)"

    def log_warnings(self) -> None:
        """Puts `warnings` into the log, where nobody else will read the summary."""
        for text in self.warnings:
            _logger.warning("a plan was made otherwise than asked: %s", text)


def unknown_share(problem: Problem) -> float:
    """Share of the tokens' pairs that are in no load; 0 where tokens are not counted."""
    tokens = 0 if problem.tokens_MG is None else int(problem.tokens_MG.sum(dtype=np.int64))
    pairs = tokens * problem.L * problem.model.num_topk
    return max(0.0, 1.0 - int(problem.load_MLE.sum(dtype=np.int64)) / pairs) if pairs else 0.0


class Stopwatch:
    """Wall time, and CPU time of the thread that reads it, since it was made, without the time of compiling."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), time.thread_time(), *compile_seconds()

    def spent(self) -> tuple[float, float]:
        """Wall seconds and CPU seconds."""
        wall_s, cpu_s, wall_compile_s, cpu_compile_s = self._begin
        now = compile_seconds()
        wall_compile_s, cpu_compile_s = now[0] - wall_compile_s, now[1] - cpu_compile_s
        return time.perf_counter() - wall_s - wall_compile_s, time.thread_time() - cpu_s - cpu_compile_s

    def compile_s(self) -> float:
        """Wall seconds of compiling."""
        return compile_seconds()[0] - self._begin[2]


def level_summary(
    solver: str, spent: tuple[float, float], problem: Problem, placement: Placement, objective_N: Array, improved: int
) -> LevelSummary:
    """The summary of one level, from what is kept after it."""
    return LevelSummary(
        solver=solver, seconds=spent[0], cpu_s=spent[1], skew_mean=mean_skew(placement.load_NG()),
        objective_sum=float(objective_N.sum()), rows_improved=improved,
    )  # fmt: skip


def count_stops(stop_ML: Array) -> dict[str, int]:
    """Rows by name of their `Stop`; only those that occur."""
    return {stop.name: int((stop_ML == stop).sum()) for stop in Stop if (stop_ML == stop).any()}
