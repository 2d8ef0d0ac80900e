"""Prices of rows, which are the predicted times of a placement by part. The simulator uses the same formula.

Under the split law, dispatch and combine take as long as the busiest rank, link or NIC. Experts take as long as the slowest rank.
Only exposed copies cost time (`foremoe.problem.kernels.row_price`). Only the simulation models how rows delay each other.
"""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.parallel import for_rows
from foremoe.machine.cluster import Cluster
from foremoe.machine.elements import pair_overhead_seconds
from foremoe.problem.cost import Cost
from foremoe.problem.estimate import window_seconds
from foremoe.problem.kernels.row_price import Prices
from foremoe.problem.kernels.traffic import BY_NODE, BY_PAIR, SPREAD_BY_NODE, SPREAD_BY_PAIR, Ranks
from foremoe.problem.laws import require_slots
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem, once
from foremoe.problem.rows import Rows, price_rows

# Letters: N rows, G ranks, V nodes, E experts, L layers.

# Copies overlap with at most two of the rows before the one that needs them, which is the default of engines.
_AHEAD = 2


@once
def problem_prices(problem: Problem) -> Prices:
    """Returns the prices that apply to all rows of a problem. Cached on the problem."""
    model, cluster = problem.model, problem.cluster
    backward, reforward = float(problem.schedule.trains), float(problem.schedule.reforward)
    message_s = model.token_bytes / np.array([cluster.kernel_bytes_per_s, cluster.rdma_bytes_per_s])
    # A NIC that ranks share sends one copy after the other, each at its full bandwidth.
    latency_2 = np.array([cluster.peer_latency_s, cluster.rdma_latency_s])
    rate_2 = np.array([cluster.peer_bytes_per_s, cluster.rdma_bytes_per_s])
    copy_s = (model.expert_bytes / rate_2 + latency_2).tolist()
    gradient_s = (model.gradient_bytes / np.minimum(rate_2, cluster.return_bytes_per_s or np.inf) + latency_2).tolist()
    return Prices(
        gemm_s=model.flops_per_pair / cluster.expert_flops_per_s, pair_s=pair_overhead_seconds(model, cluster),
        slot_s=cluster.slot_overhead_s, forwards=1.0 + reforward, backward_ratio=backward * cluster.backward_ratio,
        slot_backward_s=backward * cluster.backward_slot_s, latency_s=cluster.exchange_latency_s,
        peer_s=float(message_s[0]), rdma_s=float(message_s[1]), exchange_passes=1.0 + backward + reforward,
        copy_peer_s=copy_s[0], copy_rdma_s=copy_s[1], gradient_peer_s=gradient_s[0], gradient_rdma_s=gradient_s[1],
        trains=backward, contention=cluster.copy_contention, overlap=problem.cost.overlap,
        rows_ahead=min(problem.slot_depth - 1, _AHEAD),
    )  # fmt: skip


@once
def problem_rows(problem: Problem) -> Rows:
    """Returns the rows of a problem in the form that compiled functions read. Cached on the problem."""
    cluster, home_LE = problem.cluster, (problem.home_LE // problem.B).astype(np.int64)
    backward, reforward = float(problem.schedule.trains), float(problem.schedule.reforward)
    once_N = np.repeat(window_seconds(problem).max(axis=1), problem.L)
    back = cluster.window_backward_ratio + reforward
    window_N3 = once_N[:, None] * np.array([1.0 + cluster.window_backward_ratio * backward + reforward, 1.0, back])
    spread = problem.load_NGE is None
    travel = (SPREAD_BY_PAIR if spread else BY_PAIR) if cluster.dispatch == "pairs" else SPREAD_BY_NODE if spread else BY_NODE
    ranks = ranks_of(cluster, travel, problem.model.num_topk)
    return Rows(problem.counts(), home_LE, problem.B, ranks, problem_prices(problem), window_N3)


def ranks_of(cluster: Cluster, travel: int, num_topk: int) -> Ranks:
    """Returns the ranks of a cluster. `travel` is one of the kinds of dispatch in `foremoe.problem.kernels.traffic`."""
    node_G, nic_G = cluster.node_of_rank_G.astype(np.int64), cluster.nic_of_rank_G.astype(np.int64)
    order_G = np.argsort(node_G, kind="stable")
    first_V = np.searchsorted(node_G[order_G], np.arange(cluster.num_nodes + 1))
    place_G = np.empty(len(node_G), np.int64)
    place_G[order_G] = np.arange(len(node_G)) - first_V[node_G[order_G]]
    forward_VG = order_G[first_V[:-1, None] + place_G % np.diff(first_V)[:, None]]
    forward_VG[node_G, np.arange(len(node_G))] = np.arange(len(node_G))
    return Ranks(node_G, order_G, first_V, nic_G, int(nic_G.max()) + 1, forward_VG, travel, num_topk, cluster.tile_pairs)


def row_objective(problem: Problem, placement: Placement) -> Array:
    """Returns the quantity that solvers minimise, float64 [N]: pairs of the busiest rank, or seconds for the objective "time"."""
    if problem.cost.objective == "balance":
        return placement.load_NG().max(axis=1).astype(np.float64)
    return price(problem, placement).total_s


def price(problem: Problem, placement: Placement) -> Cost:
    """Returns the predicted seconds of every row of a placement, [N], regardless of the problem's objective.

    Example:
        >>> static = foremoe.price(problem, problem.static())
        >>> planned = foremoe.price(problem, plan.placement)
        >>> bool((planned.compute_s < static.compute_s).all())
        True
    """
    expert_NGS, quota_NGS = placement.expert_NGS, placement.quotas_NGS
    require_slots(expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    rows, out_N5 = problem_rows(problem), np.zeros((problem.N, 5))
    for_rows(lambda low, high: price_rows(low, high, rows, expert_NGS, quota_NGS, out_N5), problem.N, whole=True)
    compute_N, exchange_N, forward_N, backward_N, slowed_N = out_N5.T
    return Cost(
        window_s=rows.window_N3[:, 0], dispatch_s=exchange_N / 2.0, compute_s=compute_N, combine_s=exchange_N / 2.0,
        transfer_s=forward_N + slowed_N, gradient_s=backward_N,
    )  # fmt: skip
