"""The table of ``foremoe simulate --foresight``. It shows the net gain of each kind of foresight, less planning time."""

from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.cli.tables import BYTES, SECONDS, Column, Table, flat, number, percent
from foremoe.cli.texts import foresight_of, in_options, split_list
from foremoe.cli.tones import tones
from foremoe.planner.comparison import NO_HISTORY
from foremoe.problem.foresight import Foresight

COLUMNS = {
    "foresight": Column("foresight", left=True, rank=0),
    "skew_mean": Column("skew", number(3), rank=3, meaning="as served on the real load"),
    "skew_p99": Column("p99", number(3)), "copy_bytes": Column("sent", BYTES, rank=6, meaning="copies and gradients of replicas"),
    "simulated_stage_s": Column("stage", SECONDS, rank=2),
    "speedup_vs_static": Column("speed-up", number(3), rank=4, meaning="over static, planning hidden"),
    "plan_cpu_s": Column("CPU", SECONDS, rank=7, meaning="planning one group on one thread of this machine"),
    "plan_exposed_s": Column("exposed", SECONDS, rank=5, meaning="planning that runs under no micro-step"),
    "net_speedup_vs_static": Column("net", number(3), rank=1, meaning="speed-up with exposed planning"),
}  # fmt: skip
UNAWARE = "none"


def views_of(texts: tuple[str, ...]) -> dict[str, Foresight | None]:
    """Returns the kinds of foresight in ``--foresight``, keyed by the given texts. ``none`` means static placement."""
    names = split_list(texts, "--foresight") if texts else []
    return {name: None if name == UNAWARE else foresight_of(name) for name in names}


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns the table with one line per kind of foresight."""
    return Table(COLUMNS, [flat(row) for row in rows], rows, tones(rows, "net_speedup_vs_static"))


def footers(rows: Sequence[Mapping[str, Any]], planner: str, constants: str, has_history: bool) -> list[str]:
    """Returns the lines below the table, which explain it and name the best kind of foresight."""
    best = max(rows, key=lambda row: row["net_speedup_vs_static"])
    lines = [
        f"planner: {planner}; simulated; constants: {constants}; stage: slowest group",
        "CPU, exposed, net: planning is timed on this machine, so they vary with its load",
    ]
    if any(row["foresight"] == "previous" for row in rows) and not has_history:
        lines.append(f"previous: {in_options(NO_HISTORY)}")
    share = percent(best["plan_exposed_s"] / best["simulated_stage_s"])
    return [*lines, f"pays most: {best['foresight']}, {best['net_speedup_vs_static']:.3f} with {share} of the stage exposed"]
