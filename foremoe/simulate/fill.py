"""What the host stores are filled with while the stage runs."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.problem.problem import Problem
from foremoe.simulate.state import Fills

# Letters: U uses, C copies, F fills.


def fill_inputs(problem: Problem, plan: Plan, start_C: Array, num_uses: int) -> tuple[Fills, Array]:
    """What brings every expert that a plan sends by host to the stores of its nodes, once each; int64 [C]: the fill that a copy
    reads, -1 for none.

    The home rank writes its node's store; for other nodes it sends the expert over RDMA to the first rank that reads it, which
    writes it, as `transfer.PinnedHost` does. A fill takes its links before the first copy that reads it, from `start_C` on.
    """
    t, fill_C = plan.transfers, np.full(len(start_C), -1)
    host_C = np.flatnonzero(t.link_C == Link.HOST) if len(start_C) else np.zeros(0, np.int64)
    layer_C, expert_C, dst_C = (column[host_C].astype(np.int64) for column in (t.layer_C, t.expert_C, t.dst_C))
    order_C = np.lexsort((dst_C, expert_C, layer_C, t.need_C[host_C]))
    place_C = (problem.cluster.node_of_rank_G[dst_C] * problem.L + layer_C) * problem.E + expert_C
    _, first_F, fill_of_C = np.unique(place_C[order_C], return_index=True, return_inverse=True)
    rank_F = np.argsort(first_F)  # fills in the order of need
    number_F = np.empty_like(rank_F)
    number_F[rank_F] = np.arange(len(rank_F))
    fill_C[host_C[order_C]] = number_F[fill_of_C]
    first_C = order_C[first_F[rank_F]]
    home_F = plan.home_LE[layer_C[first_C], expert_C[first_C]].astype(np.int64) // plan.B
    far_F = problem.cluster.node_of_rank_G[home_F] != problem.cluster.node_of_rank_G[dst_C[first_C]]
    start_F = np.full(len(home_F), num_uses)
    np.minimum.at(start_F, fill_C[host_C], start_C[host_C])
    by_start_F = np.argsort(start_F, kind="stable")
    return Fills(
        home_F=home_F, writer_F=np.where(far_F, dst_C[first_C], home_F), ahead_F=by_start_F,
        ahead_U=np.searchsorted(start_F[by_start_F], np.arange(num_uses + 1)), end_F=np.zeros(len(home_F)),
    ), fill_C  # fmt: skip
