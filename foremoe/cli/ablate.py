"""``foremoe ablate``: one planner, level by level, over redundant slots and foresight."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import click

from foremoe.cli.compare import PLANNED, WORDS, notes, planned
from foremoe.cli.inputs import build_case
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import CaseOptions, case_options, option
from foremoe.cli.progress import Progress
from foremoe.cli.tables import Column, number, render
from foremoe.cli.texts import foresight_of, planner_of, split_list, whole_numbers
from foremoe.planner import comparison
from foremoe.planner.planner import Planner


@click.command(cls=JsonCommand)
@case_options(redundant=False)
@option(
    "--planner", "planner_name", metavar="NAME", default="hierarchical",
    help="What to take apart: a strategy, or a text such as 'Planner(rank=(NodeChain(), Chain()))'.",
)  # fmt: skip
@option("--redundant", metavar="LIST", multiple=True, default=("0,1,2,4",), help="Numbers of redundant slots per rank to try.")
@option(
    "--foresight", metavar="LIST", multiple=True, default=("exact,previous,step",),
    help="Loads that the planner may see: exact, previous (micro-step), step (the sum of all), 'Noisy(0.2)', 'Rerouted(0.1)'.",
)  # fmt: skip
def ablate(
    case_options: CaseOptions, planner_name: str, redundant: tuple[str, ...], foresight: tuple[str, ...], json_file: str | None
) -> None:
    """Leaves out one level of a planner at a time, for every number of redundant slots and every foresight.

    All lines are of the same case, so of the same rows; planning time is in the line.

    \b
    Example:
      foremoe ablate rollout.npz --ranks 16 --redundant 0,1,2 --foresight 'exact,previous,Noisy(0.2)'
    """
    require_writable({"the JSON file": json_file}, case_options.files)
    slots = whole_numbers(redundant, "--redundant")
    views = [foresight_of(text) for text in split_list(foresight, "--foresight")]
    planner = planner_of(planner_name, case_options.shuffle)
    with Progress() as progress:
        case = build_case(dataclasses.replace(case_options, redundant=max(slots)), planner.pack, progress=progress)
        rows = comparison.ablate(
            case.problem, planner, redundant=slots, foresight=views, history_LE=case.history_LE, progress=progress
        )
    payload = {
        "rows": rows, "case": case.record | {"redundant": slots}, "planner": repr(planner),
        "objective": case.problem.cost.objective, "cost_model": case.cost_model,
        "residual": case.problem.cluster.residual,
    }  # fmt: skip
    times = (Column("predicted ms", number(1, 1e3)), Column("speed-up", number(3)))
    columns = [Column("levels", left=True), Column("R"), Column("foresight", left=True), *PLANNED, *times]
    cells = [[row["levels"], row["redundant"], row["foresight"], *planned(row), *_times(row, planner)] for row in rows]
    lines = [
        case.line.replace(f"R = {max(slots)}", "R below"), f"planner: {planner!r}", "", render(columns, cells), "",
        f"predicted ms, speed-up over static: {case.constants}; plan us: CPU time per row", *WORDS, *notes(rows, "levels"),
    ]  # fmt: skip
    emit(json_file, payload, lines)


def _times(row: Mapping[str, Any], planner: Planner) -> tuple[float | None, float | None]:
    """Predicted seconds, and the gain over static unless homes move: then they leave out how weights travel."""
    return row["predicted_stage_s"], row["predicted_speedup_vs_static"] if planner.keeps_homes else None
