"""Jobs of several EP groups and pipeline ranks, each of which has its own plan, and the slowest of these parts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.shown import seconds_words
from foremoe.machine.trainer import Trainer
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.planner.summary import PlanSummary
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import PipelineRank, on_pipeline
from foremoe.simulate.runs import StageRuns, run_pipeline, stage_gains
from foremoe.simulate.step import head_seconds
from foremoe.solvers.home.keep import Keep
from foremoe.workload.skew import mean_skew

# Letters: L layers, E experts.


class JobPart(NamedTuple):
    """One part of a job: a pipeline rank of an EP group, with its plan and its simulated stage.

    Attributes:
        group: Index of the EP group.
        pipeline_rank: Index of the rank in the pipeline.
        problem: The layers of this pipeline rank, with the load of the EP group.
        plan: Plan for this problem.
        summary: Statistics of planning.
        runs: Results of simulating the stage, which include waits for other pipeline ranks.
    """

    group: int
    pipeline_rank: int
    problem: Problem
    plan: Plan
    summary: PlanSummary
    runs: StageRuns

    @property
    def name(self) -> str:
        """Name that the page shows for the part."""
        return f"EP group {self.group}, pipeline rank {self.pipeline_rank}"


def plan_job(
    groups: Sequence[Problem], planner: Planner, *, pp: int = 1, vpp: int = 1, history_LE: Array | None = None,
    trainer: Trainer | None = None, num_threads: int | None = None, progress: Callable[[str, int, int], None] | None = None,
) -> list[JobPart]:  # fmt: skip
    """Plans and simulates every pipeline rank of every EP group.

    Args:
        groups: One problem per EP group, with all layers, as in `simulate_systems`.
        planner: Planner without a home level, because a job's homes are chosen for all groups together.
        pp: Number of pipeline ranks, as in `simulate_systems`.
        vpp: Number of chunks per pipeline rank, as in `simulate_systems`.
        history_LE: Load of an earlier step in all layers, as in `Planner.plan`.
        trainer: Settings of the training around the stage, as in `simulate_systems`.
        num_threads: Number of planning threads. Defaults to all cores.
        progress: Callback that gets (name of the part, rows done, number of rows).

    Raises:
        InputError: The planner moves homes, or there are more pipeline ranks than layers.
    """
    if planner.home != Keep():
        raise InputError(
            f"{planner.home!r} moves homes of all EP groups at once; leave the home level out of a report on several groups."
        )
    trainer, out = trainer or Trainer(data_parallel=len(groups)), []
    for k, group in enumerate(groups):
        planned = []
        for s, problem in enumerate(on_pipeline(group, pp, vpp)):
            seen_LE = None if history_LE is None else history_LE[np.isin(group.moe_layer_L, problem.moe_layer_L)]
            report = None if progress is None else _progress_of(progress, k, s)
            planned.append((problem, *planner.plan(problem, history_LE=seen_LE, num_threads=num_threads, progress=report)))
        ranks = [PipelineRank(problem=problem, plan=plan) for problem, plan, _ in planned]
        runs = run_pipeline(ranks, outside_s_MG=head_seconds(group), trainer=trainer)
        out += [JobPart(k, s, *rank, run) for s, (rank, run) in enumerate(zip(planned, runs, strict=True))]
    return out


def _progress_of(progress: Callable[[str, int, int], None], group: int, rank: int) -> Callable[[int, int], None]:
    return lambda done, total: progress(f"EP group {group}, pipeline rank {rank}", done, total)


def slowest_part(parts: Sequence[JobPart]) -> int:
    """Returns the index of the slowest part: the one with the smallest bubble in the EP group with the longest stage."""
    longest = max(range(len(parts)), key=lambda i: parts[i].runs.gains()["planned_s"])
    group = [i for i, part in enumerate(parts) if part.group == parts[longest].group]
    return min(group, key=lambda i: parts[i].runs.planned.parts.bubble_s)


def slowest_words(parts: Sequence[JobPart], slowest: int) -> str:
    """Returns a sentence that names the slowest part, or an empty string if there is only one part."""
    part = parts[slowest]
    if len(parts) == 1:
        return ""
    waits_s = part.runs.planned.parts.bubble_s
    return f"Slowest of {len(parts)} parts: {part.name}, which itself waits {seconds_words(waits_s)} for its pipeline."


def job_gains(parts: Sequence[JobPart]) -> dict[str, float]:
    """Returns the result of `StageRuns.gains` for the whole job. The slowest EP group determines the length of the stage."""
    gains = [part.runs.gains() for part in parts]
    static_s, planned_s, balanced_s = (max(gain[name] for gain in gains) for name in ("static_s", "planned_s", "balanced_s"))
    return stage_gains(static_s, planned_s, balanced_s, parts[0].runs.trainer)


def job_facts(parts: Sequence[JobPart]) -> dict[str, Any]:
    """Returns the page's table of all parts of the job, as plain values."""
    lines = []
    for part in parts:
        seconds = part.runs.parts()
        lines.append({
            "group": part.group, "pipeline_rank": part.pipeline_rank, "layers": _ranges(part.plan.header.moe_layer_L),
            "skew_static": mean_skew(part.problem.static().load_NG()), "skew_planned": part.plan.skew_mean,
            "static_busy_s": sum(seconds["static"].values()) - seconds["static"]["bubble_s"], "planned": seconds["planned"],
        })  # fmt: skip
    return {"parts": lines, "slowest": slowest_part(parts)}


def _ranges(numbers: Array) -> str:
    """Formats numbers as ranges, such as ``0 to 11, 24 to 35``."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
