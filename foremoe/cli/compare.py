"""``foremoe compare``: compares strategies on one case."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from foremoe.advice.changes import advise
from foremoe.cli.inputs import build_case
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.memory import table_lines
from foremoe.cli.options import CaseOptions, case_options, option, planners_option, table_options, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.simulate import FITS, HOMES_MOVE, OF_BALANCED, notes, shown_columns, step_line
from foremoe.cli.tables import (
    BYTES,
    GIGABYTES,
    SECONDS,
    Column,
    Look,
    Table,
    count,
    flat,
    number,
    percent,
    plural,
    seconds,
)  # fmt: skip
from foremoe.cli.texts import Seconds, planners_of, split_list
from foremoe.cli.tones import tones
from foremoe.planner import comparison
from foremoe.planner.planner import Planner
from foremoe.simulate.runs import Judge

PLANNED = {
    "skew_mean": Column(
        "skew mean", number(3), rank=3, meaning="largest over mean rank load of a row, which is one layer of one micro-step"
    ),
    "skew_p99": Column("p99", number(3), meaning="that of the worst hundredth of rows"),
    "skew_max": Column("max", number(3), rank=9, meaning="that of the worst row"),
    "gap_mean": Column("load gap", percent, meaning="busiest rank above the proven lower bound"),
    "replicas_per_layer": Column("replicas", number(1), rank=5),
    "moves_per_layer": Column("moves", number(1), meaning="copies made for a row, or slots refilled where homes move"),
    "max_fanout": Column("fanout", count, meaning="most copies that leave one rank for one row"),
    "bytes_per_layer": Column("sent", BYTES, rank=8, meaning="weights (every pass) and gradients of a row; then by link"),
    "bytes_by_link.peer": Column("peer", BYTES), "bytes_by_link.rdma": Column("rdma", BYTES),
    "bytes_by_link.host": Column("host", BYTES),
    "plan_us_per_layer": Column("plan us", number(1), rank=6, meaning="CPU time of planning a row"),
    "slots_per_rank": Column("slots", count, meaning="redundant, of a rank"),
    "peak_bytes": Column("peak", GIGABYTES, rank=7, meaning="memory of the fullest rank"),
}  # fmt: skip
COLUMNS = {
    "solver": Column("solver", left=True, rank=0), **PLANNED,
    "simulated_stage_s": Column("stage", SECONDS, rank=4), "speedup_vs_static": Column("speed-up", number(3), rank=1),
    "step_speedup": Column("step", number(3), rank=10), "share_of_balanced": OF_BALANCED,
    "fits": FITS,
}  # fmt: skip


_HELP = """Plans one case with every strategy and prints a line for each strategy.

Several TRACEs form one workload. A TRACE may also be a workload file of counts. A row is one layer of one micro-step. The skew of
a row is the load of the busiest rank divided by the mean load, so 1.000 is perfect. Baselines and solvers that you name run
without a guard. With Planner(rank=(SOLVER,)) instead of SOLVER, rows that SOLVER makes more expensive keep experts at home.

\b
Example:
  foremoe compare rollout.npz --ranks 16 --dispatch node
"""


@click.command(cls=JsonCommand, help=_HELP)
@case_options()
@planners_option(
    help="Comma-separated list of strategies or solvers. Quote names with brackets for the shell. May be repeated. "
    "`foremoe solvers` lists the names.  [default: all strategies except exact, which takes --exact-seconds]"
)
@option(
    "--exact-seconds", type=Seconds(), default=comparison.EXACT_BUDGET_S,
    help="Time in seconds that each exact solver may spend. An exact solver plans a sample of the rows.",
)  # fmt: skip
@table_options
@trainer_options
def compare(
    case_options: CaseOptions, planners: tuple[str, ...], exact_seconds: float,
    json_file: str | None, *, look: Look = Look(),  # noqa: B008
) -> None:  # fmt: skip
    """Runs ``foremoe compare``."""
    require_writable({"the JSON file": json_file}, case_options.files)
    look.require(COLUMNS)
    chosen = planners_of(split_list(planners, "--planners"))
    trainer = case_options.trainer.of()
    num_tasks = 1 + (case_options.redundant is None) + sum(bool(planner.rank) for planner in chosen.values())
    with Progress(tasks=num_tasks) as progress:
        case = build_case(case_options, progress=progress)
        judge = Judge.of(case.problem, trainer)
        rows = comparison.compare(
            case.problem, chosen, history_LE=case.history_LE, exact_budget_s=exact_seconds, seed=case_options.seed,
            trainer=trainer, judge=judge, progress=progress,
        )  # fmt: skip
        ours = next((row for row in rows if row["solver"] == "foremoe"), dict[str, Any]())
        known = ours.get("speedup_vs_static"), ours.get("share_of_balanced")
        told = advise(case.problem, trainer=trainer, slots=case.slots, progress=progress.within("advice")).of_stage(*known)
    rows = [dict.fromkeys(judge.FIGURES) | row for row in rows]
    payload = {
        "rows": rows, "case": case.record, "objective": case.problem.cost.objective,
        "cost_model": case.cost_model, "residual": case.problem.cluster.residual,
        "static_stage_s": judge.static_s, "trainer": trainer, "advice": str(told),
    }  # fmt: skip
    words = footers(rows, chosen, case.constants, judge.static_s)
    words.append(step_line(rows, trainer, [name for name, planner in chosen.items() if planner.keeps_homes]))
    memory = table_lines(rows, case.problem.cluster.memory_bytes)
    emit(json_file, payload, [case.line, "", table(rows, chosen), "", *words, *memory, f"advice: {told}"], look)


def table(rows: Sequence[Mapping[str, Any]], planners: Mapping[str, Planner]) -> Table:
    """Returns the table. foremoe's figure, or else the best one, for the same rows follows each figure from a sample."""
    lines: list[dict[str, Any]] = []
    sources: list[Mapping[str, Any]] = []
    for row in rows:
        if not row["n_solved"]:
            continue
        name = row["solver"]
        sampled = "same_rows" in row
        label = f"{name} ({plural(row['n_solved'], 'row')})" if sampled else name if planners[name].keeps_homes else f"{name} +"
        lines.append(flat(row) | {"solver": label})
        sources.append(row if planners[name].keeps_homes else {"fits": row["fits"]})
        same = row.get("same_rows") or {}
        if same:
            other = "foremoe" if "foremoe" in same else min(same, key=lambda key: same[key])
            lines.append({"solver": f"  {other}, same rows", "skew_mean": same[other]})
            sources.append({})
    return Table(shown_columns(COLUMNS, rows), lines, rows, tones(sources, "speedup_vs_static"))


def footers(
    rows: Sequence[Mapping[str, Any]], planners: Mapping[str, Planner], constants: str, static_s: float
) -> list[str]:  # fmt: skip
    """Returns the lines that explain the table."""
    lines = [f"stage, speed-up over static ({seconds(static_s)}): simulated, {constants}"]
    if any(row["transfer_s"] is not None and not planners[row["solver"]].keeps_homes for row in rows):
        lines.append(HOMES_MOVE)
    return lines + notes(rows, "solver")
