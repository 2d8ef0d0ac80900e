"""Deadline: which link every weight copy takes, so that the copies of a use are in place as early as possible."""

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

    Copies of a use are taken in the order they are given. Each may come from its home rank, by peer link inside a node and by
    RDMA across nodes, or from the host store of its node. A copy from a rank waits for the source's egress and the
    destination's ingress of that link class, one from the host for the destination's host link; it takes the way on which it
    ends first, the home rank's if both end together. Uses do not see each other's copies, as in `CostModel`.

    The host store is for copies that would come too late otherwise. For that the copies of all uses are laid on one timeline:
    they begin two uses ahead, uses last as long as copies hide under them, and NICs and links go on from one use to the next. A
    store has an expert only once it was filled: sent over RDMA to the first rank that reads it on another node, and written
    there or by the home. It is taken where it ends so much sooner that it is worth the compute that filling and copy slow down.

    Source: R. L. Graham, "Bounds on multiprocessing timing anomalies" (1969), with links for machines.

    Attributes:
        relay: how many ranks in a row may pass a copy on within a use; 0 (or False): weights come from home or host, True: 1.
            A rank that gets the expert from another rank for the same use passes it on once it is there; one that still holds
            it from an earlier use has it at once. What came from a host store is not passed on: engines relay only between
            copies of one two-sided backend. A relay is taken where it ends earlier than both other ways; of several that end
            together, one inside the node, then the lowest rank.
    """

    relay: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.relay, int) or self.relay < 0:
            raise InputError(f"relay is how many ranks in a row may pass a copy on, 0 for none; got {self.relay!r}.")

    def __repr__(self) -> str:
        # Without relays as it has always been, since it is part of every plan's bytes.
        return f"Deadline(relay={self.relay!r})" if self.relay else "Deadline()"

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the same copies with `link_C` chosen and `src_C` the home rank, a relay, or -1 from the host store."""
        hide_U = None
        if problem.cluster.host_bytes_per_s > 0:
            uses, times = problem.schedule.uses(problem.L), row_times(problem)
            row_U = uses.micro_step_U.astype(np.int64) * problem.L + uses.layer_U
            hide_U = np.where(uses.phase_U == Phase.BACKWARD, times.hide_backward_N[row_U], times.hide_forward_N[row_U])
        return choose_links(
            transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, relay=self.relay, hide_U=hide_U
        )  # fmt: skip
