"""The interfaces of the planner's levels: one verb per level. Passing an instance is the normal way to use one.

A solver is frozen configuration (a frozen dataclass whose repr is its name in tables and files) and a pure function over all
rows at once. `level` tells `Planner.using` and entry points where an instance belongs.
"""

import abc
from typing import ClassVar

from foremoe.base.arrays import Array
from foremoe.plan.transfers import TransferList
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.workload.packing import PackSolver

__all__ = ["HomeSolver", "PackSolver", "PathSolver", "RankSolver", "SplitSolver"]

# Letters: N rows, G ranks, E experts, S slots per rank, L layers, M micro-steps, C copies.


class HomeSolver(abc.ABC):
    """Level home: a permutation of experts over home slots, one per layer, held for a whole step."""

    level: ClassVar[str] = "home"

    @abc.abstractmethod
    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE`` int32: the home slot g*B + b of every expert; each layer's row is a permutation."""


class RankSolver(abc.ABC):
    """Levels node and rank: replicas (and usually quotas) for every row.

    Laws: a pure function of (configuration, problem, start). Called with R >= 1 and G >= 2 only; rows may have zero load.
    `start` is a valid placement for this load (static, the previous level, or a warm start) and may be ignored; built-in solvers
    refuse one that is not with an InputError. The result is canonical (see `Placement`), and serves every pair exactly once where
    its expert is.
    """

    level: ClassVar[str] = "rank"
    keeps_homes: ClassVar[bool] = True  # False: base slots are re-placed; such plans are scored, never executed
    exact: ClassVar[bool] = False  # proves optimality where it says Stop.OPTIMAL, by a bound_N that the row meets
    deterministic: ClassVar[bool] = True  # False under a wall-clock limit
    foresees: ClassVar[bool] = False  # judges replicas by `Problem.scenario_XMLE`: no guard, which sees one load, corrects it
    requires: ClassVar[tuple[str, ...]] = ()  # modules to import, probed without importing them

    @abc.abstractmethod
    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all N rows."""

    def refusal(self, problem: Problem) -> str | None:
        """Says in a sentence why the solver does not plan a problem of this size; None where it does.

        `solve` raises it as an InputError; `compare` and `simulate_systems` leave the solver's line out and show it.
        """
        return None


class SplitSolver(abc.ABC):
    """Level split: quotas for replicas that are already placed."""

    level: ClassVar[str] = "split"

    @abc.abstractmethod
    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        """Returns ``quota_NGS`` int32; per expert the quotas of its slots sum to its load.

        Raises:
            InputError: An expert that has load has no slot.
            PlanError: A slot holds an expert that does not exist.
        """


class PathSolver(abc.ABC):
    """Level path: over which link each copy travels, and from which rank."""

    level: ClassVar[str] = "path"

    @abc.abstractmethod
    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the same copies with `link_C` (and `src_C`: -1 from the host, or a rank that holds the expert) chosen.

        Pure and deterministic: in planning by all ranks together, each rank chooses for itself, and all choices must be equal.
        """
