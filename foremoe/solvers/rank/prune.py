"""Prune: the same plan with fewer copies."""

from dataclasses import dataclass

from foremoe.base.fields import real
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.kernels.prune import prune_rows
from foremoe.solvers.kernels.rows import problem_rows


@dataclass(frozen=True)
class Prune(RankSolver):
    """Takes replicas away from another solver's rows, as long as these become only a little longer.

    A replica goes if the exact split of the others keeps the maximum load within the limit, smallest quota first. The closed form
    counts the copies of a row alone; where rows share links, a row that it finds longer is often over earlier. Compose it without
    the guard, which takes the cheaper row: ``Planner(rank=(Chain(), Prune()), guard=False)``. The method is our own.

    Attributes:
        within: Share of the mean rank load by which the maximum load may rise, at least 0. Under ``"time"`` a row's seconds
            rise by no more than that load takes.
    """

    within: float = 0.005

    def __post_init__(self) -> None:
        real(self.within, "within of Prune", open_low=False)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Prunes every row of `start`; rows that a cancel left out keep it."""
        require_start(problem, start)
        rows, within, priced = problem_rows(problem), float(self.within), problem.cost.objective == "time"
        return edit_rows(start, lambda low, high, *placement: prune_rows(low, high, rows, within, priced, *placement))
