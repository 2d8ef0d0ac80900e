"""Certify: how far the rows of a plan can be from the best there are."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from foremoe.base.fields import whole
from foremoe.base.parallel import for_rows
from foremoe.levels import RankSolver
from foremoe.plan.laws import PROVEN
from foremoe.problem.bounds import row_bound
from foremoe.problem.objective import row_objective, row_times
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers.base import require_start
from foremoe.solvers.kernels.certify import certify_rows
from foremoe.solvers.kernels.rows import problem_rows

# What rounding may have added to a sum of prices.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Certify(RankSolver):
    """Leaves another solver's rows as they are and raises their bounds, under the objective ``"time"``.

    ``Planner(rank=(Chain(), Certify()))`` makes a plan whose ``bound_ML`` says how much no search can save. A step judges every
    expert on every rank for every source: 300 take about 3 ms a row at 32 experts over 16 ranks, and 8 ms at 128. The bound is
    that of the linear program over replicas and quotas, by Lagrangian relaxation (Geoffrion, 1974) with Polyak's steps (1969).

    Attributes:
        steps: Changes of prices in a row, at least 1.
    """

    steps: int = 300

    def __post_init__(self) -> None:
        whole(self.steps, "steps of Certify", 1, 10**6)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns `start` with its bounds; rows that a cancel left out keep `row_bound`, and under ``"balance"`` so do all."""
        require_start(problem, start)
        if problem.cost.objective == "balance":
            return start
        rows, base_N, objective_N = problem_rows(problem), row_times(problem).base_N, row_objective(problem, start)
        least_N = row_bound(problem)
        bound_N, reached_N, expert_NGS = least_N - base_N, objective_N - base_N, start.expert_NGS

        def block(low: int, high: int) -> None:
            certify_rows(low, high, rows, self.steps, reached_N, expert_NGS, bound_N)

        done_N = for_rows(block, problem.N, rows_per_block=8)
        bound_N = np.maximum(least_N, (base_N + bound_N) * (1.0 - _ROUNDING))
        stop_N = np.where(objective_N <= bound_N * PROVEN, Stop.OPTIMAL, np.where(done_N, Stop.LIMIT, Stop.CANCELLED))
        return dataclasses.replace(start, bound_N=bound_N, stop_N=stop_N)
