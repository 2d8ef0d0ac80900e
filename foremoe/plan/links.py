"""Choice of a link and a source rank for every weight copy, so that all copies for a use arrive as early as possible."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.base.compiled import kernel
from foremoe.machine.cluster import Cluster
from foremoe.plan.landings import until
from foremoe.plan.rounds import rounds_of
from foremoe.plan.transfers import Link, TransferList

# Letters: L layers, G ranks, E experts, S slots, C copies, X = L*E experts of all layers, Z landings, U uses, V nodes.

_PEER, _RDMA, _HOST = int(Link.PEER), int(Link.RDMA), int(Link.HOST)
_IN, _OUT, _FROM_STORE, _TO_STORE = 0, 2, 4, 5
_AHEAD = 2  # number of uses that a copy may be ahead, the default of the engine


def choose_links(
    transfers: TransferList, home_LE: Array, cluster: Cluster, expert_bytes: int, allowed: Collection[Link] = tuple(Link), *,
    relay: int = 0, hide_U: Array | None = None,
) -> TransferList:  # fmt: skip
    """Returns the copies of a plan, with `link_C` and `src_C` as `Deadline` chooses them.

    A copy keeps the link from its home rank if no `allowed` link can serve it. `hide_U` is the time in seconds of each use that
    the copies for this use can overlap with. If `hide_U` is None, host stores are assumed to be full, and no copy is assumed to
    overlap.
    """
    L, E = home_LE.shape
    base = E // cluster.num_ranks
    home_C = home_LE[transfers.layer_C, transfers.expert_C] // base
    node_G, src_C = cluster.node_of_rank_G, home_C.astype(np.int16)
    link_C = np.where(node_G[home_C] == node_G[transfers.dst_C], Link.PEER, Link.RDMA).astype(np.uint8)
    seconds = np.array(cluster.copy_seconds(expert_bytes))  # by `Link`
    seconds[[link for link in Link if link not in allowed]] = np.inf
    if not relay and np.isinf(seconds[Link.HOST]):
        return transfers.replace(link_C=link_C, src_C=src_C)  # there is nothing to choose
    round_C = rounds_of(transfers.need_C, transfers.slot_C, home_C, transfers.dst_C, cluster)
    wanted = _Wanted(order_of(transfers.need_C, round_C), transfers.need_C, home_C, transfers.dst_C)
    free_2G = np.zeros((2, cluster.num_ranks))
    links = _Links(cluster.node_of_rank_G, seconds, free_2G, np.zeros_like(free_2G), np.zeros(cluster.num_ranks))
    none = np.zeros(0, np.int64)
    expert_C = transfers.layer_C.astype(np.int64) * E + transfers.expert_C
    holders = _Holders(none, none, none, np.zeros(0), none, none, none)
    if relay:
        num = len(transfers)
        holders = _Holders(
            expert_C, transfers.dst_C.astype(np.int64), until(transfers), np.zeros(num), np.zeros(num, np.int64),
            np.full(num, -1), np.full(L * E, -1),
        )  # fmt: skip
    begin_U = np.zeros(0) if hide_U is None else np.cumsum(hide_U) - hide_U
    stored_VX = np.full((cluster.num_nodes, L * E), 0.0 if hide_U is None else np.inf)
    free_6G = np.zeros((6, cluster.num_ranks))
    # On the timeline, copies use a NIC one after the other. In a use, all ranks of a NIC are assumed to send at once.
    rdma_s = expert_bytes / cluster.rdma_bytes_per_s + cluster.rdma_latency_s
    stores = _Stores(
        expert_C, begin_U, stored_VX, free_6G, cluster.nic_of_rank_G, rdma_s, np.zeros(2), cluster.copy_contention
    )  # fmt: skip
    _choose(wanted, links, stores, int(relay), holders, link_C, src_C)
    src_C[link_C == Link.HOST] = -1
    return transfers.replace(link_C=link_C, src_C=src_C)


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
    """The timeline of a plan in seconds, as far as it is needed to judge host stores."""

    expert_C: Array  # layer * E + expert of every copy
    begin_U: Array  # time at which a use begins if no copy is late; empty if host stores are assumed to be full
    stored_VX: Array  # time at which a node's store has an expert; inf if nothing reads it there so far
    free_6G: Array  # times at which links of a rank (RDMA: NIC) are free: `_IN` + kind, `_OUT` + kind, `_FROM_STORE`, `_TO_STORE`
    nic_G: Array
    rdma_s: float  # seconds of a copy over a NIC without other traffic
    late_2: Array  # delay by copies up to the use before this one, and up to this one
    contention: float  # compute time lost per second of a copy


class _Holders(NamedTuple):
    """The ranks that hold each expert, as linked lists of copies."""

    expert_C: Array  # layer * E + expert
    rank_C: Array
    until_C: Array
    end_C: Array  # time at which it arrives, in the use for which it was sent
    hops_C: Array  # number of ranks that passed it on, in that use
    next_C: Array
    head_X: Array


@kernel
def _choose(wanted, links, stores, most_hops, holders, link_C, src_C):
    """Writes the link and the source of every copy."""
    need = np.int64(-1)
    for c in wanted.order_C:
        if wanted.need_C[c] != need:
            need = np.int64(wanted.need_C[c])
            links.out_2G[:] = 0.0
            links.in_2G[:] = 0.0
            links.host_G[:] = 0.0
            stores.late_2[0] = stores.late_2[1]
        src, dst, hops, relayed = np.int64(wanted.home_C[c]), np.int64(wanted.dst_C[c]), np.int64(0), False
        link, end = _arrival(0.0, src, dst, links)
        by_host = links.host_G[dst] + links.seconds[_HOST]
        if stores.begin_U.size > 0 and not _store_pays(c, need, src, dst, links, stores):
            by_host = np.inf
        if most_hops > 0:
            held, sooner, passed = _best_holder(c, need, dst, min(end, by_host), most_hops, wanted, links, holders)
            if held >= 0:
                src, hops, end, relayed = holders.rank_C[held], passed + 1, sooner, True
                link = _PEER if links.node_G[src] == links.node_G[dst] else _RDMA
        if not relayed and by_host < end:
            link_C[c] = _HOST
            links.host_G[dst] = by_host
            if stores.begin_U.size > 0:
                _take(c, need, src, dst, _HOST, links, stores)
            continue  # copies from the host are not passed on
        link_C[c], src_C[c] = link, src
        links.out_2G[link, src] = end
        links.in_2G[link, dst] = end
        if stores.begin_U.size > 0:
            _take(c, need, src, dst, link, links, stores)
        if most_hops > 0:
            holders.end_C[c], holders.hops_C[c] = end, hops
            _add_holder(c, holders)


@kernel
def _arrival(ready, src, dst, links):
    """Returns the link between two ranks, and the arrival of a copy that may leave at `ready`."""
    link = _PEER if links.node_G[src] == links.node_G[dst] else _RDMA
    return link, max(ready, max(links.out_2G[link, src], links.in_2G[link, dst])) + links.seconds[link]


@kernel
def _sent_s(ready, src, dst, link, links, stores):
    """Returns the arrival of an expert that may leave at `ready`, over a link between ranks."""
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


@kernel
def _add_holder(c, holders):
    expert = holders.expert_C[c]
    holders.next_C[c] = holders.head_X[expert]
    holders.head_X[expert] = c


@kernel
def _best_holder(mine, need, dst, best, most_hops, wanted, links, holders):
    """Returns the copy (or -1) whose rank can pass it on as copy `mine` before `best`, its arrival, and its hops so far."""
    rank_C, until_C, next_C, head_X = holders.rank_C, holders.until_C, holders.next_C, holders.head_X
    need_C, end_C, hops_C = wanted.need_C, holders.end_C, holders.hops_C
    expert = holders.expert_C[mine]
    found, hops, best_link = np.int64(-1), np.int64(0), 0
    before, c = np.int64(-1), head_X[expert]
    while c >= 0:
        after, holder = next_C[c], rank_C[c]
        if until_C[c] < need:  # it was overwritten, and uses only increase
            if before < 0:
                head_X[expert] = after
            else:
                next_C[before] = after
            c = after
            continue
        ready, passed = (end_C[c], hops_C[c]) if need_C[c] == need else (0.0, np.int64(0))
        if holder != dst and passed < most_hops:
            link, end = _arrival(ready, holder, dst, links)
            nearer = found >= 0 and (link < best_link or (link == best_link and holder < rank_C[found]))
            if end < best or (end == best and nearer):
                found, best, best_link, hops = c, end, link, passed
        before, c = c, after
    return found, best, hops
