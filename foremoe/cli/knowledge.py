"""The table of ``foremoe simulate --foresight``: which knowledge of the load pays, and at which overhead."""

from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.cli.tables import Column, number, percent, render
from foremoe.cli.texts import foresight_of, split_list
from foremoe.problem.foresight import Foresight

MS = number(1, 1e3)
# Fits a terminal of 80 columns.
COLUMNS = {
    "foresight": Column("foresight", left=True), "skew_mean": Column("skew", number(3)), "skew_p99": Column("p99", number(3)),
    "copy_bytes": Column("GB", number(1, 1e-9)), "simulated_stage_s": Column("stage ms", MS),
    "speedup_vs_static": Column("speed-up", number(3)), "plan_cpu_s": Column("CPU ms", MS),
    "plan_exposed_s": Column("exposed", MS), "net_speedup_vs_static": Column("net", number(3)),
}  # fmt: skip
UNAWARE = "none"


def views_of(texts: tuple[str, ...]) -> dict[str, Foresight | None]:
    """The kinds of foresight of ``--foresight`` by their texts; ``none`` is static placement."""
    names = split_list(texts, "--foresight") if texts else []
    return {name: None if name == UNAWARE else foresight_of(name) for name in names}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line for every kind of foresight."""
    return render([*COLUMNS.values()], [[row[key] for key in COLUMNS] for row in rows])


def footers(rows: Sequence[Mapping[str, Any]], planner: str, constants: str, has_history: bool) -> list[str]:
    """What a reader must know to read the table, and its answer."""
    best = max(rows, key=lambda row: row["net_speedup_vs_static"])
    lines = [
        f"planner: {planner}; simulated; constants: {constants}; stage ms: slowest group",
        "skew as served on the real load; GB: copies and gradients of replicas; speed-up: over static, planning hidden",
        "CPU ms: planning one group on one thread of this machine; exposed: what of it runs under no micro-step; net: with it",
    ]
    if any(row["foresight"] == "previous" for row in rows) and not has_history:
        lines.append("previous: the first micro-step has no history (--history) and is static")
    share = percent(best["plan_exposed_s"] / best["simulated_stage_s"])
    return [*lines, f"pays most: {best['foresight']}, {best['net_speedup_vs_static']:.3f} with {share} of the stage exposed"]
