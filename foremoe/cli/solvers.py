"""``foremoe solvers``: lists the names that the options --planners and --planner accept."""

import importlib.util

import click

from foremoe.base.extensions import entry_point_names
from foremoe.cli.jsonio import JsonCommand, emit, require_writable
from foremoe.cli.options import table_options
from foremoe.cli.tables import Column, Look, Table
from foremoe.planner.parsing import GROUP, short
from foremoe.planner.strategies import STRATEGIES

COLUMNS = {
    "name": Column("strategy", left=True, rank=0), "rank": Column("rank level", left=True, rank=1),
    "split": Column("split", left=True, rank=4), "foresight": Column("foresight", left=True, rank=2),
    "guard": Column("guard", left=True, rank=5), "executable": Column("executable", left=True, rank=3),
}  # fmt: skip


_HELP = """Lists the strategies for --planners and --planner, and the solvers that other packages have installed.

Both options also accept an expression for a solver or planner, such as 'Quota(min_pairs=64)', or an object from your own module,
such as 'package.module:MySolver(depth=2)'.

\b
Example:
  foremoe solvers
"""


@click.command(cls=JsonCommand, help=_HELP)
@table_options
def solvers(json_file: str | None, look: Look = Look()) -> None:  # noqa: B008
    """Runs ``foremoe solvers``."""
    require_writable({"the JSON file": json_file})
    look.require(COLUMNS)
    rows, cells = [], []
    for name, planner in STRATEGIES.items():
        rank, split = [short(solver) for solver in planner.rank], None if planner.split is None else short(planner.split)
        missing = [m for solver in planner.rank for m in solver.requires if importlib.util.find_spec(m) is None]
        rows.append({
            "name": name, "rank": rank, "split": split, "foresight": str(planner.foresight), "guard": planner.guard,
            "executable": planner.keeps_homes, "missing": missing, "planner": repr(planner),
        })  # fmt: skip
        cells.append({
            "name": f"{name} (needs {', '.join(missing)})" if missing else name, "rank": ", ".join(rank) or "none",
            "split": split or "the solver's", "foresight": planner.foresight, "guard": "yes" if planner.guard else "no",
            "executable": "yes" if planner.keeps_homes else "no, scored only",
        })  # fmt: skip
    installed = entry_point_names(GROUP)
    table = Table(COLUMNS, cells, rows)
    lines: list[str | Table] = [
        table,
        "",
        f"installed by other packages (entry points {GROUP}): {', '.join(installed) or 'none'}",
    ]
    emit(json_file, {"strategies": rows, "installed": installed}, lines, look)
