"""The interfaces of the planner's levels. Pass instances to `Planner`.

A solver is frozen configuration (a frozen dataclass whose repr is its name in tables and files) and a pure function over all
rows at once. `level` names an instance's level for `Planner.using` and entry points.
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
    """The level home: assigns experts to home slots by one permutation per layer, for a whole step."""

    level: ClassVar[str] = "home"

    @abc.abstractmethod
    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE`` int32: the home slot g*B + b of every expert; each layer's row is a permutation."""


class RankSolver(abc.ABC):
    """The levels node and rank: choose replicas, and usually quotas, for every row.

    `solve` must be a pure function of the configuration, the problem and `start`. It is called with R >= 1 and G >= 2 only; rows
    may have zero load. `start` is a valid placement of this load (static, the previous level, or a warm start) and may be
    ignored;
    built-in solvers refuse an invalid one with an InputError. The result is canonical (see `Placement`), and every pair is served
    exactly once by a slot that holds its expert.
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
        """Returns one sentence that says why the solver cannot plan a problem of this size; None if it can.

        `solve` raises it as an InputError; `compare` and `simulate_systems` skip the solver and show the sentence.
        """
        return None


class SplitSolver(abc.ABC):
    """The level split: divides load over replicas that are already placed."""

    level: ClassVar[str] = "split"

    @abc.abstractmethod
    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        """Returns ``quota_NGS``, int32; an expert's quotas sum to its load.

        Raises:
            InputError: An expert that has load has no slot.
            PlanError: A slot holds an expert that does not exist.
        """


class PathSolver(abc.ABC):
    """The level path: chooses the link and the source rank of each copy."""

    level: ClassVar[str] = "path"

    @abc.abstractmethod
    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the same copies with `link_C` chosen, and `src_C`: a rank that holds the expert, or -1 for the host.

        Must be pure and deterministic: when all ranks plan together, each one chooses for itself, and the choices must agree.
        """
