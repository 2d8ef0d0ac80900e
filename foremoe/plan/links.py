"""Choice of a link for every weight copy, so that all copies for a use arrive as early as possible."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.base.compiled import kernel
from foremoe.machine.cluster import Cluster
from foremoe.plan.rounds import rounds_of
from foremoe.plan.transfers import Link, TransferList

# Letters: L layers, G ranks, E experts, S slots, C copies, X = L*E experts of all layers, Z landings, U uses, V nodes.

_PEER, _RDMA, _HOST = int(Link.PEER), int(Link.RDMA), int(Link.HOST)
_IN, _OUT, _FROM_STORE, _TO_STORE = 0, 2, 4, 5
_AHEAD = 2  # number of uses that a copy may be ahead, the default of the engine


def choose_links(
    transfers: TransferList, home_LE: Array, cluster: Cluster, expert_bytes: int, allowed: Collection[Link] = tuple(Link), *,
    hide_U: Array | None = None,
) -> TransferList:  # fmt: skip
    """Returns the copies of a plan, with `link_C` and `src_C` as `Deadline` chooses them.

    A copy keeps the link from its home rank if no `allowed` link can serve it. `hide_U` is the time in seconds of each use that
    the copies for this use can overlap with. If `hide_U` is None, host stores are assumed to be full, and no copy is assumed to
    overlap.
    """
    L, E = home_LE.shape
    base = E // cluster.num_ranks
    home_C = home_LE[transfers.layer_C, transfers.expert_C] // base
    node_G = cluster.node_of_rank_G
    link_C = np.where(node_G[home_C] == node_G[transfers.dst_C], Link.PEER, Link.RDMA).astype(np.uint8)
    seconds = np.array(cluster.copy_seconds(expert_bytes))  # by `Link`
    seconds[[link for link in Link if link not in allowed]] = np.inf
    if np.isinf(seconds[Link.HOST]):
        return transfers.replace(link_C=link_C, src_C=home_C)  # there is nothing to choose
    round_C = rounds_of(transfers.need_C, transfers.slot_C, home_C, transfers.dst_C, cluster)
    wanted = _Wanted(order_of(transfers.need_C, round_C), transfers.need_C, home_C, transfers.dst_C)
    free_2G = np.zeros((2, cluster.num_ranks))
    links = _Links(cluster.node_of_rank_G, seconds, free_2G, np.zeros_like(free_2G), np.zeros(cluster.num_ranks))
    expert_C = transfers.layer_C.astype(np.int64) * E + transfers.expert_C
    begin_U = np.zeros(0) if hide_U is None else np.cumsum(hide_U) - hide_U
    stored_VX = np.full((cluster.num_nodes, L * E), 0.0 if hide_U is None else np.inf)
    free_6G = np.zeros((6, cluster.num_ranks))
    # On the timeline, copies use a NIC one after the other. In a use, all ranks of a NIC are assumed to send at once.
    rdma_s = expert_bytes / cluster.rdma_bytes_per_s + cluster.rdma_latency_s
    stores = _Stores(
        expert_C, begin_U, stored_VX, free_6G, cluster.nic_of_rank_G, rdma_s, np.zeros(2), cluster.copy_contention
    )  # fmt: skip
    _choose(wanted, links, stores, link_C)
    return transfers.replace(link_C=link_C, src_C=np.where(link_C == Link.HOST, -1, home_C))


class _Wanted(NamedTuple):
    """Copies to schedule, and their order."""

    order_C: Array
    need_C: Array
    home_C: Array
    dst_C: Array


class _Links(NamedTuple):
    """Seconds of a copy by `Link`, and the times at which each rank's links are free: out and in by kind, and from the host."""

    node_G: Array
    seconds: Array
    out_2G: Array
    in_2G: Array
    host_G: Array


class _Stores(NamedTuple):
    """The parts of a plan's timeline, in seconds, that are needed to judge host stores."""

    expert_C: Array  # layer * E + expert of every copy
    begin_U: Array  # time at which a use begins if no copy is late; empty if host stores are assumed to be full
    stored_VX: Array  # time at which a node's store has an expert; inf if nothing reads it there so far
    free_6G: Array  # times at which links of a rank (RDMA: NIC) are free: `_IN` + kind, `_OUT` + kind, `_FROM_STORE`, `_TO_STORE`
    nic_G: Array
    rdma_s: float  # seconds of a copy over a NIC without other traffic
    late_2: Array  # delay by copies up to the use before this one, and up to this one
    contention: float  # compute time lost per second of a copy


