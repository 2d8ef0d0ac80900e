"""`Even`: gives every slot of an expert the same share."""

from dataclasses import dataclass

from foremoe.base.arrays import Array
from foremoe.levels import SplitSolver
from foremoe.problem.problem import Problem
from foremoe.solvers.split.kernels import even_rows, split_all


@dataclass(frozen=True)
class Even(SplitSolver):
    """Splits an expert's pairs evenly over its slots. The slots with the lowest numbers take the remainder.

    Systems that route to replicas at random or in turn, such as the EPLB family, split in this way. `ExactSplit` balances better.
    """

    def solve(self, problem: Problem, expert_NGS: Array) -> Array:
        return split_all(problem, expert_NGS, even_rows)
