"""WaterFill: iterative water-filling."""

import functools
from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.base.fields import whole
from foremoe.levels import SplitSolver
from foremoe.problem.problem import Problem
from foremoe.solvers.split.kernels import split_all, water_fill_rows


@dataclass(frozen=True)
class WaterFill(SplitSolver):
    """Starts from the even split and redistributes each expert's load to balance the ranks that hold it.

    Each pour lowers the sum of squared rank loads, so many rounds come close to the best split; few are a cheap
    approximation of it. It also levels ranks below the maximum, which `ExactSplit` leaves as they are.

    Attributes:
        rounds: passes over all experts, at least 1; it stops early once a pass changes nothing.
    """

    rounds: int = 8

    def __post_init__(self) -> None:
        whole(self.rounds, "rounds of WaterFill", 1, 10**6)

    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        return split_all(problem, expert_NGS, functools.partial(water_fill_rows, self.rounds))
