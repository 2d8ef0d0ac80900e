"""The busiest ranks and NICs of an exchange."""

from foremoe.base.compiled import kernel

# Letters: G ranks, Y NICs.


@kernel
def add_row(n, peer_2G, rdma_2G, rows, seconds_2, nic_2Y, total_2G):
    """Writes how many seconds the busiest rank and NIC of row `n` work, and adds the row's weighted traffic to `total_2G`.

    `seconds_2` has the seconds that one pair or message takes, by link class. `nic_2Y` is scratch space.
    """
    nic_2Y[:] = 0
    for g in range(peer_2G.shape[1]):
        for way in range(2):
            nic_2Y[way, rows.nic_G[g]] += rdma_2G[way, g]
            total_2G[0, g] += rows.weight_N[n] * peer_2G[way, g]
            total_2G[1, g] += rows.weight_N[n] * rdma_2G[way, g]
    rows.busy_N2[n, 0] = peer_2G.max() * seconds_2[0]
    rows.busy_N2[n, 1] = nic_2Y.max() * seconds_2[1]
