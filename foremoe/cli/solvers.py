"""``foremoe solvers``: what --solvers and --planner can name."""

import importlib.util

import click

from foremoe.base.extensions import entry_point_names
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.tables import Column, render
from foremoe.planner.parsing import GROUP, short
from foremoe.planner.strategies import STRATEGIES


@click.command(cls=JsonCommand)
def solvers(json_file: str | None) -> None:
    """Lists the strategies that --solvers and --planner name, and solvers that other packages have installed.

    Besides these names both options take a solver or planner written out, such as 'Quota(min_pairs=64)', and a place in a
    module of your own, such as 'package.module:MySolver(depth=2)'.

    \b
    Example:
      foremoe solvers
    """
    require_writable({"the JSON file": json_file})
    rows, cells = [], []
    for name, planner in STRATEGIES.items():
        rank, split = [short(solver) for solver in planner.rank], None if planner.split is None else short(planner.split)
        missing = [m for solver in planner.rank for m in solver.requires if importlib.util.find_spec(m) is None]
        rows.append({
            "name": name, "rank": rank, "split": split, "foresight": str(planner.foresight), "guard": planner.guard,
            "executable": planner.keeps_homes, "missing": missing, "planner": repr(planner),
        })  # fmt: skip
        cells.append([
            f"{name} (needs {', '.join(missing)})" if missing else name, ", ".join(rank) or "none", split or "the solver's",
            planner.foresight, "yes" if planner.guard else "no", "yes" if planner.keeps_homes else "no, scored only",
        ])  # fmt: skip
    columns = [Column(name, left=True) for name in ("strategy", "rank level", "split", "foresight", "guard", "executable")]
    installed = entry_point_names(GROUP)
    lines = [render(columns, cells), "", f"installed by other packages (entry points {GROUP}): {', '.join(installed) or 'none'}"]
    emit(json_file, {"strategies": rows, "installed": installed}, lines)