@kernel
def _choose(wanted, links, stores, link_C):
    """Writes the link of every copy."""
    need = np.int64(-1)
    for c in wanted.order_C:
        if wanted.need_C[c] != need:
            need = np.int64(wanted.need_C[c])
            links.out_2G[:] = 0.0
            links.in_2G[:] = 0.0
            links.host_G[:] = 0.0
            stores.late_2[0] = stores.late_2[1]
        src, dst = np.int64(wanted.home_C[c]), np.int64(wanted.dst_C[c])
        link = _PEER if links.node_G[src] == links.node_G[dst] else _RDMA
        end = max(links.out_2G[link, src], links.in_2G[link, dst]) + links.seconds[link]
        by_host = links.host_G[dst] + links.seconds[_HOST]
        if stores.begin_U.size > 0 and not _store_pays(c, need, src, dst, links, stores):
            by_host = np.inf
        if by_host < end:
            link = _HOST
            links.host_G[dst] = by_host
        else:
            links.out_2G[link, src] = end
            links.in_2G[link, dst] = end
        link_C[c] = link
        if stores.begin_U.size > 0:
            _take(c, need, src, dst, link, links, stores)


@kernel
def _sent_s(ready, src, dst, link, links, stores):
    """Returns when an expert that may be sent from the time `ready` arrives over a link between ranks."""
    if link == _PEER:
        return max(ready, max(stores.free_6G[_OUT, src], stores.free_6G[_IN, dst])) + links.seconds[_PEER]
    out, into = stores.nic_G[src], stores.nic_G[dst]
    return max(ready, max(stores.free_6G[_OUT + _RDMA, out], stores.free_6G[_IN + _RDMA, into])) + stores.rdma_s


@kernel
def _stored_s(c, home, dst, links, stores):
    """Returns when an expert has been sent to the store of `dst` (0 if it is not sent), and when it is stored there."""
    sent, stored = 0.0, stores.stored_VX[links.node_G[dst], stores.expert_C[c]]
    if stored == np.inf:
        writer = home
        if links.node_G[home] != links.node_G[dst]:
            writer, sent = dst, _sent_s(0.0, home, dst, _RDMA, links, stores)
        stored = max(sent, stores.free_6G[_TO_STORE, writer]) + links.seconds[_HOST]
    return sent, stored


@kernel
def _store_pays(c, need, home, dst, links, stores):
    """Returns True if copy `c` arrives late from its home, and the host store is enough faster to be worth the slowdown."""
    link = _PEER if links.node_G[home] == links.node_G[dst] else _RDMA
    ready, due = stores.begin_U[max(0, need - _AHEAD)] + stores.late_2[0], stores.begin_U[need] + stores.late_2[0]
    direct = _sent_s(ready, home, dst, link, links, stores)
    if direct <= due:
        return False
    sent, stored = _stored_s(c, home, dst, links, stores)
    end = max(ready, max(stored, stores.free_6G[_FROM_STORE, dst])) + links.seconds[_HOST]
    busy = links.seconds[_HOST]
    if stores.stored_VX[links.node_G[dst], stores.expert_C[c]] == np.inf:
        busy += links.seconds[_HOST] + (stores.rdma_s if sent > 0.0 else 0.0)
    return max(end, due) + stores.contention * busy < direct


@kernel
def _take(c, need, src, dst, link, links, stores):
    """Reserves the links of copy `c`, and those for filling the store if this copy is the first to need the expert there."""
    free_6G, node, nic_G = stores.free_6G, links.node_G[dst], stores.nic_G
    ready = stores.begin_U[max(0, need - _AHEAD)] + stores.late_2[0]
    if link == _HOST:
        sent, stored = _stored_s(c, src, dst, links, stores)
        if stores.stored_VX[node, stores.expert_C[c]] == np.inf:
            stores.stored_VX[node, stores.expert_C[c]] = stored
            free_6G[_TO_STORE, dst if sent > 0.0 else src] = stored
        if sent > 0.0:
            free_6G[_OUT + _RDMA, nic_G[src]], free_6G[_IN + _RDMA, nic_G[dst]] = sent, sent
        end = max(ready, max(stored, free_6G[_FROM_STORE, dst])) + links.seconds[_HOST]
        free_6G[_FROM_STORE, dst] = end
    else:
        end = _sent_s(ready, src, dst, link, links, stores)
        out, into = (nic_G[src], nic_G[dst]) if link == _RDMA else (src, dst)
        free_6G[_OUT + link, out], free_6G[_IN + link, into] = end, end
    stores.late_2[1] = max(stores.late_2[1], end - stores.begin_U[need])
