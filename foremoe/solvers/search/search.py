"""Search: a fixed number of moves on the price of a row, by differences."""

from __future__ import annotations

from dataclasses import dataclass

from foremoe.base.fields import whole
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import problem_rows
from foremoe.problem.problem import Problem
from foremoe.problem.slots import SharedSlots
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.search.descend import search_rows


@dataclass(frozen=True)
class Search(RankSolver):
    """Makes rows cheaper by small changes of replicas and quotas, aimed at what is busiest, by `foremoe.price`.

    A row starts from `start`, or from home where that is cheaper, and never ends above it.

    The number of changes tried is fixed, so plans are the same on every machine and with every number of threads. Rows of the
    objective ``"balance"``, of unknown sources and of resident slots keep their start.

    Attributes:
        effort: Changes tried in a row.
    """

    effort: int = 2000

    def __post_init__(self) -> None:
        whole(self.effort, "effort of Search", 0, 2**31 - 1)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows; rows that a cancel left out keep `start`."""
        require_start(problem, start)
        located = problem.load_MLGE is not None
        if problem.cost.objective != "time" or not located or not isinstance(problem.slots, SharedSlots) or self.effort == 0:
            return start
        rows, node_only = problem_rows(problem), problem.replicas == "node"
        return edit_rows(start, lambda low, high, *placed: search_rows(low, high, rows, self.effort, node_only, *placed))
