"""Time of a row in seconds, computed from its traffic. Plans, simulation and search use this formula.

A row dispatches its tokens, computes experts and combines outputs. Each of these steps takes as long as the busiest rank, link or
NIC. Copies overlap with compute on links that exchanges leave free. A row does not know the copies of the rows before and after
it. The formula assumes that these rows have as many copies as this row, on ranks drawn at random. Copies may start two rows
ahead. Let a link have `b` seconds of copies for this row and `a` seconds for its neighbour. Both rows then wait for (a + b) / 2
minus the time of one row.
"""

from typing import NamedTuple

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.machine.tiles import padded_pairs
from foremoe.problem.kernels.dispatch import put, settle, spread
from foremoe.problem.kernels.messages import clear_messages
from foremoe.problem.kernels.traffic import (
    BUSY,
    BY_PAIR,
    COPY_IN,
    COPY_OUT,
    FAR_COPIES,
    PADDED,
    PAIRS,
    PEER_IN,
    PEER_OUT,
    RDMA_COPY_IN,
    RDMA_COPY_OUT,
    RDMA_IN,
    RDMA_OUT,
    SPREAD_BY_PAIR,
)

# Letters: G ranks, S slots per rank, X sums.


class Prices(NamedTuple):
    """Seconds of each unit of work in a row, as plain numbers that compiled functions can read."""

    gemm_s: float  # GEMMs of a padded pair in one forward pass
    pair_s: float  # a pair besides its GEMMs
    slot_s: float  # a busy slot in one forward pass
    forwards: float  # number of forward passes of the experts: 1, or 2 if backward runs the forward pass again
    backward_ratio: float  # backward over forward time of pairs; 0 without backward
    slot_backward_s: float  # a busy slot in backward
    latency_s: float  # latency of an exchange
    peer_s: float  # a pair, or a message, over a rank's peer link
    rdma_s: float  # a pair, or a message, over a NIC
    exchange_passes: float  # number of passes that dispatch and combine
    copy_peer_s: float
    copy_rdma_s: float
    gradient_peer_s: float
    gradient_rdma_s: float
    trains: float  # 1 if weights are copied again for backward and replica gradients are returned, else 0
    contention: float  # compute time lost per second of a copy
    overlap: float  # share of the time of a row that copies can overlap with
    rows_ahead: int  # number of rows (0, 1 or more) before the one that needs them in which copies may run


class Windows(NamedTuple):
    """Times in seconds that the slowest rank of a row spends before the experts."""

    all_s: float  # in all passes
    forward_s: float
    backward_s: float  # includes running forward again


class Seconds(NamedTuple):
    """The time of a row in seconds, by part."""

    compute_s: float  # all passes
    exchange_s: float  # all passes
    forward_s: float  # exposed copies in forward
    backward_s: float  # exposed copies and gradients in backward
    slowed_s: float  # compute time lost while copies run


@inner_kernel
def exchange_s(prices, t):
    """Returns the seconds of one exchange, and the seconds for which peer links and NICs are busy during it."""
    peer = rdma = 0.0
    for y in range(t.sum_XG.shape[1]):
        peer = max(peer, max(t.sum_XG[PEER_OUT, y], t.sum_XG[PEER_IN, y]))
        rdma = max(rdma, max(t.sum_XG[RDMA_OUT, y], t.sum_XG[RDMA_IN, y]))
    peer, rdma = peer * prices.peer_s, rdma * prices.rdma_s
    return prices.latency_s + max(peer, rdma) if t.quota_EG.shape[1] > 1 else 0.0, peer, rdma


@inner_kernel
def rank_s(g, prices, t):
    """Returns the seconds that the experts of rank `g` take in one forward pass and in the backward pass."""
    pairs_s, busy = prices.gemm_s * t.sum_XG[PADDED, g] + prices.pair_s * t.sum_XG[PAIRS, g], t.sum_XG[BUSY, g]
    return pairs_s + prices.slot_s * busy, prices.backward_ratio * pairs_s + prices.slot_backward_s * busy


@inner_kernel
def compute_s(prices, t):
    """Returns the largest `rank_s` of all ranks, for the forward pass and for the backward pass."""
    forward_s = backward_s = 0.0
    for g in range(t.quota_EG.shape[1]):
        once_s, back_s = rank_s(g, prices, t)
        forward_s, backward_s = max(forward_s, once_s), max(backward_s, back_s)
    return forward_s, backward_s


