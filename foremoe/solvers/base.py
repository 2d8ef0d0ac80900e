"""The interfaces a solver implements: one verb per level. Passing an instance is the normal way to use one.

A solver is frozen configuration (a frozen dataclass whose repr is its name in tables and files) and a pure function over all
rows at once. `level` tells `Planner.using` and entry points where an instance belongs.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numba
import numpy as np
from numba.core.errors import NumbaError, UnsupportedBytecodeError

from foremoe.arrays import Array
from foremoe.errors import InputError
from foremoe.parallel import for_rows
from foremoe.placement import Placement, Stop

if TYPE_CHECKING:
    from foremoe.problem import Problem
    from foremoe.routing import RoutingTrace
    from foremoe.transfers import Transfers

# Letters: N rows, G ranks, E experts, B base slots, R redundant slots, S = B + R, L layers, Q sequences, C copies.


def require_whole(solver: object, **least: int) -> None:
    """Raises InputError unless the named fields of a solver are whole numbers from so many to a million."""
    for name, low in least.items():
        count = getattr(solver, name)
        if isinstance(count, bool) or not isinstance(count, int) or not low <= count <= 10**6:
            raise InputError(f"{type(solver).__name__} needs {name} as a whole number from {low} to {10**6}; got {count!r}.")


class PackSolver(abc.ABC):
    """Level pack: which sequences form which micro-step, and on which source rank each starts.

    `BestPack` calls several packers at once, on threads: `solve` depends on its arguments alone.
    """

    level: ClassVar[str] = "pack"

    @abc.abstractmethod
    def solve(
        self,
        trace: RoutingTrace,
        *,
        num_ranks: int,
        tokens_per_rank: int,
        sample_group_Q: Array | None = None,
        seed: int = 0,
    ) -> tuple[Array, Array]:
        """Deals every sequence once.

        Args:
            num_ranks, tokens_per_rank: each at least 1; a micro-step holds at most num_ranks * tokens_per_rank tokens, unless it
                is a single longer sequence.
            sample_group_Q: integers, non-decreasing (the mini-batch of each sequence, say); a micro-step never mixes groups.
            seed: of whatever is random.

        Returns:
            ``(micro_step_Q, rank_Q)`` int32, micro-steps numbered from 0 without gaps.

        Raises:
            InputError: a number below 1, or groups of another length or not in order.
        """


class HomeSolver(abc.ABC):
    """Level home: a permutation of experts over home slots, one per layer, held for a whole step."""

    level: ClassVar[str] = "home"

    @abc.abstractmethod
    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE`` int32: the home slot g*B + b of every expert; each layer's row is a permutation."""


