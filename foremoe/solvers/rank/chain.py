"""Chain: near-perfect balance with homes kept, by replicas that pass load on along chains and trees."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.problem.objective import problem_rates, row_objective, row_times
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver
from foremoe.solvers.kernels.chain import chain_row, chain_rows, inside_rows
from foremoe.solvers.kernels.polish import polish_rows
from foremoe.solvers.kernels.price import NUM_RATES
from foremoe.solvers.kernels.timed import UNLIMITED, timed_rows
from foremoe.solvers.rank.greedy import Greedy
from foremoe.solvers.rank.least_loaded import LeastLoaded
from foremoe.solvers.rank.lplb import Lplb
from foremoe.solvers.rank.quota import Quota

# Letters: N rows, G ranks, S slots per rank, V nodes, K rates.

# Changes of replicas that `polish` makes in a row.
STEPS = 500


@dataclass(frozen=True)
class Chain(RowSolver):
    """Settles one rank per replica: the emptiest rank is filled exactly to the target by a rank above it.

    The giver may fall below the target itself: its own slot is still free, so another rank fills it later, and replicas form
    chains and trees instead of stars. With one redundant slot per rank that is nearly always enough for a maximum load at its
    lower bound. Targets between that bound and the best maximum so far, and several orders of givers, are tried; each try ends
    with the exact split, so that its maximum is the least that its replicas allow. Replicas stay in their home's node where
    that costs no balance, and ranks of a node pass on what one larger replica brings in from another node.

    Under the objective ``"time"`` copies must pay, and where source ranks are known a replica also brings tokens nearer. Ranks
    are settled with as many copies per link as hide, then with more while less load may pay for them; across nodes, giver and
    expert are those whose tokens gain most. The last moves are taken back if they cost more than they save. Where that leaves
    load above the bound, each limit on copies per link is searched anew. All candidates, bare homes and the start are priced by
    the cost model's closed form; the cheapest stays. Small rows also try what `portfolio` finds. The method is our own.

    Attributes:
        tries: settlings per row, at least 1; most rows need one.
        spread: how far apart the weights of givers lie in repeated tries, in [0, 2).
        slack: a maximum load this share above the mean is good enough and takes fewer replicas, at least 0.
        relay: let node mates pass load on, to save replicas across nodes.
        portfolio: under ``"time"``, problems of at most this many experts times ranks also try `Greedy`, `Quota`, `LeastLoaded`
            and `Lplb`, which take a few microseconds there.
        polish: under ``"time"``, in problems of at most this many experts times ranks a search over sets of replicas with their
            cheapest quotas follows: a few milliseconds a row.
        inside: level ranks inside their nodes only, and keep the start's replicas across nodes: what follows
            ``NodeChain(max_per_rank=...)``. Copies are not priced then.
    """

    tries: int = 16
    spread: float = 0.6
    slack: float = 0.0
    relay: bool = True
    portfolio: int = 1024
    polish: int = 128
    inside: bool = False

    edit = staticmethod(chain_row)

    def __post_init__(self) -> None:
        if isinstance(self.tries, bool) or not isinstance(self.tries, int) or not 1 <= self.tries < 2**31:
            raise InputError(f"Chain needs tries of at least 1; got {self.tries!r}.")
        if not _real(self.spread) or not 0.0 <= self.spread < 2.0:
            raise InputError(f"Chain needs spread in [0, 2); got {self.spread!r}.")
        if not _real(self.slack) or not 0.0 <= self.slack < math.inf:
            raise InputError(f"Chain needs slack of at least 0; got {self.slack!r}.")
        for name in ("relay", "inside"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"Chain needs {name} True or False; got {getattr(self, name)!r}.")
        for name in ("portfolio", "polish"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"Chain needs {name} of at least 0; got {value!r}.")

    def rows(self) -> Callable[..., None]:
        """The compiled driver of `kernels.chain`."""
        return inside_rows if self.inside else chain_rows  # type: ignore[no-any-return]

    def params(self, problem: Problem) -> tuple[float, ...]:
        """What `chain_row` finds from ``params[1]`` on, without limits on copies."""
        return self.tries, self.spread, self.slack, UNLIMITED, UNLIMITED, self.relay, True

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows; rows that a cancel left out keep `start`."""
        if self.inside or problem.cost.objective == "balance":
            return super().solve(problem, start)
        expert_NGS, quota_NGS = start.expert_NGS.copy(), start.quotas_NGS.copy()
        params = np.array([problem.replicas == "node", *self.params(problem)], np.float64)
        _, load_NGE, demand_NVE, located = problem.counts()
        rate_NK, node_G = rates_of(problem), problem.cluster.node_of_rank_G

        def block(low: int, high: int) -> None:
            timed_rows(
                low, high, problem.load_NE, load_NGE, demand_NVE, located, node_G, problem.B, params, rate_NK, expert_NGS,
                quota_NGS,
            )  # fmt: skip

        done_N = for_rows(block, problem.N)
        found = Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=np.where(done_N, Stop.DONE, Stop.CANCELLED))
        size = problem.E * problem.G
        if size <= self.portfolio:
            found = self._against_portfolio(problem, found)
        if size > self.polish:
            return found
        expert_NGS, quota_NGS = found.expert_NGS.copy(), found.quotas_NGS.copy()
        node_only = problem.replicas == "node"

        def polish(low: int, high: int) -> None:
            polish_rows(
                low,
                high,
                STEPS,
                problem.load_NE,
                load_NGE,
                located,
                node_G,
                node_only,
                problem.B,
                rate_NK,
                expert_NGS,
                quota_NGS,
            )

        for_rows(polish, problem.N)
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=found.stop_N)

    def _against_portfolio(self, problem: Problem, found: Placement) -> Placement:
        """The cheaper of `found` and what other solvers make, row by row."""
        done_N = np.asarray(found.stop_N != Stop.CANCELLED)
        best, best_N = found, row_objective(problem, found)
        where = [problem]
        if problem.replicas == "any" and problem.cluster.num_nodes > 1:
            where.append(dataclasses.replace(problem, replicas="node"))
        for among in where:
            for solver in (Greedy(), Quota(), LeastLoaded(min_pairs=0, threshold=1.0), Lplb()):
                other = solver.solve(among, problem.static())
                other_N = row_objective(problem, other)
                better_N = done_N & (other_N < best_N)
                best, best_N = other.where(better_N, best), np.minimum(best_N, other_N)
        return dataclasses.replace(best, stop_N=found.stop_N)


def rates_of(problem: Problem) -> Array:
    """float64 [N, NUM_RATES]: the closed form's coefficients in the order of `kernels.price`."""
    r, times = problem_rates(problem), row_times(problem)
    one = [
        r.pair_s, r.slot_s, r.peer_pair_s, r.rdma_pair_s, r.copy_peer_s, r.copy_rdma_s, r.gradient_peer_s, r.gradient_rdma_s,
        r.replica_peer_s, r.replica_rdma_s, r.sends_backward, r.returns_gradients,
    ]  # fmt: skip
    out_NK = np.empty((problem.N, NUM_RATES))
    out_NK[:, : len(one)] = one
    out_NK[:, len(one)], out_NK[:, len(one) + 1] = times.hide_forward_N, times.hide_backward_N
    return out_NK


def _real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
