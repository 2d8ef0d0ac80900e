"""Polish: a search over whole sets of replicas, for small rows."""

from dataclasses import dataclass

from foremoe.base.fields import whole
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.kernels.polish import polish_rows
from foremoe.solvers.kernels.rows import problem_rows


@dataclass(frozen=True)
class Polish(RankSolver):
    """Improves the rows of another solver by tabu search over their replicas, under the objective ``"time"``.

    Each step changes the expert of one slot, or exchanges those of two, whichever the proven lower bounds of all such changes
    favour; quotas of a new best set are the cheapest that exist. Every change is judged at every step, so a row takes about 4
    milliseconds at 64 experts times ranks and 50 at 1024: ``Planner(rank=(Chain(), Polish(steps=10)))`` is for what a plan
    can still gain. No row costs more than at the start. The method is our own.

    Attributes:
        steps: Changes of replicas in a row, at least 1.
    """

    steps: int = 500

    def __post_init__(self) -> None:
        whole(self.steps, "steps of Polish", 1, 10**6)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Searches from `start` in every row; rows that a cancel left out keep it, and so do all under ``"balance"``."""
        require_start(problem, start)
        if problem.cost.objective == "balance":
            return start
        rows = problem_rows(problem)
        return edit_rows(start, lambda low, high, *placement: polish_rows(low, high, rows, self.steps, *placement))
