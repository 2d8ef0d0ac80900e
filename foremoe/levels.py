"""Interfaces of the planner's levels. `Planner` takes instances of their subclasses.

A solver is a frozen dataclass that holds its configuration. Its repr is its name in tables and files. It solves all rows at once
with a pure function. The attribute `level` names the solver's level, for `Planner.using` and for entry points.
"""

import abc
from typing import ClassVar

from foremoe.base.arrays import Array
from foremoe.plan.transfers import TransferList
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.workload.packing import PackSolver

__all__ = ["HomeSolver", "PackSolver", "PathSolver", "RankSolver", "SplitSolver"]

A_SOLVER = "subclass foremoe.levels.RankSolver as a frozen dataclass (docs/extending.md)"

# Letters: N rows, G ranks, E experts, S slots per rank, L layers, M micro-steps, C copies.


class HomeSolver(abc.ABC):
    """The *home* level, which assigns experts to home slots for a whole step, with one permutation per layer."""

    level: ClassVar[str] = "home"

    @abc.abstractmethod
    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE`` (int32), the home slot g*B + b of every expert. The entries of each layer are a permutation."""


class RankSolver(abc.ABC):
    """The *rank* level (and the *node* level), which chooses replicas, and usually quotas, for every row.

    `solve` must be a pure function of the configuration, the problem and `start`. `solve` is called only with R >= 1 and G >= 2.
    Rows may have zero load. `start` is a valid placement of this load: the static placement, the result of the previous level, or
    a warm start. A solver may ignore `start`. Built-in solvers raise an InputError if `start` is invalid. The result must be
    canonical (see `Placement`), and every pair must be served exactly once, by a slot that holds its expert.
    """

    level: ClassVar[str] = "rank"
    keeps_homes: ClassVar[bool] = True  # if False, base slots change, so that plans are scored but never executed
    exact: ClassVar[bool] = False  # if True, a row with Stop.OPTIMAL meets its bound_N, which proves it
    deterministic: ClassVar[bool] = True  # False under a wall-clock limit
    foresees: ClassVar[bool] = False  # if True, it uses `Problem.scenario_XMLE`, and the guard, which sees one load, is off
    requires: ClassVar[tuple[str, ...]] = ()  # modules that it imports; they are looked up without importing them

    @abc.abstractmethod
    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all N rows."""

    def refusal(self, problem: Problem) -> str | None:
        """Returns one sentence that says why the solver cannot plan a problem of this size, or None if it can.

        `solve` raises an InputError with this sentence. `compare` and `simulate_systems` skip the solver and show the sentence.
        """
        return None


class SplitSolver(abc.ABC):
    """The *split* level, which divides the load over replicas that are already placed."""

    level: ClassVar[str] = "split"

    @abc.abstractmethod
    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        """Returns ``quota_NGS`` (int32). The quotas of an expert sum to its load.

        Raises:
            InputError: An expert with load has no slot.
            PlanError: A slot holds an expert that does not exist.
        """


class PathSolver(abc.ABC):
    """The *path* level, which chooses the link and the source rank of each copy."""

    level: ClassVar[str] = "path"

    @abc.abstractmethod
    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the same copies with chosen `link_C` and `src_C`. A source is a rank that holds the expert, or -1 for the host.

        The method must be pure and deterministic. When all ranks plan together, each rank chooses by itself, and all choices must
        agree.
        """
