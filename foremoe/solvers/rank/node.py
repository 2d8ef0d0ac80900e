"""NodeChain: which load crosses nodes, by few replicas that settle the nodes' totals."""

import math
from dataclasses import dataclass

from foremoe.base.fields import real
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.kernels.node import Options, node_row, node_rows


@dataclass(frozen=True)
class NodeChain(RowSolver):
    """The node level before `Chain`: replicas across nodes, and no others, that bring every node's total to its share.

    Ranks are settled as in `Chain` with relays, and of the replicas made only those from another node are kept. Where these are
    more than `max_per_rank` allows, the most overloaded node gives to the least loaded one instead, time and again, down to the
    least node load per rank that so many replicas reach.

    What a rank takes in for its node mates may overload it; quota that would lift it above the start's maximum stays away, so
    the result is valid and no worse than the start on the maximum rank load. `Chain` then completes it inside the nodes. Rows
    whose node totals come no nearer to their shares keep the start; so do all rows with one node, or with replicas bound to
    nodes. The method is our own.

    Attributes:
        max_per_rank: at most ``floor(max_per_rank * G)`` replicas across nodes in a row, the start's included; None for any
            number. A start that has more keeps them.
    """

    max_per_rank: float | None = None

    edit = staticmethod(node_row)
    rows = staticmethod(node_rows)

    def __post_init__(self) -> None:
        if self.max_per_rank is not None:
            real(self.max_per_rank, "max_per_rank of NodeChain", open_low=False)

    def options(self, node_only: bool, problem: Problem) -> Options:
        """The limit as a number of replicas, -1 for none."""
        # 0.29 * 100 is 28.999... in floating point and means 29.
        most = -1 if self.max_per_rank is None else math.floor(self.max_per_rank * problem.G + 1e-9)
        return Options(node_only, min(problem.G * problem.R, most))

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows, or returns the start where there is nothing to decide."""
        if problem.replicas == "node" or problem.cluster.num_nodes < 2:
            return start
        return super().solve(problem, start)
