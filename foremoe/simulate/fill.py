"""How long the host stores take to fill, before the stage begins."""

import numpy as np

from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.problem.problem import Problem
from foremoe.simulate.nics import nic_of_rank

# Letters: C copies, F fills, Y NICs.


def fill_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds in which every node gets each expert that a plan sends by host there, once.

    The home rank writes its node's store; for other nodes it sends the expert over RDMA to the first rank that reads it, which
    writes it. All send, then all write, as `transfer.PinnedHost` publishes; nothing else runs meanwhile.
    """
    cluster, t = problem.cluster, plan.transfers
    by_host_C = np.flatnonzero(t.link_C == Link.HOST) if plan.executable else np.zeros(0, np.int64)
    if not len(by_host_C):
        return 0.0
    node_G, nic_G = cluster.node_of_rank_G, nic_of_rank(cluster)
    layer_C, expert_C, dst_C = (column[by_host_C].astype(np.int64) for column in (t.layer_C, t.expert_C, t.dst_C))
    place_C = (node_G[dst_C] * problem.L + layer_C) * problem.E + expert_C
    first_F = np.unique(place_C, return_index=True)[1]
    home_F, reader_F = plan.home_LE[layer_C[first_F], expert_C[first_F]] // plan.B, dst_C[first_F]
    crosses_F = node_G[home_F] != node_G[reader_F]
    num_bytes = problem.model.expert_bytes
    most_sent = max(np.bincount(nic_G[rank_F[crosses_F]], minlength=1).max() for rank_F in (home_F, reader_F))
    most_written = np.bincount(np.where(crosses_F, reader_F, home_F)).max()
    send_s = most_sent * num_bytes / cluster.rdma_bytes_per_s + cluster.rdma_latency_s * bool(most_sent)
    return float(send_s + most_written * num_bytes / cluster.host_bytes_per_s + cluster.host_latency_s)
