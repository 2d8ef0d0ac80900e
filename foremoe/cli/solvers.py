"""``foremoe solvers``: what --solvers and --planner can name."""

from __future__ import annotations

import importlib.util
from typing import Any

import click

from foremoe.cli.jsonio import JsonCommand, emit, json_option, require_writable
from foremoe.cli.tables import Column, render

GROUP = "foremoe.solvers"


@click.command(cls=JsonCommand, short_help="Named strategies, what they are made of, and installed solvers.")
@json_option
def solvers(json_file: str | None) -> None:
    """Lists the strategies that --solvers and --planner name, and solvers that other packages have installed.

    Besides these names both options take a solver or planner written out, such as 'Quota(min_pairs=64)', and a place in a
    module of your own, such as 'package.module:MySolver'.

    \b
    Example:
      foremoe solvers
    """
    require_writable({"the JSON file": json_file})

    from foremoe.base.extensions import entry_point_names
    from foremoe.planner.parsing import short
    from foremoe.planner.strategies import STRATEGIES

    rows: list[dict[str, Any]] = []
    for name, planner in STRATEGIES.items():
        missing = [m for solver in planner.rank for m in solver.requires if importlib.util.find_spec(m) is None]
        rows.append(
            {
                "name": name,
                "rank": [short(solver) for solver in planner.rank],
                "split": None if planner.split is None else short(planner.split),
                "foresight": str(planner.foresight),
                "guard": planner.guard,
                "executable": planner.keeps_homes,
                "missing": missing,
                "planner": repr(planner),
            }
        )
    columns = [Column(name, left=True) for name in ("strategy", "rank level", "split", "foresight", "guard", "executable")]
    cells = [
        [
            row["name"] if not row["missing"] else f"{row['name']} (needs {', '.join(row['missing'])})",
            ", ".join(row["rank"]) or "none", row["split"] or "the solver's", row["foresight"],
            "yes" if row["guard"] else "no", "yes" if row["executable"] else "no, scored only",
        ]
        for row in rows
    ]  # fmt: skip
    installed = entry_point_names(GROUP)
    lines = [render(columns, cells), "", f"installed by other packages (entry points {GROUP}): {', '.join(installed) or 'none'}"]
    emit(json_file, {"strategies": rows, "installed": installed}, "\n".join(lines))
