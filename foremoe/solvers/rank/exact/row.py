"""One row of a problem as plain numbers: what the mixed-integer program of `Exact` is built from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.problem.bounds import load_bound, time_bound
from foremoe.problem.objective import problem_rates, row_times
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates

# Letters: N rows, L layers, G ranks, E experts.

Pair = tuple[int, int]  # (expert, rank that is not its home)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """What the program needs to know of one row.

    Attributes:
        load_E: pairs of every expert.
        home_E: its home rank.
        node_G: node of every rank.
        redundant: R.
        demand_GE: pairs by source rank, or None where they are unknown or the objective does not ask.
        rates: None under the objective balance.
        least_load: the largest rank load cannot be smaller.
        most_load: nor can it be larger in anything better than the start.
        window_s: the row's own entry of `base_N` in `RowTimes`.
        hide_forward_s: likewise.
        hide_backward_s: likewise.
    """

    load_E: Array
    home_E: Array
    node_G: Array
    redundant: int
    demand_GE: Array | None
    rates: Rates | None
    least_load: float
    most_load: float
    window_s: float = 0.0
    hide_forward_s: float = 0.0
    hide_backward_s: float = 0.0

    @property
    def unit(self) -> float:
        """One pair in units of the objective: 1 under balance, seconds under time."""
        return 1.0 if self.rates is None else self.rates.pair_s

    def pairs(self, node_only: bool) -> list[Pair]:
        """Every replica worth a variable: of an expert with load, off its home, and inside its home's node if so asked."""
        ranks = range(len(self.node_G))
        return [
            (int(e), g)
            for e in np.flatnonzero(self.load_E)
            for g in ranks
            if g != self.home_E[e] and (not node_only or self.node_G[g] == self.node_G[self.home_E[e]])
        ]


def rows_of(problem: Problem, objective_N: Array) -> Callable[[int], Row]:
    """A function from row number to its `Row`; `objective_N` is what the start has reached."""
    time = problem.cost.objective == "time"
    rates = problem_rates(problem) if time else None
    least_N = load_bound(problem)
    # Seconds that all parts but compute and window take at least.
    rest_N = None if rates is None else time_bound(problem, rates._replace(pair_s=0.0, slot_s=0.0), least_N)
    times = None if rates is None else row_times(problem)
    home_LE = problem.home_LE // problem.B

    def row(n: int) -> Row:
        window_s = 0.0 if times is None else float(times.base_N[n])
        most_load = float(objective_N[n])
        if rates is not None and rest_N is not None:
            most_load = (most_load - window_s - float(rest_N[n])) / rates.pair_s
        return Row(
            load_E=problem.load_NE[n].astype(np.int64),
            home_E=home_LE[n % problem.L],
            node_G=problem.cluster.node_of_rank_G,
            redundant=problem.R,
            demand_GE=problem.load_NGE[n].astype(np.int64) if time and problem.load_NGE is not None else None,
            rates=rates,
            least_load=float(least_N[n]),
            most_load=math.floor(most_load * (1.0 + 1e-9) + 1e-6),
            window_s=window_s,
            hide_forward_s=0.0 if times is None else float(times.hide_forward_N[n]),
            hide_backward_s=0.0 if times is None else float(times.hide_backward_N[n]),
        )

    return row
