"""Keep: the home level that moves nothing."""

from __future__ import annotations

from dataclasses import dataclass

from foremoe.arrays import Array
from foremoe.problem import Problem
from foremoe.solvers.base import HomeSolver


@dataclass(frozen=True)
class Keep(HomeSolver):
    """Every expert stays at its present home; the default, as moving homes moves master weights and optimizer state."""

    def solve(self, problem: Problem) -> Array:
        """Returns ``problem.home_LE``."""
        return problem.home_LE
