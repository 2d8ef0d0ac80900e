"""Lower bounds of every row that hold for every placement that keeps the homes: on the largest rank load, on the objective."""

import numpy as np

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.parallel import for_rows
from foremoe.problem.estimate import bound_rates
from foremoe.problem.kernels.least_max import settle_rows
from foremoe.problem.kernels.load_bound import load_bound_rows
from foremoe.problem.kernels.time_bound import Homes, time_bound_rows
from foremoe.problem.problem import Problem, once
from foremoe.problem.rates import Rates, RowTimes

# Letters: N rows.


@once
def load_bound(problem: Problem) -> Array:
    """Lower bound of the largest rank load of every row, float64 [N], whole numbers; cached on the problem."""
    return frozen_array(_load_bound(problem, _homes(problem)), np.float64, "load_bound_N")


def settled_load_bound(problem: Problem, reached_N: Array) -> Array:
    """float64 [N]: `load_bound`, raised to `reached_N` where that is the least, or to 0.5 % below the least.

    Args:
        reached_N: Largest rank load of some placement, float64 [N]. Only rows up to 6 % above their bound are worked on, with one
            redundant slot per rank and replicas among at most 8 ranks: 0.1 ms each if the placement is the best.
    """
    bound_N, homes = load_bound(problem).copy(), _homes(problem)
    for_rows(lambda low, high: settle_rows(low, high, problem.load_NE, homes, reached_N, bound_N), problem.N, whole=True)
    return frozen_array(bound_N, np.float64, "load_bound_N")


@once
def row_bound(problem: Problem) -> Array:
    """Lower bound of the objective of every row, float64 [N]; cached on the problem."""
    if problem.cost.objective == "balance":
        return load_bound(problem)
    rates, times = bound_rates(problem)
    return frozen_array(seconds_bound(problem, rates, times, load_bound(problem)), np.float64, "row_bound_N")


def seconds_bound(problem: Problem, rates: Rates, times: RowTimes, load_bound_N: Array) -> Array:
    """float64 [N], seconds: no row takes less at `rates`, all parts together."""
    # Rounding: the bound adds up in another order than prices, so it gives way by some units in the last place.
    bound_N = times.base_N + time_bound(problem, rates, times, load_bound_N)
    return bound_N - 1e-12 * (np.abs(times.base_N) + np.abs(bound_N))


def time_bound(problem: Problem, rates: Rates, times: RowTimes, load_bound_N: Array) -> Array:
    """float64 [N], seconds: all parts of a row but ``base_N`` sum up to no less at `rates`."""
    bound_N, counts, homes = np.zeros(problem.N), problem.counts(), _homes(problem)
    one_node = problem.cluster.node_of_rank_G.max() == 0
    near_bound_N = load_bound_N if homes.node_only or one_node else _load_bound(problem, homes._replace(node_only=True))
    load_2N = np.stack([load_bound_N, near_bound_N]).astype(np.float64)
    for_rows(
        lambda low, high: time_bound_rows(low, high, counts, homes, rates, times, load_2N, bound_N), problem.N, whole=True
    )  # fmt: skip
    return bound_N


def _load_bound(problem: Problem, homes: Homes) -> Array:
    bound_N = np.zeros(problem.N, np.int64)
    for_rows(lambda low, high: load_bound_rows(low, high, problem.load_NE, *homes, bound_N), problem.N, whole=True)
    return bound_N


def _homes(problem: Problem) -> Homes:
    return Homes(problem.base_NGB, problem.cluster.node_of_rank_G, problem.replicas == "node", problem.R)
