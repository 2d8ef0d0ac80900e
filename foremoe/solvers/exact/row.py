"""One row of a problem as plain numbers: what the mixed-integer program of `Exact` is built from."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.problem.bounds import load_bound, time_bound
from foremoe.problem.estimate import bound_rates
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates

# Letters: N rows, L layers, G ranks, E experts.

Pair = tuple[int, int]  # (expert, rank that is not its home)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """What the program needs to know of one row."""

    load_E: Array  # pairs of every expert
    home_E: Array  # its home rank
    node_G: Array  # node of every rank
    redundant: int  # R
    demand_GE: Array | None  # pairs by source rank, or None where they are unknown or the objective does not ask
    rates: Rates | None  # None under the objective balance
    least_load: float  # the largest rank load cannot be smaller
    most_load: float  # nor can it be larger in anything better than the start
    window_s: float  # this and the next two: the row's own entries in `RowTimes`
    hide_forward_s: float
    hide_backward_s: float

    @property
    def unit(self) -> float:
        """One pair in units of the objective: 1 under balance, seconds under time."""
        return 1.0 if self.rates is None else self.rates.pair_s

    def pairs(self, node_only: bool) -> list[Pair]:
        """Every replica worth a variable: of an expert with load, off its home, and inside its home's node if so asked."""
        home_E, node_G = self.home_E, self.node_G
        may_EG = (self.load_E[:, None] > 0) & (home_E[:, None] != np.arange(len(node_G)))
        if node_only:
            may_EG &= node_G[home_E][:, None] == node_G
        return [(int(e), int(g)) for e, g in zip(*np.nonzero(may_EG), strict=True)]


def rows_of(problem: Problem, objective_N: Array) -> Callable[[int], Row]:
    """A function from row number to its `Row`; `objective_N` is what the start has reached."""
    least_N, home_LE = load_bound(problem), problem.home_LE // problem.B
    rates = load_NGE = None
    window_N = rest_N = hide_forward_N = hide_backward_N = np.zeros(problem.N)
    if problem.cost.objective == "time":
        (rates, times), load_NGE = bound_rates(problem), problem.load_NGE
        window_N, hide_forward_N, hide_backward_N = times.base_N, times.hide_forward_N, times.hide_backward_N
        # Seconds that all parts but compute and window take at least.
        rest_N = time_bound(problem, rates._replace(pair_s=0.0, slot_s=0.0), times, least_N)
    most_N = (objective_N - window_N - rest_N) / (1.0 if rates is None else rates.pair_s)

    def row(n: int) -> Row:
        return Row(
            load_E=problem.load_NE[n].astype(np.int64), home_E=home_LE[n % problem.L], node_G=problem.cluster.node_of_rank_G,
            redundant=problem.R, demand_GE=None if load_NGE is None else load_NGE[n].astype(np.int64), rates=rates,
            least_load=float(least_N[n]), most_load=math.floor(most_N[n] * (1.0 + 1e-9) + 1e-6), window_s=float(window_N[n]),
            hide_forward_s=float(hide_forward_N[n]), hide_backward_s=float(hide_backward_N[n]),
        )  # fmt: skip

    return row
