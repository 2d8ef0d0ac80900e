"""Further parts of a report: a comparison of strategies on the same case, and jobs with several EP groups or pipeline ranks."""

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import Any

import click

from foremoe.base.errors import InputError
from foremoe.cli.inputs import build_groups
from foremoe.cli.options import CaseOptions
from foremoe.cli.progress import Progress
from foremoe.cli.reported import Shown, source_of
from foremoe.cli.texts import in_options, planner_of
from foremoe.machine.trainer import Trainer
from foremoe.planner.comparison import compare
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.report import plan_job, write_job_report
from foremoe.simulate.runs import Judge
from foremoe.simulate.systems import BALANCED, System, simulate_systems
from foremoe.workload.packing import AsGiven


def report_job(
    options: CaseOptions, name: str, sizes: tuple[int, int, int], planners: Mapping[str, Planner], threads: int | None,
    output: str, command: str,
) -> list[str]:  # fmt: skip
    """Plans every EP group and pipeline rank, writes the page, and returns the lines to print.

    Args:
        sizes: Number of EP groups, of pipeline ranks, and of chunks per pipeline rank.
        planners: Strategies to compare in a table.
    """
    num_groups, pp, vpp = sizes
    planner = planner_of(name, options.shuffle)
    if planner.pack != AsGiven():
        raise InputError(f"{name} has a pack level, but the groups are dealt already; leave the pack level out.")
    with Progress() as progress:
        case, groups = build_groups(options, num_groups, progress)
        trainer = options.trainer.of(len(groups))
        progress.tasks = len(groups) * pp + (len(planners) + 1 if planners else 0)
        parts = plan_job(
            groups, planner, pp=pp, vpp=vpp, history_LE=case.history_LE, trainer=trainer, num_threads=threads, progress=progress
        )
        strategies = None
        if planners:
            strategies = _simulated_lines(
                groups, planners, pp=pp, vpp=vpp, history_LE=case.history_LE, trainer=trainer, num_threads=threads,
                progress=progress,
            )  # fmt: skip
    told = write_job_report(
        output, parts, strategies=strategies, source=seeded(source_of(case), options.seed),
        date=datetime.date.today().isoformat(), command=command,
    )  # fmt: skip
    return [told["gain"], " ".join(told["details"]), told["sure"], wrote(output)]


def seeded(source: str, seed: int) -> str:
    """Returns the description `source` of a load, with the seed added unless it names a seed already."""
    return source if "seed" in source else f"{source}, seed {seed}"


def wrote(output: str) -> str:
    """Returns the line that names the page and its size."""
    return f"wrote {click.format_filename(output)} ({os.path.getsize(output) / 1e6:.1f} MB)"


def strategy_lines(
    shown: Shown,
    planners: Mapping[str, Planner],
    threads: int | None,
    seed: int,
    trainer: Trainer,
    progress: Progress,
) -> Sequence[Mapping[str, Any]]:
    """Returns the rows of the table of strategies."""
    problem, history_LE = shown.posed, shown.history_LE
    sampled = {name for name, planner in planners.items() if any(solver.exact for solver in planner.rank)}
    if not sampled:
        return _simulated_lines(
            [problem], planners, history_LE=history_LE, trainer=trainer, num_threads=threads, progress=progress
        )
    rows = compare(
        problem, planners, history_LE=history_LE, seed=seed, trainer=trainer, judge=Judge.of(problem, trainer), progress=progress
    )
    return [_worded(row) for row in rows]


def _simulated_lines(groups: Sequence[Problem], planners: Mapping[str, Planner], **options: Any) -> list[Mapping[str, Any]]:
    """Returns table rows for the strategies and for even routing. `options` are passed to `simulate_systems`."""
    systems = {name: System(planner=planner) for name, planner in planners.items()} | {BALANCED: System(even=True)}
    return [_simulated_line(row, planners) for row in simulate_systems(groups, systems, **options)]


def _simulated_line(row: Mapping[str, Any], planners: Mapping[str, Planner]) -> Mapping[str, Any]:
    name = row["solver"]
    if name not in planners:
        return {**row, "note": "the same tokens, routed evenly: the result of perfect balance alone"}
    if planners[name].keeps_homes:
        return _worded(row)
    notes = [row.get("note"), "homes move: scored, never executed; their weights and gradients are sent exposed"]
    return _worded({**row, "note": "; ".join(filter(None, notes))})


def _worded(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**row, "note": in_options(row.get("note") or "")}
