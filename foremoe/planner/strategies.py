"""The named strategies, and the function that makes planners from names and expressions."""

import functools
import inspect
from types import MappingProxyType
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.extensions import entry_point_names, load_entry_point
from foremoe.levels import A_SOLVER
from foremoe.planner.parsing import GROUP, load_place, parse
from foremoe.planner.planner import Planner
from foremoe.solvers import Anneal, Echo, Eplb, Even, Exact, Feplb, Greedy, Laer, LeastLoaded, Lplb, MoonEp, Quota, Search
from foremoe.solvers.base import RowSolver

# Baselines run without the guard, because it would improve them.
STRATEGIES: MappingProxyType[str, Planner] = MappingProxyType(
    {
        "static": Planner(rank=()),
        "eplb-history": Planner(rank=(Eplb(),), split=Even(), foresight="previous", guard=False),
        "eplb-step": Planner(rank=(Eplb(),), split=Even(), foresight="step", guard=False),
        # On its own load, EPLB's solver returns quotas. Splitting them evenly again would undo merged copies.
        "eplb-exact": Planner(rank=(Eplb(),), guard=False),
        "laer": Planner(rank=(Laer(),), split=Even(), foresight="previous", guard=False),
        "lplb": Planner(rank=(Lplb(),), guard=False),
        "quota": Planner(rank=(Quota(),), guard=False),
        "feplb": Planner(rank=(Feplb(),), guard=False),
        "echo": Planner(rank=(Echo(),), guard=False),
        "moonep": Planner(rank=(MoonEp(),), guard=False),
        "llep": Planner(rank=(LeastLoaded(),), guard=False),
        # The published floor (1024 pairs) and threshold (1.3) leave small micro-steps unbalanced. Without them, it performs best.
        "least_loaded": Planner(rank=(LeastLoaded(min_pairs=0, threshold=1.0),), guard=False),
        "greedy": Planner(rank=(Greedy(),), guard=False),
        "foremoe": Planner(),
        "foremoe-homes": Planner(home=Anneal()),
        # Starts from the heuristic, because most of its rows are optimal already and need no search.
        "exact": Planner(rank=(Search(), Exact())),
    }
)


def resolve(text: str | Planner | Any, *, guard: bool = True) -> Planner:
    """Returns the planner that `text` names. An unknown name raises an InputError that lists the known names.

    Args:
        text: One of

            * the name of a strategy, such as ``"quota"``
            * the name of a solver from another package (entry-point group ``foremoe.solvers``), with or without options, such as
              ``"theirs(depth=2)"``
            * the module and name of a solver, a solver class, a planner or a per-row function, with or without options, such as
              ``"package.module:Class(depth=2)"``
            * the repr of a solver or planner, such as ``"Quota(min_pairs=64)"`` or
              ``"Planner(rank=(Search(), package.module:Class()))"``
            * a planner or a solver itself.
        guard: Whether the planner of a single solver has a guard (see `Planner`). Without a guard, a comparison shows what the
            solver alone achieves.

    Example:
        >>> foremoe.resolve("eplb-step").rank
        (Eplb(num_groups=None),)
        >>> foremoe.resolve("Search(effort=5000)").rank
        (Search(effort=5000),)
    """
    if not isinstance(text, str):
        return _planner_of(text, repr(text), guard)
    name = text.strip()
    if name in STRATEGIES:
        return STRATEGIES[name]
    if "(" in name:
        return _planner_of(parse(name), name, guard)
    installed = entry_point_names(GROUP)
    if name in installed:
        return _planner_of(load_entry_point(GROUP, name), name, guard)
    if ":" in name:
        return _planner_of(load_place(name), name, guard)
    if "." in name:
        raise InputError(f"there is no strategy {name!r}; a place in a module is written {':'.join(name.rsplit('.', 1))!r}.")
    names, form = ", ".join([*STRATEGIES, *installed]), "a solver such as 'Quota(min_pairs=64)' or 'package.module:name'"
    raise InputError(f"there is no strategy {name!r}; choose from {names}, or write {form}.")


def _planner_of(found: Any, name: str, guard: bool) -> Planner:
    if isinstance(found, Planner):
        return found
    if isinstance(found, type):
        found = found()
    if not hasattr(found, "level") and (inspect.isfunction(found) or hasattr(found, "py_func")):
        found = row_solver(found)
    if not hasattr(found, "level"):
        raise InputError(f"{name} is {type(found).__name__}, not a solver, a planner or a per-row function; {A_SOLVER}.")
    return Planner(rank=(found,), guard=guard) if found.level == "rank" else Planner().using(found)


def row_solver(edit: Any, *, compiled: bool = True) -> RowSolver:
    """Makes a solver from a function ``edit(load_E, node_G, num_base, options, expert_GS, quota_GS)`` (see `RowSolver`).

    Args:
        edit: Function that changes the placement of one row in place.
        compiled: Whether to compile the function with numba. Plain Python gives the same result.

    Example:
        >>> def nothing(load_E, node_G, num_base, options, expert_GS, quota_GS):
        ...     return  # every expert stays at home
        >>> idle = foremoe.row_solver(nothing, compiled=False)
        >>> foremoe.Planner(rank=(idle,)).plan(problem)[0].num_replicas
        0
    """
    name = getattr(edit, "__name__", "row_solver")
    body = {"edit": staticmethod(edit), "compiled": compiled, "__repr__": lambda self: f"row_solver({name})"}
    body["__reduce__"] = lambda self: (functools.partial(row_solver, compiled=compiled), (edit,))  # its class has no name
    return type(name, (RowSolver,), body | {"__module__": getattr(edit, "__module__", __name__)})()
