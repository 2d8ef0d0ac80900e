"""`Feplb`: moves whole experts between the ranks of a node."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.split.kernels import start_at_home

# Letters: G ranks, V nodes, S slots per rank, E experts.


class Options(NamedTuple):
    node_only: bool  # ignored, because experts always stay inside their node
    dyn: int  # number of dynamic experts of a rank, and maximum number that it receives


@kernel
def feplb_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `Feplb` (see `RowSolver.edit`)."""
    G, S = expert_GS.shape
    _, load_G = start_at_home(load_E, num_base, expert_GS, quota_GS)
    num_taken_G = np.zeros(G, np.int64)
    room = min(options.dyn, S - num_base)
    done_V = np.zeros(node_G.max() + 1, np.bool_)
    while True:
        giver = -1
        for g in range(G):
            if not done_V[node_G[g]] and (giver < 0 or load_G[g] > load_G[giver]):
                giver = g
        if giver < 0:
            break
        to = -1
        for g in range(G):
            if g == giver or node_G[g] != node_G[giver] or num_taken_G[g] == room:
                continue
            if to < 0 or load_G[g] < load_G[to]:
                to = g
        best, largest = -1, load_G[giver]
        if to >= 0:
            for b in range(min(options.dyn, num_base)):
                pairs = np.int64(quota_GS[giver, b])
                after = max(load_G[giver] - pairs, load_G[to] + pairs)
                if after < largest:
                    best, largest = b, after
        if best < 0:
            done_V[node_G[giver]] = True
            continue
        pairs, slot = np.int64(quota_GS[giver, best]), num_base + num_taken_G[to]
        expert_GS[to, slot], quota_GS[to, slot] = expert_GS[giver, best], pairs
        quota_GS[giver, best] = 0
        load_G[giver] -= pairs
        load_G[to] += pairs
        num_taken_G[to] += 1


@dataclass(frozen=True)
class Feplb(RowSolver):
    """Moves whole experts from a node's busiest rank to its least loaded rank, each time the one that balances the two best.

    This follows the description of FEPLB (arXiv 2604.19654). `dyn` experts of a rank are dynamic, here the experts in its first
    base slots. All other experts stay and compute meanwhile. A moved expert takes all of its load with it. Copy engines move
    weights and tokens inside the NVLink domain, regardless of `Problem.replicas`. A node is finished when no expert of its
    busiest rank lowers the larger of the two loads. The paper does not describe the scheduler in detail. The solver ignores
    replicas of the start placement and is never worse than the homes.

    Attributes:
        dyn: Number of dynamic experts of a rank. It is also the maximum number of experts that a rank receives, unless R is
            smaller. Defaults to 4, as published.
    """

    MAX_RANKS: ClassVar[int] = 16

    dyn: int = 4

    edit = staticmethod(feplb_row)
    Options = Options

    def __post_init__(self) -> None:
        whole(self.dyn, "dyn of Feplb", 0, 2**31 - 1)

    def refusal(self, problem: Problem) -> str | None:
        """Returns the reason why EP groups of more than `MAX_RANKS` ranks are refused, or None for smaller groups."""
        if problem.G <= self.MAX_RANKS:
            return None
        return f"Feplb is published for EP groups of at most {self.MAX_RANKS} ranks; got {problem.G}; make the group smaller."

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs `edit` on all rows.

        Raises:
            InputError: The EP group has more than `MAX_RANKS` ranks.
        """
        reason = self.refusal(problem)
        if reason is not None:
            raise InputError(reason)
        return super().solve(problem, start)
