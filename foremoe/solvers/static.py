"""Static: the solver that replicates nothing."""

from __future__ import annotations

from dataclasses import dataclass

from foremoe.placement import Placement
from foremoe.problem import Problem
from foremoe.solvers.base import Solver


@dataclass(frozen=True)
class Static(Solver):
    """Every expert is served at home and redundant slots stay empty: what expert parallelism does without foremoe."""

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns ``problem.static()``; `start` is ignored."""
        return problem.static()
