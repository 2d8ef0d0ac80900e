"""Plans with other numbers of redundant slots, scored like the plan of the report."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer
from foremoe.plan.figures import memory_figures, plan_fit
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.report.runs import end_seconds
from foremoe.simulate import head_seconds, simulate
from foremoe.solvers.home.keep import Keep


def what_if(
    problem: Problem, planner: Planner, redundant: Sequence[int] = (0, 1, 2, 4), *, history_LE: Array | None = None,
    trainer: Trainer | None = None, num_threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Plans `problem` with each of these numbers of redundant slots per rank.

    Args:
        redundant: Values of R, each from 0 to the number of experts.
        history_LE: As for `Planner.plan`.
        trainer: As for `rank_memory`.
        progress: Called with (what, rows done, number of rows).

    Returns:
        One dict per R: ``redundant``, ``skew_mean``, ``skew_p99``, ``skew_ML`` (float64 [M, L]),
        ``replicas_per_rank`` (mean per row), ``peak_bytes`` (of the fullest rank), ``peak_bytes_with_reforward``, ``fits``,
        ``simulated_stage_s`` and ``parts`` (its seconds by part).
    """
    # The problem's homes are decided, whatever R they were decided for.
    settled = dataclasses.replace(planner, home=Keep())
    head_s_MG, ends_s = head_seconds(problem), end_seconds(problem, trainer or Trainer())
    rows = []
    for slots in redundant:
        varied = dataclasses.replace(problem, redundant=slots)
        report = None if progress is None else lambda done, total, slots=slots: progress(f"R = {slots}", done, total)  # type: ignore[misc]
        plan, _ = settled.plan(varied, history_LE=history_LE, num_threads=num_threads, progress=report)
        row = {
            "redundant": slots, "skew_ML": plan.skew_ML, "skew_mean": plan.skew_mean,
            "skew_p99": float(np.quantile(plan.skew_ML, 0.99)),
            "replicas_per_rank": plan.num_replicas / (plan.N * plan.G), **memory_figures(plan_fit(varied, plan, trainer)),
        }  # fmt: skip
        parts = simulate(varied, plan, outside_s_MG=head_s_MG).parts.to_dict() | ends_s
        rows.append(row | {"simulated_stage_s": sum(parts.values()), "parts": parts})
    return rows
