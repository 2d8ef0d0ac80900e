"""Static: the solver that replicates nothing."""

from dataclasses import dataclass

from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem


@dataclass(frozen=True)
class Static(RankSolver):
    """Every expert is served at home and redundant slots stay empty: what expert parallelism does without foremoe."""

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns ``problem.static()``; `start` is ignored."""
        return problem.static()
