"""``foremoe compare``: strategies side by side on one case."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from foremoe.cli.inputs import build_case
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.memory import table_lines
from foremoe.cli.options import CaseOptions, case_options, option, solvers_option, trainer_options
from foremoe.cli.progress import Progress
from foremoe.cli.simulate import step_line
from foremoe.cli.tables import Column, number, percent, plural, render
from foremoe.cli.texts import Seconds, planners_of, split_list
from foremoe.planner import comparison
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate.step import Judge

PLANNED = (
    Column("skew mean", number(3)), Column("p99", number(3)), Column("max", number(3)), Column("load gap", percent),
    Column("replicas", number(1)), Column("moves", number(1)), Column("fanout"), Column("MB/layer", number(1, 1e-6)),
    Column("peer MB", number(1, 1e-6)), Column("rdma MB", number(1, 1e-6)), Column("host MB", number(1, 1e-6)),
    Column("plan us", number(1)), Column("slots"), Column("peak GB", number(2, 1e-9)),
)  # fmt: skip
SIMULATED = (
    Column("stage ms", number(1, 1e3)), Column("speed-up", number(3)), Column("step", number(3)), Column("of balanced", percent),
)  # fmt: skip


@click.command(cls=JsonCommand)
@case_options()
@solvers_option(
    help="Strategies or solvers with commas between them, quoted for the shell if they have brackets; may be repeated. "
    "`foremoe solvers` lists them.  [default: all strategies]"
)
@option(
    "--exact-seconds", type=Seconds(), default=comparison.EXACT_BUDGET_S,
    help="Seconds that each exact solver may spend; it plans a sample of the rows.",
)  # fmt: skip
@trainer_options
def compare(
    case_options: CaseOptions, solvers: tuple[str, ...], exact_seconds: float,
    json_file: str | None,
) -> None:  # fmt: skip
    """Plans one case with every strategy and prints a line for each.

    Several TRACEs are one workload. A TRACE may also be a workload file of counts. A row is a (micro-step, layer); skew is the
    largest over the mean rank load of a row, 1.000 is perfect. Baselines run as they are, without foremoe's guard.

    \b
    Example:
      foremoe compare rollout.npz --ranks 16 --redundant 1 --solvers static,eplb-history,hierarchical
    """
    require_writable({"the JSON file": json_file}, case_options.files)
    planners = planners_of(split_list(solvers, "--solvers"), STRATEGIES)
    trainer = case_options.trainer.of()
    with Progress() as progress:
        case = build_case(case_options, progress=progress)
        judge = Judge.of(case.problem, trainer)
        rows = comparison.compare(
            case.problem, planners, history_LE=case.history_LE, exact_budget_s=exact_seconds, seed=case_options.seed,
            trainer=trainer, judge=judge, progress=progress,
        )  # fmt: skip
    rows = [dict.fromkeys(judge.FIGURES) | row for row in rows]
    payload = {
        "rows": rows, "case": case.record, "objective": case.problem.cost.objective,
        "micro_step_0_left_out": comparison.needs_first_left_out(case.problem, planners, case.history_LE),
        "cost_model": case.cost_model, "residual": case.problem.cluster.residual,
        "static_stage_s": judge.static_s, "trainer": trainer,
    }  # fmt: skip
    words = footers(rows, planners, case.constants, judge.static_s)
    memory = table_lines(rows, case.problem.cluster.memory_bytes)
    emit(json_file, payload, [case.line, "", table(rows, planners), "", *words, step_line(rows, trainer), *memory])


def planned(row: Mapping[str, Any]) -> list[Any]:
    """The cells of `PLANNED` for one of compare's rows."""
    link = row["bytes_by_link"] or {}
    return [
        row["skew_mean"], row["skew_p99"], row["skew_max"], row["gap_mean"], row["replicas_per_layer"], row["moves_per_layer"],
        row["max_fanout"], row["bytes_per_layer"], link.get("peer"), link.get("rdma"), link.get("host"),
        row["plan_us_per_layer"], row["slots_per_rank"], row["peak_bytes"],
    ]  # fmt: skip


def table(rows: Sequence[Mapping[str, Any]], planners: Mapping[str, Planner]) -> str:
    """The table; under a sampled row stands the hierarchical figure on the same rows, or that of the best one there is."""
    lines: list[list[Any]] = []
    for row in rows:
        if not row["n_solved"]:
            continue
        name = row["solver"]
        sampled = "same_rows" in row
        label = f"{name} ({plural(row['n_solved'], 'row')})" if sampled else name if planners[name].keeps_homes else f"{name} *"
        lines.append([label, *planned(row), *(row[name] for name in Judge.FIGURES)])
        same = row.get("same_rows") or {}
        if same:
            other = "hierarchical" if "hierarchical" in same else min(same, key=lambda key: same[key])
            lines.append([f"  {other}, same rows", same[other]])
    return render([Column("solver", left=True), *PLANNED, *SIMULATED], lines)


# What the columns mean, for a reader of the table alone.
WORDS = (
    "a row is one layer of one micro-step; skew: largest over mean rank load; load gap: above the proven lower bound",
    "per row: replicas; moves (copies made, or slots refilled where homes move); MB of weights (every pass) and gradients",
    "fanout: most copies that leave one rank for one row; slots: redundant, per rank; peak GB: the fullest rank",
)


def footers(
    rows: Sequence[Mapping[str, Any]], planners: Mapping[str, Planner], constants: str, static_s: float
) -> list[str]:  # fmt: skip
    """What a reader must know to read the table."""
    lines = [f"stage ms, speed-up over static ({static_s * 1e3:.1f} ms): simulated, {constants}; plan us: CPU time per row"]
    lines += WORDS
    moved = [row for row in rows if row["transfer_s"] is not None and not planners[row["solver"]].keeps_homes]
    if moved:
        spent = ", ".join(f"{row['solver']} {row['transfer_s'] * 1e3:.1f} ms" for row in moved)
        travel = f"stage ms leaves out how their weights travel ({spent}), so no speed-up"
        lines.append(f"* homes move: scored, never executed; {travel}")
    return lines + notes(rows, "solver")


def notes(rows: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    """What the lines have to say, each sentence once, with the names of its lines."""
    names: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.get("note"):
            # The library names its argument; here it is an option.
            names.setdefault(row["note"].replace("history_LE", "--history TRACE"), {})[row[key]] = None
    return [f"{', '.join(lines)}: {note}" for note, lines in names.items()]
