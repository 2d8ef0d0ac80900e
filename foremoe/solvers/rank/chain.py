"""Chain: near-perfect balance with homes kept, by replicas that pass load on along chains and trees."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.errors import InputError
from foremoe.base.fields import flag, real, whole
from foremoe.base.parallel import for_rows
from foremoe.problem.bounds import loose_row_bound
from foremoe.problem.objective import row_objective
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers.base import RowSolver, edit_rows, require_start
from foremoe.solvers.kernels.chain import Options, chain_row, chain_rows, inside_rows
from foremoe.solvers.kernels.rows import problem_rows
from foremoe.solvers.kernels.timed import cheaper_rows, timed_rows
from foremoe.solvers.rank.greedy import Greedy
from foremoe.solvers.rank.least_loaded import LeastLoaded
from foremoe.solvers.rank.lplb import Lplb
from foremoe.solvers.rank.quota import Quota

# Letters: N rows, I some rows, C candidates, G ranks, S slots per rank.

# A row whose cost exceeds its lower bound by no more than this share tries no portfolio: nothing is left to save. In large
# problems it takes several times as long as the row itself, and finds over 1 % only in rows further above their bound.
GAP, LARGE_GAP = 0.01, 0.07


@dataclass(frozen=True)
class Chain(RowSolver):
    """Settles one rank per replica: the emptiest rank is filled exactly to the target by a rank above it.

    The giver may fall below the target itself: its own slot is still free, so another rank fills it later, and replicas form
    chains and trees instead of stars. With one redundant slot per rank that is nearly always enough for a maximum load at its
    lower bound. Targets between that bound and the best maximum so far, and several orders of givers, are tried; the exact split
    ends each try. Replicas stay in their home's node where that costs no balance, and ranks of a node pass on what one larger
    replica brings in from another node.

    Under the objective ``"time"`` copies must pay, and where source ranks are known a replica also brings tokens nearer. Ranks
    are settled with as many copies per link as hide, then with more while less load may pay for them; across nodes, giver and
    expert are those whose tokens gain most. On two to four nodes, replicas are also chosen for all ranks at once: every node gets
    the experts that its tokens want most, at prices that level the ranks. Last moves that cost more than they save are taken
    back. Where load stays above the goal, the best replicas get the cheapest quotas that exist for them; where it still does,
    each limit on copies per link is searched anew. Of all candidates, bare homes and the start, the cheapest by the cost model's
    closed form stays. The method is our own.

    Attributes:
        tries: settlings per row, at least 1; most rows need one.
        spread: how far apart the weights of givers lie in repeated tries, in [0, 2).
        slack: a maximum load this share above the mean is good enough and takes fewer replicas, at least 0.
        relay: let node mates pass load on, to save replicas across nodes.
        portfolio: under ``"time"``, rows that cost over 1 % more than their lower bound also try `Chain` by load alone, `Greedy`,
            `Quota`, `LeastLoaded` and `Lplb`, in problems of at most this many experts times ranks; over 7 % more in larger
            ones. 0: none does.
        inside: level ranks inside their nodes only, and keep the start's replicas across nodes: what follows
            ``NodeChain(max_per_rank=...)``. Copies are not priced then.
    """

    tries: int = 16
    spread: float = 0.6
    slack: float = 0.0
    relay: bool = True
    portfolio: int = 1024
    inside: bool = False

    edit = staticmethod(chain_row)
    Options = Options

    def __post_init__(self) -> None:
        whole(self.tries, "tries of Chain", 1, 2**31 - 1)
        whole(self.portfolio, "portfolio of Chain", 0)
        real(self.slack, "slack of Chain", open_low=False)
        if real(self.spread, "spread of Chain", open_low=False) >= 2.0:
            raise InputError(f"spread of Chain must lie in [0, 2); got {self.spread!r}.")
        for name in ("relay", "inside"):
            flag(getattr(self, name), f"{name} of Chain")

    @property
    def rows(self) -> Any:  # type: ignore[override]
        """The compiled driver of `kernels.chain`."""
        return inside_rows if self.inside else chain_rows

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Runs the row function over all rows; rows that a cancel left out keep `start`."""
        require_start(problem, start)
        if self.inside or problem.cost.objective == "balance":
            return super().solve(problem, start)
        rows, options = problem_rows(problem), self.options(problem.replicas == "node", problem)
        found = edit_rows(start, lambda low, high, *placement: timed_rows(low, high, rows, options, *placement))
        return self._against_portfolio(problem, found) if self.portfolio else found

    def _against_portfolio(self, problem: Problem, found: Placement) -> Placement:
        """The cheaper of `found` and what other solvers make, row by row, where `found` is above its lower bound."""
        node_only = problem.replicas == "node"
        found_N, gap = row_objective(problem, found), GAP if self.portfolio >= problem.E * problem.G else LARGE_GAP
        open_I = np.flatnonzero((found.stop_N != Stop.CANCELLED) & (found_N > (1.0 + gap) * loose_row_bound(problem)))
        if open_I.size == 0:
            return found
        rows, start, load_IE = problem_rows(problem), problem.static().cut(N=open_I), problem.load_NE[open_I]
        load_IE.flags.writeable = False  # as a problem's load is: kernels compile once for both
        solvers = (self, Greedy(), Quota(), LeastLoaded(min_pairs=0, threshold=1.0), Lplb())
        others = [solver.run(problem, node_only, load_IE, start) for solver in solvers]
        expert_CIGS, quota_CIGS = np.stack([o.expert_NGS for o in others]), np.stack([o.quotas_NGS for o in others])
        expert_NGS, quota_NGS = found.expert_NGS.copy(), found.quotas_NGS.copy()
        for_rows(
            lambda low, high: cheaper_rows(low, high, rows, open_I, expert_CIGS, quota_CIGS, expert_NGS, quota_NGS),
            open_I.size, whole=True,
        )  # fmt: skip
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS, stop_N=found.stop_N)
