"""Rough prices of rows, for starts, homes, foresight and links. The exact prices are in `foremoe.problem.pricing`.

Exchanges are averaged, and copies are counted by rank. Constants come from `Cluster`. Unless ``cluster.calibrated`` is set, these
constants are data-sheet figures, and every time is *model, uncalibrated*.
"""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.elements import pair_overhead_seconds
from foremoe.machine.window import window_seconds as layer_window_seconds
from foremoe.problem.exchange import pair_prices
from foremoe.problem.problem import Problem, once
from foremoe.problem.rates import Rates, RowTimes

# Letters: N rows, M micro-steps, G ranks.


@once
def problem_rates(problem: Problem) -> Rates:
    """Returns the coefficients of `problem` that are the same for all rows. Cached on the problem."""
    model, cluster = problem.model, problem.cluster
    backward, reforward = float(problem.schedule.trains), float(problem.schedule.reforward)
    gemm_passes = 1.0 + cluster.backward_ratio * backward + reforward
    comm_passes = 1.0 + backward + reforward
    # Savings from host stores are left to the path level. Because stores must be filled, they seldom make a replica cheaper.
    copy_peer_s, copy_rdma_s, _ = cluster.copy_seconds(model.expert_bytes)
    gradient_peer_s, gradient_rdma_s = cluster.return_seconds(model.gradient_bytes)
    sends = 1.0 + backward
    contention = cluster.copy_contention / problem.G
    peer_s, rdma_s, late_s = (2.0 * comm_passes * price for price in pair_prices(model, cluster))
    rates = Rates(
        hide_forward_s=0.0, hide_backward_s=0.0, pair_s=_pair_seconds(problem) * gemm_passes + late_s,
        slot_s=_slot_seconds(problem), peer_pair_s=peer_s, rdma_pair_s=rdma_s, copy_peer_s=copy_peer_s, copy_rdma_s=copy_rdma_s,
        gradient_peer_s=gradient_peer_s, gradient_rdma_s=gradient_rdma_s,
        replica_peer_s=contention * (sends * copy_peer_s + backward * gradient_peer_s),
        replica_rdma_s=contention * (sends * copy_rdma_s + backward * gradient_rdma_s),
        trains=problem.schedule.trains,
    )  # fmt: skip
    return problem.cost.adjust(rates)


@once
def row_times(problem: Problem) -> RowTimes:
    """Returns, for each row, the time during which copies can overlap with computation. Cached on the problem."""
    window_N = np.repeat(window_seconds(problem).max(axis=1), problem.L)
    mean_N = problem.load_NE.sum(axis=1, dtype=np.float64) / problem.G
    # With several buffers, copies also overlap with the balanced experts of the layer before. They do not overlap with earlier
    # layers, which have copies of their own on the same links.
    hide_N = problem.cost.overlap * (window_N + _pair_seconds(problem) * mean_N if problem.slot_depth > 1 else window_N)
    return RowTimes(hide_N, (problem.cluster.backward_ratio + float(problem.schedule.reforward)) * hide_N)


def window_seconds(problem: Problem) -> Array:
    """Returns the seconds of attention and overhead before the experts of a layer in one forward pass, float64 [M, G]."""
    cluster = problem.cluster
    if problem.tokens_MG is None:
        return np.full((problem.M, problem.G), cluster.layer_overhead_s)
    squares_MG = 0.0 if problem.attention_MG is None else problem.attention_MG
    return layer_window_seconds(problem.model, cluster, problem.tokens_MG, squares_MG)


def _pair_seconds(problem: Problem) -> float:
    """Returns the seconds of expert compute of one pair in one forward pass."""
    model, cluster = problem.model, problem.cluster
    return model.flops_per_pair / cluster.expert_flops_per_s + pair_overhead_seconds(model, cluster)


def _slot_seconds(problem: Problem) -> float:
    """Returns the seconds that a busy slot adds over all passes."""
    forwards = 1.0 + problem.schedule.reforward
    return forwards * problem.cluster.slot_overhead_s + problem.schedule.trains * problem.cluster.backward_slot_s
