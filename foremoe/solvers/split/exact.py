"""ExactSplit: the split with the least possible maximum rank load."""

from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.levels import SplitSolver
from foremoe.problem.problem import Problem
from foremoe.solvers.split.kernels import split_all, split_rows


@dataclass(frozen=True)
class ExactSplit(SplitSolver):
    """Splits pairs so that the busiest rank has the least load that the given slots allow; provably optimal.

    Load moves between slots of one expert along shortest residual paths, and a minimum cut tells where it cannot; see
    `split.kernels.split_row`. Among splits with the same maximum it keeps load at home where that is cheap to see, which saves
    dispatch between ranks, and so may leave a replica without a quota.
    """

    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        return split_all(problem, expert_NGS, split_rows)
