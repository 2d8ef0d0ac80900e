"""Lower bounds for each row of the largest rank load and of the objective. They hold for all placements that keep the homes."""

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.parallel import for_rows
from foremoe.problem.kernels.least_max import settle_rows
from foremoe.problem.kernels.load_bound import Homes, load_bound_rows
from foremoe.problem.pricing import problem_prices, problem_rows
from foremoe.problem.problem import Problem, once

# Letters: N rows.


@once
def load_bound(problem: Problem) -> Array:
    """Returns a lower bound of the largest rank load of every row, whole numbers as float64 [N]. Cached on the problem."""
    bound_N, homes = np.zeros(problem.N, np.int64), _homes(problem)
    for_rows(lambda low, high: load_bound_rows(low, high, problem.load_NE, homes, bound_N), problem.N, whole=True)
    return frozen_array(bound_N, np.float64, "load_bound_N")


def settled_load_bound(problem: Problem, reached_N: Array) -> Array:
    """Returns `load_bound`, tightened with the loads that a placement reaches, float64 [N].

    A tightened bound equals the entry of `reached_N` if that load is optimal. If not, the bound is within 0.5 % of the optimum.

    Args:
        reached_N: Largest rank load of some placement, float64 [N]. Rows more than 6 % above their bound are not tightened.
            Tightening also requires one redundant slot per rank and that an expert can have replicas on at most 8 ranks. It takes
            0.1 ms per row if the placement is optimal.
    """
    bound_N, homes = load_bound(problem).copy(), _homes(problem)
    for_rows(lambda low, high: settle_rows(low, high, problem.load_NE, homes, reached_N, bound_N), problem.N, whole=True)
    return frozen_array(bound_N, np.float64, "load_bound_N")


@once
def row_bound(problem: Problem) -> Array:
    """Returns a lower bound of the objective of every row, float64 [N]. Cached on the problem.

    For the objective ``"time"``, the bound is the sum of the window, the latency of exchanges and the compute time of
    `load_bound` pairs. Transfers are not included.
    """
    if problem.cost.objective == "balance":
        return load_bound(problem)
    prices = problem_prices(problem)
    pair_s = (prices.forwards + prices.backward_ratio) * (prices.gemm_s + prices.pair_s)
    fixed_s = 2.0 * prices.exchange_passes * prices.latency_s * (problem.G > 1)
    bound_N = problem_rows(problem).window_N3[:, 0] + fixed_s + pair_s * load_bound(problem)
    # The bound adds up in another order than the prices, so it is lowered by some units in the last place.
    return frozen_array(bound_N * (1.0 - 1e-12), np.float64, "row_bound_N")


def _homes(problem: Problem) -> Homes:
    return Homes(problem.base_NGB, problem.cluster.node_of_rank_G, problem.replicas == "node", problem.R)
