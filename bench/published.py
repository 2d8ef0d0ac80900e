"""Compares published figures with the model's predictions for the same settings.

    python -m bench.published [--out bench/results/published_HARDWARE_DATE.md]

Rows and their roles are defined in `published_rows.toml`. No constant is fitted to check rows. Rows that the model cannot express
are listed with the feature that it lacks.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bench import overheads, published_parts, published_runs
from bench.output import command_line, emit, hardware
from bench.published_rows import ROLES, SETTINGS, Row, read_rows
from bench.published_runs import Lacks

WITHIN = 0.20


class Outcome(NamedTuple):
    """What the model gives for a row; None with what it lacks where it cannot express the row."""

    row: Row
    model: float | None
    lacks: str = ""

    @property
    def error(self) -> float:
        """Relative error of the figure in its own unit."""
        assert self.model is not None
        return self.model / self.row.figure - 1.0


def _host(row: Row) -> float:
    raise Lacks("a count of launches: the figure is taken over as it is (`foremoe.machine.host`)")


EXPRESS: dict[str, Callable[[Row], float]] = {
    "throughput": published_runs.throughput, "bandwidth": published_parts.bandwidth, "copy": published_parts.copy_ms,
    "ratio": published_parts.ratio, "gemm": published_parts.gemm, "host": _host,
}  # fmt: skip


def outcomes(rows: Iterable[Row]) -> list[Outcome]:
    """Every row's outcome."""
    out = []
    for row in rows:
        began = time.perf_counter()
        try:
            out.append(Outcome(row, EXPRESS[row.kind](row)))
        except Lacks as lacks:
            out.append(Outcome(row, None, str(lacks)))
        print(f"{row.id}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    return out


def median(errors: Sequence[float]) -> str:
    """Median of absolute errors, and how many are within the bound."""
    if not errors:
        return "no rows"
    sizes = np.abs(errors)
    return f"median error {np.median(sizes):.1%}, {int((sizes <= WITHIN).sum())} of {len(sizes)} within {WITHIN:.0%}"


def summary(found: Sequence[Outcome]) -> list[str]:
    """The figures over all rows of a role, and by kind."""
    lines = []
    for role in ROLES:
        mine = [one for one in found if one.row.role == role]
        told = [one.error for one in mine if one.model is not None]
        share = sum(abs(error) <= WITHIN for error in told) / len(mine)
        lines.append(f"* **{role}**: {len(mine)} rows, {len(told)} expressed; {median(told)} ({share:.0%} of all {role} rows).")
        for kind in SETTINGS:
            errors = [one.error for one in mine if one.row.kind == kind and one.model is not None]
            if errors:
                lines.append(f"  * {kind}: {median(errors)}.")
    strong = [one.error for one in found if one.row.role == "check" and not one.row.weak and one.model is not None]
    lines.append(f"* Check rows that are not weak: {median(strong)}.")
    num_fit, older = sum(one.row.role == "fit" for one in found), sum(row.constant != "none" for row in overheads.OLDER)
    lines.append(
        f"* {len(overheads.CONSTANTS)} fitted constants (`bench.overheads`) beside {num_fit} fit rows and {older} older ones."
    )
    return lines


def figure(value: float) -> str:
    """Four digits, never with an exponent."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def table(found: Sequence[Outcome]) -> list[str]:
    """One line for each row that the model expresses."""
    lines = ["| row | role | unit | published | model | error | |", "|" + " --- |" * 7]
    for one in found:
        if one.model is not None:
            of, role = one.row, one.row.constant if one.row.role == "fit" else "check"
            about = "; ".join(text for text in (of.weak and f"weak: {of.weak}", of.note) if text)
            lines.append(
                f"| {of.id} | {role} | {of.unit} | {figure(of.figure)} | {figure(one.model)} | {one.error:+.0%} | {about} |"
            )
    return lines


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--kind", choices=SETTINGS, action="append", help="only rows of this kind; may be repeated")
    args = parser.parse_args()
    found = outcomes(row for row in read_rows() if not args.kind or row.kind in args.kind)
    lines = [
        f"# Published figures and the model\n\nRun on: {hardware()}. Command: `python -m bench.published`. Constants of the"
        " presets.\n", *summary(found), "", *table(found),
    ]  # fmt: skip
    lacking = [one for one in found if one.model is None]
    if lacking:
        lines += ["", f"## Not expressed: {len(lacking)} rows", ""]
        lines += [f"* {one.row.id} ({one.row.role}): lacks {one.lacks}." for one in lacking]
    emit("\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
