"""The NICs that ranks share, and what of an exchange is busiest."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.machine.cluster import Cluster

# Letters: G ranks, Y NICs.


def nic_of_rank(cluster: Cluster) -> Array:
    """int64 [G]: the NIC of every rank; `nic_sharing` ranks of a node share one, in rank order."""
    nic_G = np.empty(cluster.num_ranks, np.int64)
    first = 0
    for node in range(cluster.num_nodes):
        ranks = np.flatnonzero(cluster.node_of_rank_G == node)
        nic_G[ranks] = first + np.arange(len(ranks)) // cluster.nic_sharing
        first = int(nic_G[ranks].max()) + 1
    return nic_G


@kernel
def add_row(n, peer_2G, rdma_2G, rows, seconds_2, nic_2Y, total_2G):
    """Writes how long row `n` keeps its busiest rank and NIC busy, and adds its traffic to `total_2G` with its weight.

    `seconds_2` are those of one pair or message by link class; `nic_2Y` is scratch.
    """
    nic_2Y[:] = 0
    for g in range(peer_2G.shape[1]):
        for way in range(2):
            nic_2Y[way, rows.nic_G[g]] += rdma_2G[way, g]
            total_2G[0, g] += rows.weight_N[n] * peer_2G[way, g]
            total_2G[1, g] += rows.weight_N[n] * rdma_2G[way, g]
    rows.busy_N2[n, 0] = peer_2G.max() * seconds_2[0]
    rows.busy_N2[n, 1] = nic_2Y.max() * seconds_2[1]
