"""NodeChain: which load crosses nodes, by few replicas that settle the nodes' totals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foremoe.placement import Placement
from foremoe.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.kernels.chain import node_row, node_rows


@dataclass(frozen=True)
class NodeChain(RowSolver):
    """The node level before `Chain`: replicas across nodes, and no others, that bring every node's total to its share.

    Ranks are settled as in `Chain` with relays, and of the replicas made only those from another node are kept. What a rank
    takes in for its node mates may overload it; quota that would lift it above the start's maximum stays away, so the result
    is valid and no worse than the start on the maximum rank load. `Chain` then completes it inside the nodes. Rows whose node
    totals come no nearer to their shares keep the start; so do all rows with one node, or with replicas bound to nodes. The
    method is our own.
    """

    edit = staticmethod(node_row)

    def rows(self) -> Callable[..., None]:
        """The compiled driver of `kernels.chain`."""
        return node_rows  # type: ignore[no-any-return]

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows, or returns the start where there is nothing to decide."""
        if problem.replicas == "node" or problem.cluster.num_nodes < 2:
            return start
        return super().solve(problem, start)
