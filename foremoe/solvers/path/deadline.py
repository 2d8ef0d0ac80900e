"""`Deadline`: chooses the link of every weight copy, so that the copies of a use arrive as early as possible."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.errors import InputError
from foremoe.levels import PathSolver
from foremoe.plan.links import choose_links
from foremoe.plan.transfers import TransferList
from foremoe.problem.estimate import row_times
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase


@dataclass(frozen=True, repr=False)
class Deadline(PathSolver):
    """Schedules copies over link capacities, one use (a layer in a pass) at a time.

    The copies of a use are scheduled in the given order. Each may come from the host store of its node or from its home rank,
    over a peer link inside the node and over RDMA between nodes. A copy from a rank waits for the source's egress and the
    destination's ingress of that link class. A copy from the host waits for the destination's host link. The source with which
    the copy ends first is chosen, and the home rank in a tie. As in `CostModel`, copies of different uses do not compete.

    The host store is meant for copies that would otherwise come too late. To find them, the copies of all uses are placed on one
    timeline. Copies begin two uses ahead, a use lasts as long as copies can overlap with it, and NICs and links remain busy from
    one use to the next. A store holds an expert only after it was filled. On another node, the first rank that reads the expert
    receives it over RDMA and writes it to the store. On the home's node, the home writes it. The store is chosen if the time
    saved exceeds the slowdown of compute by filling and copying.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), with links for machines.

    Attributes:
        relay: Maximum number of ranks in a chain that pass a copy on within a use. With 0 or False, weights come only from home
            or host. True means 1. If a rank receives the expert from another rank for the same use, it forwards the expert after
            it has arrived.
            A rank that still holds it from an earlier use can send it at once. A copy from a host store is not passed on, because
            engines relay only between copies of one two-sided backend. A relay is chosen if the copy then ends earlier than from
            home and host. Among equal relays, one inside the node is preferred, and then the lowest rank.
    """

    relay: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.relay, int) or self.relay < 0:
            raise InputError(f"relay must be the number of ranks in a chain that pass a copy on, 0 for none; got {self.relay!r}.")

    def __repr__(self) -> str:
        # Without relays, the text must be that of older versions, because it is part of every plan's bytes.
        return f"Deadline(relay={self.relay!r})" if self.relay else "Deadline()"

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the same copies with `link_C` and `src_C` chosen. The source is the home rank, a relay, or -1 for the host."""
        hide_U = None
        if problem.cluster.host_bytes_per_s > 0:
            uses, times = problem.schedule.uses(problem.L), row_times(problem)
            row_U = uses.micro_step_U.astype(np.int64) * problem.L + uses.layer_U
            hide_U = np.where(uses.phase_U == Phase.BACKWARD, times.hide_backward_N[row_U], times.hide_forward_N[row_U])
        return choose_links(
            transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, relay=self.relay, hide_U=hide_U
        )  # fmt: skip