class Solver(abc.ABC):
    """Levels node and rank: replicas (and usually quotas) for every row.

    Laws: a pure function of (configuration, problem, start). Called with R >= 1 and G >= 2 only; rows may have zero load.
    `start` is a valid placement for this load (static, the previous level, or a warm start) and may be ignored. The result is
    canonical (see `Placement`), and serves every pair exactly once where its expert is.
    """

    level: ClassVar[str] = "rank"
    keeps_homes: ClassVar[bool] = True  # False: base slots are re-placed; such plans are scored, never executed
    exact: ClassVar[bool] = False  # proves optimality where it says Stop.OPTIMAL
    deterministic: ClassVar[bool] = True  # False under a wall-clock limit
    requires: ClassVar[tuple[str, ...]] = ()  # modules to import, probed without importing them

    @abc.abstractmethod
    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all N rows."""


class SplitSolver(abc.ABC):
    """Level split: quotas for replicas that are already placed."""

    level: ClassVar[str] = "split"

    @abc.abstractmethod
    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        """Returns ``quota_NGS`` int32; per expert the quotas of its slots sum to its load."""


class PathSolver(abc.ABC):
    """Level path: over which link each copy travels, and from which rank."""

    level: ClassVar[str] = "path"

    @abc.abstractmethod
    def solve(self, problem: Problem, transfers: Transfers) -> Transfers:
        """Returns the same copies with `path_C` (and `src_C`: -1 from the host, or a rank that holds the expert) chosen."""


class OrderSolver(abc.ABC):
    """Level order: the order of micro-steps, which gradient accumulation leaves free, and what stays from one to the next.

    Runs after the rank level, on problems with resident slots and the objective ``"time"``; its plans are priced as their weights
    are sent (`foremoe.sent`).
    """

    level: ClassVar[str] = "order"

    @abc.abstractmethod
    def solve(self, problem: Problem, placement: Placement) -> tuple[Array, Placement]:
        """Returns ``order_M`` int32, the micro-step that runs m-th, and the placement, which may have changed.

        Args:
            placement: of every row by itself.
        """


class RowSolver(Solver):
    """A rank-level solver written for one row; the library runs it over all rows, compiled and threaded.

    A third party writes `edit` alone (about fifteen lines). It is compiled by numba unless ``compiled = False``; both give the
    same result, so a new solver can be debugged in plain Python.

    Example::

        @dataclasses.dataclass(frozen=True)
        class CopyHottest(foremoe.solvers.RowSolver):
            min_pairs: int = 64

            @staticmethod
            def edit(load_E, node_G, num_base, params, expert_GS, quota_GS):
                hottest = load_E.argmax()
                ...  # put `hottest` into a free redundant slot, move some of its quota there
    """

    compiled: ClassVar[bool] = True

    @staticmethod
    @abc.abstractmethod
    def edit(load_E: Array, node_G: Array, num_base: int, params: Array, expert_GS: Array, quota_GS: Array) -> None:
        """Improves one row in place.

        Args:
            load_E: int32, pairs per expert.
            node_G: int32, node of each rank.
            num_base: B; slots [0, B) of a rank are homes and must not change their expert.
            params: float64; ``params[0]`` is 1.0 if replicas must stay inside their home's node, the rest is `params()`.
            expert_GS: int16, starts as the start placement; -1 is an empty slot.
            quota_GS: int32, starts as the start placement's quotas.
        """

    def params(self, problem: Problem) -> tuple[float, ...]:
        """What `edit` finds from ``params[1]`` on: by default the solver's own numeric fields in order."""
        return tuple(float(getattr(self, f.name)) for f in dataclasses.fields(self))  # type: ignore[arg-type]

    def rows(self) -> Callable[..., None]:
        """The driver ``(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS)`` that runs rows [low, high).

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
        params = np.array([problem.replicas == "node", *self.params(problem)], np.float64)
        rows, load_NE = self.rows(), problem.load_NE
        node_G = problem.cluster.node_of_rank_G

        def block(low: int, high: int) -> None:
            rows(low, high, load_NE, node_G, problem.B, params, expert_NGS, quota_NGS)

        try:
            done_N = for_rows(block, problem.N)
        except (NumbaError, UnsupportedBytecodeError) as error:
            raise InputError(
                f"numba cannot compile the edit of {self!r} ({' '.join(str(error).split())[:300]}); write it in what numba"
                " supports, or set compiled = False."
            ) from error
        stop_N = np.where(done_N, Stop.DONE, Stop.CANCELLED)
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=stop_N)


@functools.cache
def _driver(solver: type[RowSolver]) -> Callable[..., None]:
    edit: Any = solver.edit
    if not solver.compiled:

        def plain(
            low: int, high: int, load_NE: Array, node_G: Array, num_base: int, params: Array, expert_NGS: Array,
            quota_NGS: Array,
        ) -> None:  # fmt: skip
            for n in range(low, high):
                edit(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])

        return plain

    kernel = edit if isinstance(edit, numba.core.registry.CPUDispatcher) else numba.njit(nogil=True)(edit)

    @numba.njit(nogil=True)
    def driver(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
        for n in range(low, high):
            kernel(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])

    return driver  # type: ignore[no-any-return]
