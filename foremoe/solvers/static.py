"""`Static`: makes no replicas."""

from dataclasses import dataclass

from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem


@dataclass(frozen=True)
class Static(RankSolver):
    """Serves every expert at home and leaves redundant slots empty. This is expert parallelism without foremoe."""

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns ``problem.static()`` and ignores `start`."""
        return problem.static()
