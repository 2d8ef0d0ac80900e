"""`RowSolver`: base class of rank solvers that are written for one row."""

import abc
import builtins
import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows, shared_block
from foremoe.levels import RankSolver
from foremoe.problem.laws import placement_violations
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, E experts, B base slots, R redundant slots, S = B + R.


class NodeOnly(NamedTuple):
    """The options that a row function receives if its solver has no fields."""

    node_only: bool  # whether replicas must stay inside their home's node


def require_start(problem: Problem, start: Placement) -> None:
    """Raises InputError unless `start` serves the load of `problem`. Compiled code does not check this. Homes may differ."""
    broken = placement_violations(problem, start, keeps_homes=False)
    if broken:
        raise InputError(f"the start is not valid for this problem: {broken[0]}")


def edit_rows(start: Placement, rows: Callable[[int, int, Array, Array], object]) -> Placement:
    """Returns `start`, edited by ``rows(low, high, expert_NGS, quota_NGS)``. Rows that a cancellation skips are unchanged."""
    expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
    # A row of many ranks takes up to a quarter of a second. A block has few such rows, so that a cancellation takes effect soon.
    block = shared_block(len(expert_NGS), max(1, min(256, 4096 // expert_NGS.shape[1])))
    done_N = for_rows(lambda low, high: rows(low, high, expert_NGS, quota_NGS), len(expert_NGS), block)
    return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=np.where(done_N, Stop.DONE, Stop.CANCELLED))


class RowSolver(RankSolver):
    """Base class of rank solvers that are written for one row. The library compiles them and runs all rows in several threads.

    A subclass only has to define `edit`, typically in about fifteen lines. numba compiles `edit` unless ``compiled = False``. The
    result is the same in both cases, so a new solver can be debugged in plain Python.

    Example::

        @dataclasses.dataclass(frozen=True)
        class CopyHottest(foremoe.solvers.RowSolver):
            min_pairs: int = 64

            @staticmethod
            def edit(load_E, node_G, num_base, options, expert_GS, quota_GS):
                hottest = load_E.argmax()
                if load_E[hottest] >= options.min_pairs:
                    ...  # put `hottest` into a free redundant slot, move some of its quota there

    Attributes:
        compiled: Whether numba compiles `edit`. Defaults to True.
        Options: Type of the options that `edit` receives. None (the default) generates a type from `node_only` and the fields of
            the solver. Built-in solvers define a type that can be imported, because numba's disk cache requires it.
    """

    compiled: ClassVar[bool] = True
    Options: ClassVar[Any] = None

    @staticmethod
    @abc.abstractmethod
    def edit(load_E: Array, node_G: Array, num_base: int, options: Any, expert_GS: Array, quota_GS: Array) -> None:
        """Improves one row in place.

        Args:
            load_E: Number of pairs of each expert, int32 [E].
            node_G: Node of each rank, int32 [G].
            num_base: Number of base slots per rank, B. Slots [0, B) hold experts at home, and `edit` must not change them.
            options: Named tuple of ``node_only`` and the fields of the solver. ``node_only`` is True if replicas must stay inside
                the node of their home.
            expert_GS: Expert in each slot, int16 [G, S], with -1 for empty slots. It holds the start placement when `edit` is
                called.
            quota_GS: Number of pairs that each slot serves, int32 [G, S]. It holds the quotas of the start when `edit` is called.
        """

    def options(self, node_only: bool, problem: Problem) -> Any:
        """Returns the options of `edit`. Fields whose default is a float become floats, so that `edit` is compiled only once."""
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = {f.name: getattr(self, f.name) for f in fields}
        values |= {f.name: float(values[f.name]) for f in fields if isinstance(f.default, float)}
        kind = self.Options or (_options_type(type(self).__name__, tuple(values)) if values else NodeOnly)
        return kind(node_only, *(values[name] for name in kind._fields[1:]))

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs `edit` on all rows. Rows that a cancellation skips keep the placement of `start`.

        Raises:
            InputError: numba cannot compile `edit`, or `start` is not valid.
        """
        require_start(problem, start)
        options, driver = self.options(problem.replicas == "node", problem), _driver(type(self))
        given = problem.load_NE, problem.cluster.node_of_rank_G, problem.B, options
        try:
            return edit_rows(start, lambda low, high, *placed: driver(low, high, *given, *placed))
        except (NumbaError, UnsupportedBytecodeError) as error:
            why, cure = " ".join(str(error).split())[:300], "use only Python that numba supports, or set compiled = False"
            raise InputError(f"numba cannot compile the edit of {self!r} ({why}); {cure}.") from error


@functools.cache
def _options_type(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(f"{name}Options", ("node_only", *fields))


def _rows(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS):
    """Runs `edit` on rows [low, high). The name `edit` is a global of the copy that `_driver` makes."""
    for n in range(low, high):
        edit(load_NE[n], node_G, num_base, options, expert_NGS[n], quota_NGS[n])  # type: ignore[name-defined]  # noqa: F821


@functools.cache
def _driver(solver: type[RowSolver]) -> Any:
    """Returns `_rows` with the solver's `edit`. If `edit` is a kernel, so is the result, and numba caches both on disk."""
    edit: Any = solver.edit
    cached = isinstance(edit, numba.core.registry.CPUDispatcher)
    if solver.compiled and not cached:
        edit = numba.njit(nogil=True)(edit)
    names = {"__builtins__": builtins, "__name__": solver.__module__, "edit": edit}
    driver = types.FunctionType(_rows.__code__, names, f"{solver.__name__}_rows")
    driver.__qualname__ = f"{solver.__module__}.{solver.__name__}_rows"
    return kernel(driver) if cached else numba.njit(nogil=True)(driver) if solver.compiled else driver
