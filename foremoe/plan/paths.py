"""Which link every weight copy takes, and from which rank, so that the copies of a use are in place as early as possible."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.machine.cluster import Cluster
from foremoe.plan.transfers import Link, TransferList

# Letters: L layers, G ranks, E experts, S slots, R redundant slots, C copies, K = L*E experts of all layers, Z what lands in
# buffers (residents, then copies).

_PEER, _RDMA, _HOST = int(Link.PEER), int(Link.RDMA), int(Link.HOST)


def copy_seconds(cluster: Cluster, expert_bytes: int) -> tuple[float, float, float]:
    """Seconds of one copy of an expert by `Link`: peer, RDMA, host."""
    return (
        expert_bytes / cluster.peer_bytes_per_s + cluster.peer_latency_s,
        expert_bytes / cluster.rdma_bytes_per_s_per_rank + cluster.rdma_latency_s,
        # A cluster without a host store has no host bandwidth.
        expert_bytes / cluster.host_bytes_per_s + cluster.host_latency_s if cluster.host_bytes_per_s > 0 else np.inf,
    )


def choose_paths(
    transfers: TransferList,
    home_LE: Array,
    cluster: Cluster,
    expert_bytes: int,
    allowed: Collection[Link] = tuple(Link),
    *,
    relay: int = 0,
    buffers_per_pool: int = 0,
    resident_LGS: Array | None = None,
) -> TransferList:
    """The copies with `link_C` and `src_C` as `Deadline` chooses them.

    Args:
        allowed: The paths there are. A copy for which there is none keeps that of the link to its home rank.
        relay: See `Deadline`.
        resident_LGS: What slots hold at the start, in pools of `buffers_per_pool`; only for relays.
    """
    L, E = home_LE.shape
    base = E // cluster.num_ranks
    home_C = home_LE[transfers.layer_C, transfers.expert_C] // base
    link_C, src_C = np.empty(len(transfers), np.uint8), home_C.astype(np.int16)
    order_C = np.argsort(transfers.need_C, kind="stable")
    seconds = np.array(copy_seconds(cluster, expert_bytes))
    seconds[[path for path in Link if path not in allowed]] = np.inf
    links = order_C, transfers.need_C, home_C, transfers.dst_C, cluster.node_of_rank_G, seconds
    if relay:
        held_Z = _held(transfers, E, resident_LGS, base, buffers_per_pool)
        _choose_with_relays(*links, int(relay), L * E, *held_Z, link_C, src_C)
    else:
        _choose(*links, link_C)
    src_C[link_C == Link.HOST] = -1
    return transfers.replace(link_C=link_C, src_C=src_C)


def _held(t: TransferList, num_experts: int, resident_LGS: Array | None, base: int, pool: int) -> tuple[Array, Array, Array]:
    """What lands in buffers, residents first: layer * E + expert, the rank, and the use until which it certainly stays."""
    at_L, at_G, at_R = np.nonzero(resident_LGS[:, :, base:] >= 0) if resident_LGS is not None else (np.zeros(0, np.int64),) * 3
    held = at_L if resident_LGS is None else resident_LGS[at_L, at_G, base + at_R]
    columns = (at_L, t.layer_C), (held, t.expert_C), (at_G, t.dst_C), (at_L * pool + at_R, t.buffer_C)
    layer_Z, expert_Z, rank_Z, buffer_Z = (np.concatenate(pair).astype(np.int64) for pair in columns)
    need_Z, after_Z = (np.concatenate([np.full(len(held), -1), column_C]) for column_C in (t.need_C, t.after_C))
    order_Z = np.lexsort((need_Z, buffer_Z, rank_Z))
    this_Z, next_Z = order_Z[:-1], order_Z[1:]
    same = (rank_Z[this_Z] == rank_Z[next_Z]) & (buffer_Z[this_Z] == buffer_Z[next_Z])
    until_Z = np.full(len(need_Z), np.iinfo(np.int64).max)
    until_Z[this_Z[same]] = after_Z[next_Z[same]]
    return layer_Z * num_experts + expert_Z, rank_Z, until_Z


@kernel
def _choose(order_C, need_C, home_C, dst_C, node_G, seconds, link_C):  # type: ignore[no-untyped-def]
    G = node_G.size
    egress = np.zeros((2, G))  # by link class: the time at which a rank's link is free again
    ingress = np.zeros((2, G))
    host_G = np.zeros(G)
    need = np.int64(-1)
    for c in order_C:
        if need_C[c] != need:
            need = np.int64(need_C[c])
            egress[:] = 0.0
            ingress[:] = 0.0
            host_G[:] = 0.0
        src, dst = home_C[c], dst_C[c]
        link = _PEER if node_G[src] == node_G[dst] else _RDMA
        by_rank = max(egress[link, src], ingress[link, dst]) + seconds[link]
        by_host = host_G[dst] + seconds[_HOST]
        if by_host < by_rank:
            link_C[c] = _HOST
            host_G[dst] = by_host
        else:
            link_C[c] = link
            egress[link, src] = by_rank
            ingress[link, dst] = by_rank


@kernel
def _choose_with_relays(  # type: ignore[no-untyped-def]
    order_C, need_C, home_C, dst_C, node_G, seconds, most_hops, num_keys, key_Z, rank_Z, until_Z, link_C, src_C
):
    """`_choose` with the holders of every expert in a linked list: residents, then copies from ranks as they are scheduled."""
    C, G, Z = need_C.size, node_G.size, key_Z.size
    egress = np.zeros((2, G))
    ingress = np.zeros((2, G))
    host_G = np.zeros(G)
    end_Z = np.zeros(Z)  # when it is there, in the use it was sent for
    hops_Z = np.zeros(Z, np.int64)
    head_K = np.full(num_keys, -1)
    next_Z = np.full(Z, -1)
    for z in range(Z - C):
        next_Z[z] = head_K[key_Z[z]]
        head_K[key_Z[z]] = z
    need = np.int64(-1)
    for c in order_C:
        if need_C[c] != need:
            need = np.int64(need_C[c])
            egress[:] = 0.0
            ingress[:] = 0.0
            host_G[:] = 0.0
        mine = Z - C + c
        key, dst = key_Z[mine], dst_C[c]
        src, hops = np.int64(home_C[c]), 0
        link = _PEER if node_G[src] == node_G[dst] else _RDMA
        by_rank = max(egress[link, src], ingress[link, dst]) + seconds[link]
        by_host = host_G[dst] + seconds[_HOST]
        best = min(by_rank, by_host)
        relayed = False
        before, z = -1, head_K[key]
        while z >= 0:
            after = next_Z[z]
            if until_Z[z] < need:  # overwritten by now, and uses only go on
                if before < 0:
                    head_K[key] = after
                else:
                    next_Z[before] = after
                z = after
                continue
            holder = rank_Z[z]
            fresh = z >= Z - C and need_C[z - (Z - C)] == need
            ready, passed = (end_Z[z], hops_Z[z]) if fresh else (0.0, 0)
            if holder != dst and passed < most_hops:
                by = _PEER if node_G[holder] == node_G[dst] else _RDMA
                end = max(ready, egress[by, holder], ingress[by, dst]) + seconds[by]
                if end < best or (relayed and end == best and (by < link or (by == link and holder < src))):
                    best, src, link, hops, relayed = end, holder, by, passed + 1, True
            before, z = z, after
        if not relayed and by_host < by_rank:
            link_C[c] = _HOST
            host_G[dst] = by_host
            continue  # what came from the host is not passed on
        link_C[c], src_C[c] = link, src
        egress[link, src] = best if relayed else by_rank
        ingress[link, dst] = egress[link, src]
        end_Z[mine], hops_Z[mine] = egress[link, src], hops
        next_Z[mine] = head_K[key]
        head_K[key] = mine