class _Link(NamedTuple):
    """Copies over one kind of link: indices and length of its sums, and the seconds of one copy."""

    out: int
    into: int
    num: int
    copy_s: float
    gradient_s: float


@inner_kernel
def _late_s(top_s, out_s, into_s, hide_s, link, prices, t):
    """Returns the exposed seconds if a copy takes `out_s` of the link at its source and `into_s` of that at its destination. The
    copies of the busiest link take `top_s`."""
    if top_s <= hide_s or prices.rows_ahead < 2:
        return max(0.0, top_s - hide_s)
    late_s, out_Y, in_Y = 0.0, t.sum_XG[link.out], t.sum_XG[link.into]
    for y in range(link.num):
        late_s += max(0.0, (top_s + out_s * out_Y[y] + into_s * in_Y[y]) / 2.0 - hide_s)
    return late_s / link.num


@inner_kernel
def _copies_s(link, hide_forward_s, hide_backward_s, prices, t):
    """Returns the exposed seconds on one kind of link in forward and in backward. Gradients flow against their weights."""
    copy_s, back_s, out_Y, in_Y = link.copy_s, link.gradient_s, t.sum_XG[link.out], t.sum_XG[link.into]
    out = into = out_back_s = in_back_s = 0.0
    for y in range(link.num):
        out, into = max(out, out_Y[y]), max(into, in_Y[y])
        out_back_s = max(out_back_s, copy_s * out_Y[y] + back_s * in_Y[y])
        in_back_s = max(in_back_s, back_s * out_Y[y] + copy_s * in_Y[y])
    out_s = _late_s(copy_s * out, copy_s, 0.0, hide_forward_s, link, prices, t)
    forward_s = max(out_s, _late_s(copy_s * into, 0.0, copy_s, hide_forward_s, link, prices, t))
    if prices.trains == 0.0:
        return forward_s, 0.0
    out_s = _late_s(out_back_s, copy_s, back_s, hide_backward_s, link, prices, t)
    return forward_s, max(out_s, _late_s(in_back_s, back_s, copy_s, hide_backward_s, link, prices, t))


@inner_kernel
def _slowed_s(prices, t):
    """Returns the seconds that copies, in both directions and all passes, keep the links of the busiest rank busy."""
    sends, slowed = 1.0 + prices.trains, 0.0
    near_s = sends * prices.copy_peer_s + prices.trains * prices.gradient_peer_s
    far_s = sends * prices.copy_rdma_s + prices.trains * prices.gradient_rdma_s
    for g in range(t.quota_EG.shape[1]):
        near = t.sum_XG[COPY_OUT, g] + t.sum_XG[COPY_IN, g]
        slowed = max(slowed, near * near_s + t.sum_XG[FAR_COPIES, g] * far_s)
    return slowed


@inner_kernel
def row_seconds(prices, windows, row, t):
    """Returns the `Seconds` of a row. They do not include the work before its experts (``windows.all_s``)."""
    if row.ranks.travel >= SPREAD_BY_PAIR:
        spread(row, t)
    once_s, peer_s, rdma_s = exchange_s(prices, t)
    experts_s, back_s = compute_s(prices, t)
    again = prices.forwards - 1.0
    # Time that copies for a use have, without exchanges. Without a spare buffer, the use before must be over.
    ahead = 1.0 if prices.rows_ahead > 0 else 0.0
    forward_s = windows.forward_s + ahead * experts_s
    backward_s = windows.backward_s + ahead * (back_s + again * experts_s)
    exchanges, back, free_peer_s, free_rdma_s = (
        1.0 + ahead,
        1.0 + ahead + 2.0 * again,
        once_s - peer_s,
        once_s - rdma_s,
    )
    peer = _Link(COPY_OUT, COPY_IN, t.quota_EG.shape[1], prices.copy_peer_s, prices.gradient_peer_s)
    rdma = _Link(RDMA_COPY_OUT, RDMA_COPY_IN, row.ranks.num_nics, prices.copy_rdma_s, prices.gradient_rdma_s)
    share = prices.overlap
    near = _copies_s(peer, share * (forward_s + exchanges * free_peer_s), share * (backward_s + back * free_peer_s), prices, t)
    far = _copies_s(rdma, share * (forward_s + exchanges * free_rdma_s), share * (backward_s + back * free_rdma_s), prices, t)
    return Seconds(
        prices.forwards * experts_s + back_s, 2.0 * prices.exchange_passes * once_s, max(near[0], far[0]), max(near[1], far[1]),
        prices.contention * _slowed_s(prices, t),
    )  # fmt: skip


