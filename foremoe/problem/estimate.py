"""Linear estimates of the price of rows: in closed form, for starts, homes and sequences, and from below, for bounds.

The closed form averages exchanges and counts copies by rank; the price (`foremoe.problem.pricing`) does not. Constants come from
`Cluster`; unless ``cluster.calibrated`` they are data-sheet figures and every time is *model, uncalibrated*.
"""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.parallel import for_rows
from foremoe.machine.elements import pair_overhead_seconds
from foremoe.machine.window import window_seconds as layer_window_seconds
from foremoe.problem.cost import Cost
from foremoe.problem.exchange import pair_prices
from foremoe.problem.kernels.features import Features, Held, feature_rows
from foremoe.problem.laws import require_slots
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem, once
from foremoe.problem.rates import Rates, RowTimes

# Pricing a row takes less than a microsecond: in smaller blocks the calls would cost as much.
PRICED_PER_BLOCK = 1024

# Letters: N rows, M micro-steps, G ranks.


@once
def problem_rates(problem: Problem) -> Rates:
    """The coefficients of the closed form for `problem`, without what differs by row; worked out once and kept."""
    model, cluster = problem.model, problem.cluster
    backward, reforward = float(problem.schedule.trains), float(problem.schedule.reforward)
    gemm_passes = 1.0 + cluster.backward_ratio * backward + reforward
    comm_passes = 1.0 + backward + reforward
    # What host stores save is left to the path level: with their filling priced they hardly ever make a replica cheaper.
    copy_peer_s, copy_rdma_s, _ = cluster.copy_seconds(model.expert_bytes)
    gradient_peer_s, gradient_rdma_s = cluster.return_seconds(model.gradient_bytes)
    sends = 1.0 + backward
    contention = cluster.copy_contention / problem.G
    mean_s, peer_s, rdma_s, late_s = (2.0 * comm_passes * price for price in pair_prices(model, cluster))
    rates = Rates(
        hide_forward_s=0.0, hide_backward_s=0.0, pair_s=_pair_seconds(problem) * gemm_passes + late_s, late_s=late_s,
        mean_s=mean_s, slot_s=_slot_seconds(problem), fixed_s=2.0 * comm_passes * cluster.exchange_latency_s,
        peer_pair_s=peer_s, rdma_pair_s=rdma_s, copy_peer_s=copy_peer_s, copy_rdma_s=copy_rdma_s,
        gradient_peer_s=gradient_peer_s, gradient_rdma_s=gradient_rdma_s,
        replica_peer_s=contention * (sends * copy_peer_s + backward * gradient_peer_s),
        replica_rdma_s=contention * (sends * copy_rdma_s + backward * gradient_rdma_s),
        trains=problem.schedule.trains,
    )  # fmt: skip
    return problem.cost.adjust(rates)


@once
def row_times(problem: Problem) -> RowTimes:
    """What of the closed form differs by row; worked out once and kept."""
    cluster = problem.cluster
    backward, reforward = float(problem.schedule.trains), float(problem.schedule.reforward)
    window_N = np.repeat(window_seconds(problem).max(axis=1), problem.L)
    all_passes_N = (1.0 + cluster.window_backward_ratio * backward + reforward) * window_N
    mean_N = problem.load_NE.sum(axis=1, dtype=np.float64) / problem.G
    # With room to prefetch, copies also run under the balanced experts of the layer before. Not under more layers: those have
    # copies of their own on the same links.
    hide_N = problem.cost.overlap * (window_N + _pair_seconds(problem) * mean_N if problem.slot_depth > 1 else window_N)
    rates = problem_rates(problem)
    base_N = all_passes_N + (rates.mean_s - rates.late_s) * mean_N
    return RowTimes(all_passes_N, mean_N, base_N, hide_N, (cluster.backward_ratio + reforward) * hide_N)


def estimate_rows(problem: Problem, placement: Placement) -> Cost:
    """Cost of every row in closed form, [N], whatever the objective."""
    r, times = problem_rates(problem), row_times(problem)
    f = _features(problem, placement, r)
    # The slowest rank by compute and exchange together; what is not its compute is exchange.
    slowest_N = f.slowest_N - r.late_s * times.mean_N
    late_N = np.maximum(0.0, slowest_N - f.compute_N)
    pairs_N = r.mean_s * times.mean_N + r.peer_pair_s * f.peer_pairs_N + r.rdma_pair_s * f.rdma_pairs_N
    exchange_N = (r.fixed_s + pairs_N + late_N) / 2.0
    transfer_N = np.maximum(0.0, f.forward_s_N - times.hide_forward_N)
    back_N = np.maximum(0.0, f.backward_s_N - times.hide_backward_N)
    # Where weights and gradients share links in backward, what weights alone would leave exposed counts as theirs.
    weights_N = np.minimum(back_N, np.maximum(0.0, f.forward_s_N - times.hide_backward_N)) if r.trains else 0.0
    gradient_N = back_N - weights_N
    transfer_N = transfer_N + weights_N + r.replica_peer_s * f.peer_copies_N + r.replica_rdma_s * f.rdma_copies_N
    return Cost(
        window_s=times.window_N, dispatch_s=exchange_N, compute_s=slowest_N - late_N, combine_s=exchange_N,
        transfer_s=transfer_N, gradient_s=gradient_N,
    )  # fmt: skip


def window_seconds(problem: Problem) -> Array:
    """float64 [M, G]: seconds of one forward that precede a layer's experts: attention, and what every layer takes."""
    cluster = problem.cluster
    if problem.tokens_MG is None:
        return np.full((problem.M, problem.G), cluster.layer_overhead_s)
    squares_MG = 0.0 if problem.attention_MG is None else problem.attention_MG
    return layer_window_seconds(problem.model, cluster, problem.tokens_MG, squares_MG)


def _pair_seconds(problem: Problem) -> float:
    """Seconds of expert compute of one pair in one forward."""
    model, cluster = problem.model, problem.cluster
    return model.flops_per_pair / cluster.expert_flops_per_s + pair_overhead_seconds(model, cluster)


def _slot_seconds(problem: Problem) -> float:
    """Seconds of a busy slot in all passes."""
    forwards = 1.0 + problem.schedule.reforward
    return forwards * problem.cluster.slot_overhead_s + problem.schedule.trains * problem.cluster.backward_slot_s


def _features(problem: Problem, placement: Placement, rates: Rates) -> Features:
    """What the closed form needs of a placement."""
    expert_NGS, quota_NGS = placement.expert_NGS, placement.quotas_NGS
    require_slots(expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    held = Held(problem.home_LE, problem.cluster.node_of_rank_G, problem.B, expert_NGS, quota_NGS)
    counts = problem.counts()
    out = Features(*np.zeros((len(Features._fields), problem.N)))
    for_rows(lambda low, high: feature_rows(low, high, counts, held, rates, out), problem.N, PRICED_PER_BLOCK, whole=True)
    return out
