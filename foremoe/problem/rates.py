"""Rough prices for starts, homes and foresight: the seconds of a pair, a slot, a copy and a gradient in one problem."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel

# Letters: N rows.


class Rates(NamedTuple):
    """Coefficients in seconds, as plain numbers that compiled functions can read.

    A part of ``pair_s`` is for the exchange, which ends when the rank with the most pairs has received them. ``peer_pair_s`` and
    ``rdma_pair_s`` are for a pair dispatched inside a node and between nodes, averaged over ranks. ``replica_*_s`` is the compute
    time lost to the copy of a replica. Copies can overlap with ``hide_*_s``, which differ by row. They are zero until `row_rates`
    sets them.
    """

    hide_forward_s: float
    hide_backward_s: float
    pair_s: float
    slot_s: float
    peer_pair_s: float
    rdma_pair_s: float
    copy_peer_s: float
    copy_rdma_s: float
    gradient_peer_s: float
    gradient_rdma_s: float
    replica_peer_s: float
    replica_rdma_s: float
    trains: bool


class RowTimes(NamedTuple):
    """Time in seconds that copies can overlap with in each row, float64 [N]."""

    hide_forward_N: Array
    hide_backward_N: Array


@kernel
def row_rates(rates, times, n):
    """Returns the `Rates` of row `n`, with ``hide_*_s`` taken from `RowTimes`."""
    return Rates(times.hide_forward_N[n], times.hide_backward_N[n], *rates[2:])  # type: ignore[call-arg]


@inner_kernel
def back_s(out, into, copy_s, gradient_s, rates):
    """Returns the backward seconds of the busier direction of a rank's link.

    `out` counts the replicas of its experts on other ranks, and `into` the replicas on it. Gradients flow against weights, so a
    rank sends weights of its own experts and gradients of other ranks' experts.
    """
    return rates.trains * max(copy_s * out + gradient_s * into, copy_s * into + gradient_s * out)


@inner_kernel
def add_copies(num, home, rank, node_G, fan_4G):
    """Adds `num` replicas on `rank` of experts at home on `home` to `fan_4G`, int64, for both ranks (peer links, then RDMA)."""
    link = 0 if node_G[home] == node_G[rank] else 2
    fan_4G[link, home] += num
    fan_4G[link + 1, rank] += num


@inner_kernel
def busiest_s(fan_4G, rates):
    """Returns the seconds of the busiest rank's link in forward and in backward. `add_copies` fills `fan_4G`."""
    forward_s, backward_s = 0.0, 0.0
    for g in range(fan_4G.shape[1]):
        out, into, far_out, far_into = fan_4G[0, g], fan_4G[1, g], fan_4G[2, g], fan_4G[3, g]
        forward_s = max(forward_s, max(max(out, into) * rates.copy_peer_s, max(far_out, far_into) * rates.copy_rdma_s))
        near_s = back_s(out, into, rates.copy_peer_s, rates.gradient_peer_s, rates)
        far_s = back_s(far_out, far_into, rates.copy_rdma_s, rates.gradient_rdma_s, rates)
        backward_s = max(backward_s, max(near_s, far_s))
    return forward_s, backward_s


@inner_kernel
def late_s(busiest, rates):
    """Returns the exposed part of `busiest_s`."""
    return max(0.0, busiest[0] - rates.hide_forward_s) + max(0.0, busiest[1] - rates.hide_backward_s)


@kernel
def exposed_s(peer_fan, rdma_fan, rates):
    """Returns a lower bound of a row's exposed seconds if one rank sends or receives this many replicas, by kind of link."""
    forward_s = max(peer_fan * rates.copy_peer_s, rdma_fan * rates.copy_rdma_s)
    near_s = back_s(peer_fan, 0, rates.copy_peer_s, rates.gradient_peer_s, rates)
    far_s = back_s(rdma_fan, 0, rates.copy_rdma_s, rates.gradient_rdma_s, rates)
    return late_s((forward_s, max(near_s, far_s)), rates)


@inner_kernel
def _free_fan(copy_s, gradient_s, rates):
    most = rates.hide_forward_s / copy_s
    one_s = back_s(1, 0, copy_s, gradient_s, rates)
    if one_s > 0.0:
        most = min(most, rates.hide_backward_s / one_s)
    return np.int64(min(most, 1e9))


@inner_kernel
def free_fans(rates):
    """Returns how many copies to or from one rank overlap fully with compute, on peer links and on RDMA links."""
    return (
        _free_fan(rates.copy_peer_s, rates.gradient_peer_s, rates),
        _free_fan(rates.copy_rdma_s, rates.gradient_rdma_s, rates),
    )