@inner_kernel
def count_copy(e, g, num, row, t):
    """Adds `num` (1 or -1) to the number of copies from the home of expert `e` to rank `g`."""
    home, node_G, nic_G, total_XG = row.home_E[e], row.ranks.node_G, row.ranks.nic_G, t.sum_XG
    if node_G[home] == node_G[g]:
        total_XG[COPY_OUT, home] += num
        total_XG[COPY_IN, g] += num
    else:
        total_XG[RDMA_COPY_OUT, nic_G[home]] += num
        total_XG[RDMA_COPY_IN, nic_G[g]] += num
        total_XG[FAR_COPIES, home] += num
        total_XG[FAR_COPIES, g] += num


@inner_kernel
def set_quota(e, g, quota, row, t):
    """Makes rank `g` serve `quota` pairs of expert `e`, whose traffic was removed before. A replica without pairs is removed.

    The home counts as busy as long as any rank serves pairs of the expert, because the gradient is needed at home.
    """
    had, tile, home, total_XG = t.quota_EG[e, g], row.ranks.tile, row.home_E[e], t.sum_XG
    total_XG[PAIRS, g] += quota - had
    total_XG[PADDED, g] += padded_pairs(quota, tile) - padded_pairs(had, tile)
    t.quota_EG[e, g] = quota
    if g == home or (had > 0) == (quota > 0):
        return
    num = 1 if quota > 0 else -1
    total_XG[BUSY, g] += num
    count_copy(e, g, num, row, t)
    if num > 0:
        t.holder_EG[e, t.num_E[e]] = g
        t.num_E[e] += 1
        return
    i = 1
    while t.holder_EG[e, i] != g:
        i += 1
    t.num_E[e] -= 1
    t.holder_EG[e, i] = t.holder_EG[e, t.num_E[e]]


@inner_kernel
def hold_homes(row, t):
    """Lets homes serve all pairs of an empty traffic. The caller must then call `put` for each expert."""
    ranks = row.ranks
    if ranks.travel == BY_PAIR:
        for g in range(ranks.node_G.size):
            t.sum_XG[RDMA_OUT, ranks.nic_G[g]] += row.pairs_G[g]
    for e in range(row.load_E.size):
        g, load = row.home_E[e], row.load_E[e]
        t.holder_EG[e, 0], t.num_E[e], t.quota_EG[e, g] = g, 1, load
        t.sum_XG[PAIRS, g] += load
        t.sum_XG[PADDED, g] += padded_pairs(load, ranks.tile)
        t.sum_XG[BUSY, g] += load > 0


@kernel
def clear_traffic(row, t):
    """Removes all experts from the traffic of a row."""
    for e in range(row.load_E.size):
        for i in range(t.num_E[e]):
            t.quota_EG[e, t.holder_EG[e, i]] = 0
        t.num_E[e] = 0
    t.sum_XG[:] = 0.0
    clear_messages(t.messages)


@kernel
def fill_traffic(expert_GS, quota_GS, num_base, row, t):
    """Fills an empty traffic with the slots and quotas of a placement."""
    hold_homes(row, t)
    for g in range(expert_GS.shape[0]):
        for s in range(expert_GS.shape[1]):
            e = expert_GS[g, s]
            if e >= 0 and quota_GS[g, s] > 0 and g != row.home_E[e]:
                set_quota(e, row.home_E[e], t.quota_EG[e, row.home_E[e]] - quota_GS[g, s], row, t)
                set_quota(e, g, np.int64(quota_GS[g, s]), row, t)
        busy = 0  # counted again, because a solver may have moved homes
        for s in range(expert_GS.shape[1]):
            e = expert_GS[g, s]
            busy += e >= 0 and (quota_GS[g, s] > 0 or (s < num_base and row.load_E[e] > 0))
        t.sum_XG[BUSY, g] = busy
    for e in range(row.load_E.size):
        put(e, 1, row, t)
    settle(row, t)
