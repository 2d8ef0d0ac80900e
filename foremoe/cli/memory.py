"""Lines about memory, which are printed below a table of strategies or for a single plan."""

from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.machine.trainer import Trainer
from foremoe.plan.figures import host_bytes
from foremoe.plan.plan import Plan
from foremoe.problem.memory import Fit, fit, gigabytes, rank_memory
from foremoe.problem.problem import Problem


def table_lines(rows: Sequence[Mapping[str, Any]], memory_bytes: int) -> list[str]:
    """Returns a line that says whether all strategies of a table fit into memory, and that names the ones that do not."""
    counted = [row for row in rows if row["peak_bytes"] is not None]
    if not counted:
        return []
    short = [row for row in counted if not row["fits"]]
    again = [row["peak_bytes_with_reforward"] for row in short or counted]
    worst = Fit(max(row["peak_bytes"] for row in short or counted), None if None in again else max(again), memory_bytes)
    if not short:
        return [f"memory: every line {worst.text()}"]
    if len(short) == len(counted):
        return [f"memory: no line fits: {worst.text().removeprefix('does not fit: ')}{cure(worst)}"]
    names = [row["solver"] for row in short]
    who = f"{names[0]} and {len(names) - 1} more" if len(names) > 2 else ", ".join(names)
    return [f"memory: {who}: {worst.text()}{cure(worst)}"]


def cure(found: Fit) -> str:
    """Returns advice on options with which the stage fits into memory, or an empty string if it fits already."""
    if found.fits:
        return ""
    if found.reforward_bytes is not None and found.reforward_bytes <= found.memory_bytes:
        return "; --schedule accumulate+reforward makes it fit"
    return "; more --ranks, --pp in `advise`, shorter micro-steps, fewer --layers or --optimizer-bytes 0 make it smaller"


def plan_line(problem: Problem, plan: Plan, trainer: Trainer) -> str:
    """Returns a line that says whether one plan fits into memory, and what takes memory on the fullest rank."""
    parts = rank_memory(problem, plan.placement, trainer=trainer).parts()
    held = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
    stored = host_bytes(problem, plan)
    host = f"; host store {gigabytes(stored)} GB a node" if stored else ""
    found, model = fit(problem, plan.placement, trainer=trainer), problem.model
    part = f"{problem.L} of {model.num_layers} layers: " if model.num_layers > problem.L else ""
    return f"memory: {part}{found.text(f' ({held}){host}')}{cure(found)}"
