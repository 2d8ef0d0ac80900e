"""`RowSolver`: a rank-level solver written for one row."""

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numba
import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.levels import RankSolver
from foremoe.problem.laws import placement_violations
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, E experts, B base slots, R redundant slots, S = B + R.


class NodeOnly(NamedTuple):
    """Options of solvers that have none of their own."""

    node_only: bool  # whether replicas must stay inside their home's node


def require_start(problem: Problem, start: Placement) -> None:
    """Raises InputError unless the start serves this problem's load, wherever homes lie: compiled code reads it unchecked."""
    broken = placement_violations(problem, start, keeps_homes=False)
    if broken:
        raise InputError(f"the start is not valid for this problem: {broken[0]}")


def edit_rows(start: Placement, rows: Callable[[int, int, Array, Array], object]) -> Placement:
    """The placement that ``rows(low, high, expert_NGS, quota_NGS)`` makes of `start`; rows that a cancel left out keep it."""
    expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
    done_N = for_rows(lambda low, high: rows(low, high, expert_NGS, quota_NGS), len(expert_NGS))
    return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=np.where(done_N, Stop.DONE, Stop.CANCELLED))


class RowSolver(RankSolver):
    """A rank-level solver written for one row; the library runs it over all rows, compiled and threaded.

    A third party writes `edit` alone (about fifteen lines). It is compiled by numba unless ``compiled = False``; both give the
    same result, so a new solver can be debugged in plain Python.

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
        compiled: Whether `edit` is compiled.
        Options: Type of the options; None for `node_only` and the solver's fields. Built-in solvers name a type of their own:
            machine code on disk is found again only by types that can be imported.
        rows: Driver ``(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS)`` that runs rows [low, high); None
            for one that is made from `edit`. Built-in solvers give a compiled one, which numba can cache on disk.
    """

    compiled: ClassVar[bool] = True
    Options: ClassVar[Any] = None
    rows: ClassVar[Any] = None

    @staticmethod
    @abc.abstractmethod
    def edit(load_E: Array, node_G: Array, num_base: int, options: Any, expert_GS: Array, quota_GS: Array) -> None:
        """Improves one row in place.

        Args:
            load_E: Pairs per expert, int32 [E].
            node_G: Node of each rank, int32 [G].
            num_base: B; slots [0, B) of a rank are homes and must not change their expert.
            options: ``options.node_only``, True if replicas must stay inside their home's node, and the solver's fields by name.
            expert_GS: Expert in each slot, int16 [G, S]; starts as the start placement; -1 is an empty slot.
            quota_GS: Pairs that each slot serves, int32 [G, S]; starts as the start placement's quotas.
        """

    def options(self, node_only: bool, problem: Problem) -> Any:
        """The options of `edit`; a field whose default is a float is always a float, so that it is compiled once."""
        fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(self) if dataclasses.is_dataclass(self) else ()
        values = {f.name: getattr(self, f.name) for f in fields}
        values |= {f.name: float(values[f.name]) for f in fields if isinstance(f.default, float)}
        kind = self.Options or (_options_type(type(self).__name__, tuple(values)) if values else NodeOnly)
        return kind(node_only, *(values[name] for name in kind._fields[1:]))

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows; rows that a cancel left out keep `start`.

        Raises:
            InputError: numba cannot compile `edit`, or the start is not valid.
        """
        require_start(problem, start)
        return self.run(problem, problem.replicas == "node", problem.load_NE, start)

    def run(self, problem: Problem, node_only: bool, load_NE: Array, start: Placement) -> Placement:
        """Runs `edit` on any rows: loads and the placements that they start from."""
        options, driver = self.options(node_only, problem), self.rows or _driver(type(self))
        node_G, num_base = problem.cluster.node_of_rank_G, problem.B

        def rows(low: int, high: int, expert_NGS: Array, quota_NGS: Array) -> None:
            driver(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS)

        try:
            return edit_rows(start, rows)
        except (NumbaError, UnsupportedBytecodeError) as error:
            why, cure = " ".join(str(error).split())[:300], "write it in what numba supports, or set compiled = False"
            raise InputError(f"numba cannot compile the edit of {self!r} ({why}); {cure}.") from error


@functools.cache
def _options_type(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(f"{name}Options", ("node_only", *fields))


@functools.cache
def _driver(solver: type[RowSolver]) -> Any:
    edit: Any = solver.edit
    if solver.compiled and not isinstance(edit, numba.core.registry.CPUDispatcher):
        edit = numba.njit(nogil=True)(edit)

    def driver(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS):
        for n in range(low, high):
            edit(load_NE[n], node_G, num_base, options, expert_NGS[n], quota_NGS[n])

    return numba.njit(nogil=True)(driver) if solver.compiled else driver
