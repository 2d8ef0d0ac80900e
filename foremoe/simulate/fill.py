"""Fills of the host stores, which take place while the stage runs."""

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.problem import Problem
from foremoe.simulate.state import Fills

# Letters: C copies, H copies from host stores, F fills.


def fill_inputs(problem: Problem, plan: Plan, t: TransferList) -> tuple[Fills, Array]:
    """Returns the fills of the host stores, and the fill that each copy reads (or -1 if it reads none), int64 [C].

    Each expert is stored once per node. The home rank writes the expert to the store of its own node. For another node, the home
    rank sends the expert over RDMA to the first rank that reads it there. That rank writes the expert to the store, as in
    `transfer.PinnedHost`.
    """
    by_host_H = np.flatnonzero(t.link_C == Link.HOST)
    layer_H, expert_H, dst_H = (column_C[by_host_H].astype(np.int64) for column_C in (t.layer_C, t.expert_C, t.dst_C))
    order_H = order_of(t.need_C[by_host_H], dst_H)
    node_G = problem.cluster.node_of_rank_G
    place_H = (node_G[dst_H] * problem.L + layer_H) * problem.E + expert_H
    _, first_F, fill_H = np.unique(place_H[order_H], return_index=True, return_inverse=True)
    fill_C = np.full(len(t), -1)
    fill_C[by_host_H[order_H]] = fill_H
    first_F = order_H[first_F]
    home_F, reader_F = plan.home_LE[layer_H[first_F], expert_H[first_F]].astype(np.int64) // plan.B, dst_H[first_F]
    writer_F = np.where(node_G[home_F] == node_G[reader_F], home_F, reader_F)
    return Fills(home_F, writer_F, np.full(len(home_F), -1.0)), fill_C
