"""WaterFill: iterative water-filling."""

from __future__ import annotations

from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.levels import SplitSolver
from foremoe.problem.problem import Problem
from foremoe.solvers.split.kernels import split_all, water_fill_rows


@dataclass(frozen=True)
class WaterFill(SplitSolver):
    """From the even split, expert by expert, pours its load anew so that it levels the ranks that hold it.

    Each pour lowers the sum of squared rank loads, so many rounds come close to the best split; few are a cheap
    approximation of it. It also levels ranks below the maximum, which `ExactSplit` leaves as they are.

    Attributes:
        rounds: passes over all experts, at least 1; it stops early once a pass changes nothing.
    """

    rounds: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.rounds, int) or not 1 <= self.rounds <= 1_000_000:
            raise InputError(f"WaterFill needs from 1 to 1000000 rounds; got {self.rounds!r}.")

    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        """Returns ``quota_NGS`` int32.

        Raises:
            InputError: an expert that has load has no slot.
        """

        def rows(low: int, high: int, load_NE: Array, expert_NGS: Array, quota_NGS: Array) -> None:
            water_fill_rows(low, high, load_NE, expert_NGS, self.rounds, quota_NGS)

        return split_all(problem, expert_NGS, rows)
