"""`ExactSplit`: finds the split with the smallest possible maximum rank load."""

from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.levels import SplitSolver
from foremoe.problem.problem import Problem
from foremoe.solvers.split.kernels import split_all, split_rows


@dataclass(frozen=True)
class ExactSplit(SplitSolver):
    """Splits pairs so that the load of the busiest rank is as small as the given slots allow. The result is provably optimal.

    Load moves between slots of one expert along shortest residual paths. A minimum cut proves that no further move helps. See
    `split.kernels.split_row`. Among splits with the same maximum, load stays at home where that is quick to determine. This saves
    dispatch between ranks, but may leave a replica without a quota.
    """

    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        return split_all(problem, expert_NGS, split_rows)
