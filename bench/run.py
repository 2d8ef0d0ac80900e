"""Runs named cases with `compare` and prints markdown: an overview, then one table for each case and objective.

    python -m bench.run [CASE ...] [--objective balance] [--out bench/results/strategies_HARDWARE_DATE.md]

A result file names the hardware, the date and the commit. Skews are computed from finished plans. Stage times are simulated with
both kinds of dispatch, uncalibrated.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.cases import CASES, Case
from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES, peak, under
from foremoe.planner.comparison import compare
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.simulate import Judge

COLUMNS = (
    ("strategy", lambda r: r["solver"]),
    ("skew mean", lambda r: f"{r['skew_mean']:.4f}"),
    ("p99", lambda r: f"{r['skew_p99']:.3f}"),
    ("max", lambda r: f"{r['skew_max']:.3f}"),
    ("load gap", lambda r: f"{r['gap_mean']:.2%}"),
    ("replicas", lambda r: f"{r['replicas_per_layer']:.1f}"),
    ("moves", lambda r: f"{r['moves_per_layer']:.1f}"),
    ("fan-out", lambda r: str(r["max_fanout"])),
    ("MB/layer", lambda r: f"{r['bytes_per_layer'] / 1e6:.0f}"),
    ("stage ms", lambda r: f"{r['simulated_stage_s'] * 1e3:.1f}" if "simulated_stage_s" in r else "-"),
    ("x static", lambda r: _ratio(r, "speedup_vs_static")),
    ("of balanced", lambda r: _ratio(r, "share_of_balanced")),
    ("peak GB", lambda r: "-" if r["peak_bytes"] is None else peak(r)),
    ("plan us", lambda r: f"{r['plan_us_per_layer']:.0f}"),
    ("rows", lambda r: str(r["n_solved"])),
)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; a row without figures says why."""
    lines = ["| " + " | ".join(name for name, _ in COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    notes = []
    for row in rows:
        if row["skew_mean"] is None:
            lines.append(f"| {row['solver']} | {row['note']} |" + " |" * (len(COLUMNS) - 2))
            continue
        lines.append("| " + " | ".join(show(row) for _, show in COLUMNS) + " |")
        if "same_rows" in row:
            beside = row["same_rows"].get("foremoe")
            beside = "" if beside is None else f"; `foremoe` on the same rows: {beside:.4f}"
            notes.append(f"`{row['solver']}`: {row['note']}{beside}.")
    return "\n".join([*lines, "", *notes])


def _ratio(row: dict[str, Any], name: str) -> str:
    """A ratio; none is known where weights are placed anew for nothing, or rows are a sample."""
    return "-" if row.get(name) is None else f"{row[name]:.2f}"


def section(case: Case, objective: str, problem: Problem, rows: list[dict[str, Any]]) -> str:
    """The section of one case: what it is, and its table."""
    load = f"{problem.M} micro-steps x {problem.L} layers, {problem.E} experts, {problem.G} ranks, R = {problem.R}"
    return (
        f"## {case.name} ({case.kind}), objective {objective}, dispatch {problem.cluster.dispatch}\n\n"
        f"{case.about}: {load}, cluster {case.cluster} "
        f"(simulated, uncalibrated).\n\n{table(rows)}"
    )


def overview(figures: dict[tuple[str, str, str], dict[str, dict[str, Any]]], objective: str, dispatch: str) -> str:
    """One column per case: mean skew under balance, simulated speed-up over static under time."""
    names = [name for name, *of in figures if of == [objective, dispatch]]
    title = "mean skew" if objective == "balance" else f"simulated speed-up, {dispatch}"
    figure = "skew_mean" if objective == "balance" else "speedup_vs_static"
    digits = 4 if objective == "balance" else 2
    lines = [f"| {title} | " + " | ".join(names) + " |", "|" + " --- |" * (len(names) + 1)]
    for solver in STRATEGIES:
        cells = [figures[name, objective, dispatch][solver] for name in names]
        shown = ["-" if row.get(figure) is None else f"{row[figure]:.{digits}f}{_part(row)}" for row in cells]
        lines.append(f"| {solver} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _part(row: dict[str, Any]) -> str:
    """Marks a figure that speaks of a sample of rows only."""
    if "same_rows" not in row:
        return ""
    return f" ({row['n_solved']} row{'s' * (row['n_solved'] != 1)})"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--objective", choices=("balance", "time"), action="append", help="default: balance, then time")
    args = parser.parse_args()
    unknown = [name for name in args.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; choose from {', '.join(CASES)}")
    # Balance does not ask what an exchange costs.
    tables = [(o, d) for o in args.objective or ["balance", "time"] for d in DISPATCHES[: 1 if o == "balance" else None]]
    sections: list[str] = []
    figures: dict[tuple[str, str, str], dict[str, dict[str, Any]]] = {}
    for name in args.cases or CASES:
        case = CASES[name]
        if case.missing:
            sections.append(f"## {name}\n\nSkipped: {case.missing}.")
            print(sections[-1], file=sys.stderr)
            continue
        for objective, dispatch in tables:
            print(f"{name} ({objective}, {dispatch}) ...", file=sys.stderr, flush=True)
            [problem] = under(dispatch, [case.problem(objective)])
            rows = compare(problem, STRATEGIES, judge=Judge.of(problem))
            figures[name, objective, dispatch] = {row["solver"]: row for row in rows}
            sections.append(section(case, objective, problem, rows))
    head = [
        f"# Strategies compared\n\nMeasured on: {hardware()}. Command: `make bench`. Stage times: simulated, uncalibrated. {BOTH}"
    ]
    head += [overview(figures, objective, dispatch) for objective, dispatch in tables if figures]
    text = "\n\n".join([*head, *sections]) + "\n"
    emit(text, args.out)


if __name__ == "__main__":
    main()
