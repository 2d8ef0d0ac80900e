"""Lower bounds of every row that hold for every placement that keeps the homes: on the largest rank load, on seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.parallel import for_rows

if TYPE_CHECKING:
    from foremoe.problem.cost import Rates
    from foremoe.problem.problem import Problem

# Letters: N rows, V nodes, E experts.

# The figures of `Rates` that `time_bound_rows` reads, in its order.
RATES = (
    "pair_s", "slot_s", "fixed_s", "peer_pair_s", "rdma_pair_s", "copy_peer_s", "copy_rdma_s", "gradient_peer_s",
    "gradient_rdma_s", "replica_peer_s", "replica_rdma_s", "sends_backward", "returns_gradients",
)  # fmt: skip


def load_bound(problem: Problem) -> Array:
    """int64 [N]: the largest rank load is no smaller."""
    from foremoe.problem.kernels.load_bound import load_bound_rows  # solvers import the cost model, which imports this file

    bound_N = np.zeros(problem.N, np.int64)
    base_NGB, node_G, node_only = problem.base_NGB, problem.cluster.node_of_rank_G, problem.replicas == "node"
    for_rows(
        lambda low, high: load_bound_rows(low, high, problem.load_NE, base_NGB, node_G, node_only, problem.R, bound_N),
        problem.N,
        whole=True,
    )
    return bound_N


def time_bound(problem: Problem, rates: Rates, load_bound_N: Array) -> Array:
    """float64 [N], seconds: all parts of a row but its window sum up to no less.

    Args:
        load_bound_N: pairs, as `load_bound`.
    """
    from foremoe.problem.kernels.time_bound import time_bound_rows

    bound_N = np.zeros(problem.N)
    base_NGB, node_G, node_only = problem.base_NGB, problem.cluster.node_of_rank_G, problem.replicas == "node"
    load_NGE, demand_NVE, located = problem.sources()
    figures = np.array([getattr(rates, name) for name in RATES], np.float64)
    hide_N2 = np.stack([rates.hide_forward_N, rates.hide_backward_N], axis=1)
    load_bound_N = np.asarray(load_bound_N, np.float64)

    def block(low: int, high: int) -> None:
        time_bound_rows(
            low, high, problem.load_NE, load_NGE, demand_NVE, located, base_NGB, node_G, node_only, problem.R, figures, hide_N2,
            load_bound_N, bound_N,
        )  # fmt: skip

    for_rows(block, problem.N, whole=True)
    return bound_N
