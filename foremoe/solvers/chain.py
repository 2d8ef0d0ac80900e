"""Chain: near-perfect balance with homes kept, by replicas that pass load on along chains and trees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foremoe.arrays import Array
from foremoe.errors import InputError
from foremoe.parallel import for_rows
from foremoe.placement import Placement, Stop
from foremoe.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.kernels.chain import chain_row, chain_rows

# Letters: N rows, G ranks, S slots per rank; I some of the rows.

UNLIMITED = 2**31


@dataclass(frozen=True)
class Chain(RowSolver):
    """Settles one rank per replica: the emptiest rank is filled exactly to the target by a rank above it.

    The giver may fall below the target itself: its own slot is still free, so another rank fills it later, and replicas form
    chains and trees instead of stars. With one redundant slot per rank that is nearly always enough for a maximum load at its
    lower bound. Targets between that bound and the best maximum so far, and several orders of givers, are tried; each try ends
    with the exact split, so that its maximum is the least that its replicas allow. Replicas stay in their home's node where
    that costs no balance, and ranks of a node pass on what one larger replica brings in from another node.

    Under the objective ``"time"`` the placement made for balance competes with one that ignores nodes (its tokens travel less),
    one that never leaves a node (its copies travel faster), and with placements that copy at most so many experts out of any
    one home: fewer copies wait in line at one link, for a little skew. The cost model picks per row, and the start is always
    among the candidates. The method is our own.

    Attributes:
        tries: settlings per row, at least 1; most rows need one.
        spread: how far apart the weights of givers lie in repeated tries, in [0, 2).
        slack: a maximum load this share above the mean is good enough and takes fewer replicas, at least 0.
        relay: let node mates pass load on, to save replicas across nodes.
        fan_limits: under ``"time"``, the most copies to other nodes (to other ranks, with one node) per home rank, ascending.
            Copies inside the node are limited to those that take as long.
        close: under ``"time"``, rows whose copies cost at most this share of the row are not worth another candidate.
    """

    tries: int = 16
    spread: float = 0.6
    slack: float = 0.0
    relay: bool = True
    fan_limits: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16)
    close: float = 0.002

    edit = staticmethod(chain_row)

    def __post_init__(self) -> None:
        if isinstance(self.tries, bool) or not isinstance(self.tries, int) or not 1 <= self.tries < 2**31:
            raise InputError(f"Chain needs tries of at least 1; got {self.tries!r}.")
        if not _real(self.spread) or not 0.0 <= self.spread < 2.0:
            raise InputError(f"Chain needs spread in [0, 2); got {self.spread!r}.")
        if not _real(self.slack) or not 0.0 <= self.slack < math.inf:
            raise InputError(f"Chain needs slack of at least 0; got {self.slack!r}.")
        if not isinstance(self.relay, bool):
            raise InputError(f"Chain needs relay True or False; got {self.relay!r}.")
        limits = self.fan_limits
        if not isinstance(limits, tuple) or not all(isinstance(f, int) and 1 <= f < UNLIMITED for f in limits):
            raise InputError(f"Chain needs fan_limits such as (1, 2, 4), whole numbers from 1; got {limits!r}.")
        if not _real(self.close) or not 0.0 <= self.close < math.inf:
            raise InputError(f"Chain needs close of at least 0; got {self.close!r}.")

    def rows(self) -> Callable[..., None]:
        """The compiled driver of `kernels.chain`."""
        return chain_rows  # type: ignore[no-any-return]

    def params(self, problem: Problem) -> tuple[float, ...]:
        """What `chain_row` finds from ``params[1]`` on, without limits on copies."""
        return self._params(UNLIMITED, UNLIMITED, True)

    def _params(self, near_limit: int, far_limit: int, from_start: bool) -> tuple[float, ...]:
        tries = self.tries if from_start else max(1, self.tries // 4)
        return tries, self.spread, self.slack, near_limit, far_limit, self.relay, from_start

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows and, under ``"time"``, lets other candidates compete with its result."""
        found = super().solve(problem, start)
        if problem.cost.objective == "balance":
            return found
        done_N = np.asarray(found.stop_N != Stop.CANCELLED)
        start_N, found_N = problem.cost.objective_N(problem, start), problem.cost.objective_N(problem, found)
        best, best_N = found.where(done_N & (found_N < start_N), start), np.where(done_N, np.minimum(found_N, start_N), start_N)

        def compete(candidate: Placement, among_N: Array) -> Array:
            nonlocal best, best_N
            cost_N = problem.cost.objective_N(problem, candidate)
            better_N = among_N & (cost_N < best_N)
            best, best_N = candidate.where(better_N, best), np.where(better_N, cost_N, best_N)
            return cost_N

        static, node_G = problem.static(), problem.cluster.node_of_rank_G
        unlimited = {problem.replicas == "node": found}  # by whether replicas must stay in their node
        if problem.replicas == "any" and problem.cluster.num_nodes > 1:
            # A copy in another node takes longer to send, but the tokens of that node find it near: both ways compete.
            everywhere = self._variant(problem, static, np.arange(problem.N), np.zeros_like(node_G), False, UNLIMITED, UNLIMITED)
            compete(everywhere, done_N)
            unlimited[True] = self._variant(problem, static, np.arange(problem.N), node_G, True, UNLIMITED, UNLIMITED)
            compete(unlimited[True], done_N)
        for node_only, free in unlimited.items():
            cost = problem.cost.rows(problem, free)
            worth_N = done_N & (cost.transfer_s + cost.gradient_s > self.close * cost.total_s)
            last_N = np.full(problem.N, np.inf)
            for limit in sorted(self.fan_limits):
                if not worth_N.any():
                    break
                near = limit if node_only else self._near_limit(problem, limit)
                limited = self._variant(problem, static, np.flatnonzero(worth_N), node_G, node_only, near, limit)
                cost_N = compete(limited, worth_N)
                # With every limit copies take longer and skew falls: once their sum has turned, it keeps rising.
                worth_N &= cost_N < last_N
                last_N = cost_N
        return dataclasses.replace(best, stop_N=found.stop_N)

    def _near_limit(self, problem: Problem, far_limit: int) -> int:
        """As many copies inside the node as take the time of `far_limit` copies to other nodes."""
        if problem.replicas != "any" or problem.cluster.num_nodes == 1:
            return far_limit
        rates = problem.cost.rates(problem)
        return max(1, int(min(far_limit * rates.copy_rdma_s / rates.copy_peer_s, UNLIMITED)))

    def _variant(
        self, problem: Problem, static: Placement, row_I: Array, node_G: Array, node_only: bool, near: int, far: int
    ) -> Placement:
        """`static` but for the rows `row_I`: those from bare homes with at most `near` and `far` copies out of a home."""
        params = np.array([node_only, *self._params(near, far, False)], np.float64)
        expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
        load_IE, expert_IGS, quota_IGS = problem.load_NE[row_I], expert_NGS[row_I], quota_NGS[row_I]
        rows = self.rows()
        for_rows(lambda low, high: rows(low, high, load_IE, node_G, problem.B, params, expert_IGS, quota_IGS), len(row_I))
        expert_NGS[row_I], quota_NGS[row_I] = expert_IGS, quota_IGS
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
