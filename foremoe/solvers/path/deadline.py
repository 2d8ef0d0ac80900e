"""`Deadline`: chooses the link of every weight copy, so that all copies for a use arrive as early as possible."""

from dataclasses import dataclass

import numpy as np

from foremoe.levels import PathSolver
from foremoe.plan.links import choose_links
from foremoe.plan.transfers import TransferList
from foremoe.problem.estimate import row_times
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase


@dataclass(frozen=True)
class Deadline(PathSolver):
    """Distributes copies over links according to their bandwidth, for one use (a layer in a pass) after another.

    The copies for a use are scheduled in the given order. Each copy comes either from the host store of the destination's node or
    from the home rank, over a peer link inside the node or over RDMA between nodes. A copy from a rank waits until the source can
    send and the destination can receive on links of that class. A copy from the host waits for the destination's host link. The
    source from which the copy arrives first is chosen or, in a tie, the home rank. As in `CostModel`, copies for different uses
    do not compete.

    The host store is meant for copies that would otherwise come too late. To find such copies, the copies of all uses are placed
    on one timeline. Copies begin two uses ahead. A use lasts as long as copies can overlap with it, and NICs and links remain
    busy from one use to the next. A store holds an expert only after the expert was written to it. On the home's node, the home
    rank writes it. On another node, the first rank that reads the expert receives it over RDMA and writes it. The store is chosen
    if the time saved exceeds the slowdown of compute by filling and copying.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), with links in the place of machines.
    """

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the same copies with chosen `link_C` and `src_C`. A source is the home rank, or -1 for the host."""
        hide_U = None
        if problem.cluster.host_bytes_per_s > 0:
            uses, times = problem.schedule.uses(problem.L), row_times(problem)
            row_U = uses.micro_step_U.astype(np.int64) * problem.L + uses.layer_U
            hide_U = np.where(uses.phase_U == Phase.BACKWARD, times.hide_backward_N[row_U], times.hide_forward_N[row_U])
        return choose_links(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, hide_U=hide_U)
