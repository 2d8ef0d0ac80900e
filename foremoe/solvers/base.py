"""`RowSolver`: a rank-level solver written for one row."""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numba
import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement, Stop

if TYPE_CHECKING:
    from foremoe.problem.problem import Problem

# Letters: N rows, G ranks, E experts, B base slots, R redundant slots, S = B + R, L layers, Q sequences, C copies.


class NodeOnly(NamedTuple):
    """Options of solvers that have none of their own.

    Attributes:
        node_only: Whether replicas must stay inside their home's node.
    """

    node_only: bool


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
    """

    compiled: ClassVar[bool] = True
    Options: ClassVar[Any] = None

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
        kind = self.Options or _options_type(type(self).__name__, tuple(values))
        return kind(node_only, *(values[name] for name in kind._fields[1:]))

    def rows(self) -> Callable[..., None]:
        """The driver ``(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS)`` that runs rows [low, high).

        Built-in solvers return a compiled function of their own file: a driver that takes the kernel as an argument is not
        found in numba's disk cache and costs most of a second in every process.
        """
        return _driver(type(self))

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows; rows that a cancel left out keep `start`.

        Raises:
            InputError: numba cannot compile `edit`.
        """
        expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
        done_N = self.run(problem, problem.replicas == "node", problem.load_NE, expert_NGS, quota_NGS)
        stop_N = np.where(done_N, Stop.DONE, Stop.CANCELLED)
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=stop_N)

    def run(self, problem: Problem, node_only: bool, load_NE: Array, expert_NGS: Array, quota_NGS: Array) -> Array:
        """Runs the row function over any rows, in place; bool [N], False for rows that a cancel left out.

        Raises:
            InputError: numba cannot compile `edit`.
        """
        options, rows = self.options(node_only, problem), self.rows()
        node_G, num_base = problem.cluster.node_of_rank_G, problem.B

        def block(low: int, high: int) -> None:
            rows(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS)

        try:
            return for_rows(block, len(load_NE))
        except (NumbaError, UnsupportedBytecodeError) as error:
            raise InputError(
                f"numba cannot compile the edit of {self!r} ({' '.join(str(error).split())[:300]}); write it in what numba"
                " supports, or set compiled = False."
            ) from error


@functools.cache
def _options_type(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(f"{name}Options", ("node_only", *fields))


@functools.cache
def _driver(solver: type[RowSolver]) -> Callable[..., None]:
    edit: Any = solver.edit
    if not solver.compiled:

        def plain(
            low: int, high: int, load_NE: Array, node_G: Array, num_base: int, options: Any, expert_NGS: Array,
            quota_NGS: Array,
        ) -> None:  # fmt: skip
            for n in range(low, high):
                edit(load_NE[n], node_G, num_base, options, expert_NGS[n], quota_NGS[n])

        return plain

    kernel = edit if isinstance(edit, numba.core.registry.CPUDispatcher) else numba.njit(nogil=True)(edit)

    @numba.njit(nogil=True)
    def driver(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS):
        for n in range(low, high):
            kernel(load_NE[n], node_G, num_base, options, expert_NGS[n], quota_NGS[n])

    return driver  # type: ignore[no-any-return]
