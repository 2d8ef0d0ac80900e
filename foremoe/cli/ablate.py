"""``foremoe ablate``: one planner, level by level, over redundant slots and foresight."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

import foremoe
from foremoe.cli.compare import FIGURES, WORDS, figures, notes
from foremoe.cli.jsonio import JsonCommand, emit, json_option, require_writable
from foremoe.cli.options import CaseOptions, case_options
from foremoe.cli.progress import Progress
from foremoe.cli.tables import Column, render
from foremoe.cli.texts import foresight_of, planner_of, split_list, whole_numbers


@click.command(cls=JsonCommand, short_help="What each level, redundant slot and kind of foresight is worth.")
@case_options(redundant=False)
@click.option(
    "--planner",
    "planner_name",
    metavar="NAME",
    default="hierarchical",
    show_default=True,
    help="What to take apart: a strategy, or a text such as 'Planner(rank=(NodeChain(), Chain()))'.",
)
@click.option(
    "--redundant",
    metavar="LIST",
    multiple=True,
    default=("0,1,2,4",),
    help="Numbers of redundant slots per rank to try.  [default: 0,1,2,4]",
)
@click.option(
    "--foresight",
    metavar="LIST",
    multiple=True,
    default=("exact,previous,step",),
    help="Loads that the planner may see: exact, previous (micro-step), step (the sum of all), 'Noisy(0.2)'.  "
    "[default: exact,previous,step]",
)
@json_option
def ablate(
    case_options: CaseOptions, planner_name: str, redundant: tuple[str, ...], foresight: tuple[str, ...], json_file: str | None
) -> None:
    """Leaves out one level of a planner at a time, for every number of redundant slots and every foresight.

    The same case, so the same rows, stand behind every line; planning time is in the line.

    \b
    Example:
      foremoe ablate rollout.npz --ranks 16 --redundant 0,1,2 --foresight 'exact,previous,Noisy(0.2)'
    """
    require_writable({"the JSON file": json_file}, case_options.files)
    slots = whole_numbers(redundant, "--redundant")
    views = [foresight_of(text) for text in split_list(foresight, "--foresight")]

    from foremoe.cli.inputs import build_case
    from foremoe.planner.comparison import ablate as run

    planner = planner_of(planner_name)
    case = build_case(dataclasses.replace(case_options, redundant=max(slots)), planner.pack)
    with Progress() as progress:
        for warning in case.warnings:
            progress.note(f"warning: {warning}")
        rows = run(case.problem, planner, redundant=slots, foresight=views, history_LE=case.history_LE, progress=progress)
    calibrated = case.problem.cluster.calibrated
    record: dict[str, Any] = {**case.record, "redundant": slots}
    payload = {
        "rows": rows,
        "case": record,
        "planner": repr(planner),
        "objective": case.problem.cost.objective,
        "cost_model": "calibrated" if calibrated else "uncalibrated",
        "foremoe_version": foremoe.__version__,
    }
    columns = [Column("levels", left=True), Column("R"), Column("foresight", left=True), *FIGURES]
    table = render(
        columns, [[row["levels"], row["redundant"], row["foresight"], *figures(row, planner.keeps_homes)] for row in rows]
    )
    footer = [
        f"stage ms, speed-up over static: {'calibrated' if calibrated else 'model, uncalibrated'}; plan us: CPU time per row",
        *WORDS,
    ]
    footer += notes(rows, "levels")
    emit(
        json_file,
        payload,
        "\n".join([case.line.replace(f"R = {max(slots)}", "R below"), f"planner: {planner!r}", "", table, "", *footer]),
    )
