"""PlanSummary: statistics of planning. The plan itself contains only values that its input determines."""

import logging
import time
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import compile_seconds
from foremoe.base.shown import seconds_words, table
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.workload.skew import mean_skew

# Letters: N rows.

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelSummary:
    """Statistics of one rank solver, or of the start, in one run of the planner.

    Attributes:
        solver: Repr of the solver, or "start" for the placement that planning started from.
        seconds: Wall time in seconds of the solver and of splitting its quotas.
        cpu_s: CPU time in seconds of the calling thread. With one planning thread, this is the CPU time of the whole level.
        skew_mean: Mean skew of the best placements after the level, computed from the load that the level saw.
        objective_sum: Sum of the objective over all rows.
        rows_improved: Number of rows in which the result of this level beats the start.
    """

    solver: str
    seconds: float
    cpu_s: float
    skew_mean: float
    objective_sum: float
    rows_improved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSummary:
    """Statistics of planning that the input does not determine, such as times.

    Attributes:
        plan_s: Wall time of planning in seconds, without `compile_s`.
        levels: `LevelSummary` of the start and of every rank solver, in order.
        rows: Number of planned rows.
        rows_kept_at_start: Number of rows in which no level beat the start, or 0 without the guard.
        stops: Number of rows per `Stop` that ended their search, keyed by its name.
        warnings: Warnings for the user, one sentence each.
        unknown_share: Share of all tokens' pairs that are missing in the load because their routing is unknown. It is 0 if the
            number of tokens is unknown.
        compile_s: Wall time of compilation in seconds. It is zero if this machine has compiled the solvers before (see
            `foremoe.warm_up`).
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

    def _repr_html_(self) -> str:
        shown = {"planning": f"{seconds_words(self.plan_s)} for {self.rows} rows"}
        for i, level in enumerate(self.levels):
            gain = f"skew mean {level.skew_mean:.3f}, {level.rows_improved} rows improved, {seconds_words(level.seconds)}"
            shown[f"level {i}"] = f"{level.solver}: {gain}"
        shown |= {"search ended by": ", ".join(f"{name} ({rows} rows)" for name, rows in self.stops.items())}
        return table("PlanSummary", shown | {f"warning {i}": text for i, text in enumerate(self.warnings, 1)})

    def log_warnings(self) -> None:
        """Logs `warnings`. This method is for callers that do not show the summary."""
        for text in self.warnings:
            _logger.warning("the plan differs from what was requested: %s", text)


def unknown_share(problem: Problem) -> float:
    """Returns the share of all tokens' pairs that are missing in the load, or 0 if the number of tokens is unknown."""
    tokens = 0 if problem.tokens_MG is None else int(problem.tokens_MG.sum(dtype=np.int64))
    pairs = tokens * problem.L * problem.model.num_topk
    return max(0.0, 1.0 - int(problem.load_MLE.sum(dtype=np.int64)) / pairs) if pairs else 0.0


class Stopwatch:
    """Measures wall time and CPU time of the calling thread since the stopwatch was created, without the time of compilation."""

    def __init__(self) -> None:
        self._begin = time.perf_counter(), time.thread_time(), *compile_seconds()

    def spent(self) -> tuple[float, float]:
        """Returns the wall time and the CPU time so far, in seconds."""
        wall_s, cpu_s, wall_compile_s, cpu_compile_s = self._begin
        now = compile_seconds()
        wall_compile_s, cpu_compile_s = now[0] - wall_compile_s, now[1] - cpu_compile_s
        return time.perf_counter() - wall_s - wall_compile_s, time.thread_time() - cpu_s - cpu_compile_s

    def compile_s(self) -> float:
        """Returns the wall time of compilation so far, in seconds."""
        return compile_seconds()[0] - self._begin[2]


def level_summary(
    solver: str, spent: tuple[float, float], problem: Problem, placement: Placement, objective_N: Array, improved: int
) -> LevelSummary:
    """Returns the summary of one level, computed from the best placements after this level has run."""
    return LevelSummary(
        solver=solver, seconds=spent[0], cpu_s=spent[1], skew_mean=mean_skew(placement.load_NG()),
        objective_sum=float(objective_N.sum()), rows_improved=improved,
    )  # fmt: skip


def count_stops(stop_ML: Array) -> dict[str, int]:
    """Returns the number of rows per `Stop`, keyed by its name. Names that do not occur are left out."""
    return {stop.name: int((stop_ML == stop).sum()) for stop in Stop if (stop_ML == stop).any()}
