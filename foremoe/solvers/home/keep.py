"""`Keep`: leaves all homes unchanged."""

from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.levels import HomeSolver
from foremoe.problem.problem import Problem


@dataclass(frozen=True)
class Keep(HomeSolver):
    """Keeps every expert at its current home. This is the default, because new homes require moves of optimizer state."""

    def solve(self, problem: Problem) -> Array:
        """Returns ``problem.home_LE``."""
        return problem.home_LE
