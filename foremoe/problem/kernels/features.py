"""Row kernel of the cost model: what the closed form needs to know of a placement, in one pass over the slots."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel

# Letters: N rows, L layers, G ranks, V nodes, E experts, S slots per rank, F features (see cost.FEATURES).


@kernel
def feature_rows(  # type: ignore[no-untyped-def]
    low,
    high,
    load_NE,
    load_NGE,
    demand_NVE,
    located,
    home_LE,
    node_G,
    num_base,
    expert_NGS,
    quota_NGS,
    pair_s,
    work_s,
    slot_s,
    out_NF,
):
    """Fills ``out_NF[low:high]``: seconds of the slowest rank at `pair_s`, and at `work_s`, per pair; pairs; pairs served on
    their own rank; inside their own node (own rank included); largest number of copies through one rank and direction on peer
    links; on RDMA links; copies by peer; copies by RDMA.

    A copy is any slot that holds, with a quota, an expert whose home is another rank. Without source ranks (``located``
    False) sources count as uniform.
    """
    G, S = expert_NGS.shape[1], expert_NGS.shape[2]
    E, L = load_NE.shape[1], home_LE.shape[0]
    num_nodes = 0
    for g in range(G):
        num_nodes = max(num_nodes, node_G[g] + 1)
    served_VE = np.zeros((num_nodes, E), np.int32)
    fan = np.zeros((4, G), np.int64)  # peer out, peer in, rdma out, rdma in
    ranks_V = np.zeros(num_nodes, np.int64)
    for g in range(G):
        ranks_V[node_G[g]] += 1
    for n in range(low, high):
        l = n % L  # noqa: E741
        served_VE[:] = 0
        fan[:] = 0
        pairs = 0
        for e in range(E):
            pairs += load_NE[n, e]
        local_pairs = 0.0
        node_pairs = 0.0
        slowest = 0.0
        compute = 0.0
        peer_copies = 0
        rdma_copies = 0
        for g in range(G):
            load = 0
            busy = 0
            node = node_G[g]
            for s in range(S):
                e = expert_NGS[n, g, s]
                if e < 0:
                    continue
                quota = quota_NGS[n, g, s]
                load += quota
                served_VE[node, e] += quota
                if quota > 0 or (s < num_base and load_NE[n, e] > 0):
                    busy += 1
                if located:
                    local_pairs += min(load_NGE[n, g, e], quota)
                home = home_LE[l, e] // num_base
                if home != g and quota > 0:
                    if node_G[home] == node:
                        peer_copies += 1
                        fan[0, home] += 1
                        fan[1, g] += 1
                    else:
                        rdma_copies += 1
                        fan[2, home] += 1
                        fan[3, g] += 1
            slowest = max(slowest, pair_s * load + slot_s * busy)
            compute = max(compute, work_s * load + slot_s * busy)
        if located:
            inside = np.int64(0)
            for node in range(num_nodes):
                demand_E, served_E = demand_NVE[n, node], served_VE[node]
                for e in range(E):
                    inside += min(demand_E[e], served_E[e])
            node_pairs += inside
        else:
            local_pairs = pairs / G
            for node in range(num_nodes):
                node_pairs += pairs * (ranks_V[node] / G) * (ranks_V[node] / G)
        peer_fan = 0
        rdma_fan = 0
        for g in range(G):
            peer_fan = max(peer_fan, max(fan[0, g], fan[1, g]))
            rdma_fan = max(rdma_fan, max(fan[2, g], fan[3, g]))
        out_NF[n, 0] = slowest
        out_NF[n, 1] = compute
        out_NF[n, 2] = pairs
        out_NF[n, 3] = local_pairs
        out_NF[n, 4] = node_pairs
        out_NF[n, 5] = peer_fan
        out_NF[n, 6] = rdma_fan
        out_NF[n, 7] = peer_copies
        out_NF[n, 8] = rdma_copies
