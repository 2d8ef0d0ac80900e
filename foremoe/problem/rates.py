"""Rough times of one pair, slot, copy and gradient in a problem. They are used to choose starts and homes, and to plan with
foresight."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel

# Letters: N rows.


class Rates(NamedTuple):
    """Times in seconds of the units of work in a row, as plain numbers that compiled functions can read.

    ``pair_s`` includes a part for the exchange, because an exchange ends when the rank with the most pairs has received them.
    ``peer_pair_s`` and ``rdma_pair_s`` are the times of a pair that is dispatched inside a node and between nodes, averaged over
    ranks. ``replica_*_s`` is the compute time that is lost to the copy of a replica. ``hide_*_s`` is the time that copies can
    overlap with. It differs between rows and is zero until `row_rates` sets it.
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
    """Times in seconds that copies can overlap with in each row, float64 [N]."""

    hide_forward_N: Array
    hide_backward_N: Array


@kernel
def row_rates(rates, times, n):
    """Returns the `Rates` of row `n`, with ``hide_*_s`` taken from `RowTimes`."""
    return Rates(times.hide_forward_N[n], times.hide_backward_N[n], *rates[2:])  # type: ignore[call-arg]


@inner_kernel
def back_s(out, into, copy_s, gradient_s, rates):
    """Returns how many seconds of a backward pass the busier direction of a rank's link is busy.

    `out` is the number of replicas that other ranks hold of this rank's experts, and `into` the number of replicas on this rank.
    Gradients flow against weights, so a rank sends the weights of its own experts and the gradients of its replicas.
    """
    return rates.trains * max(copy_s * out + gradient_s * into, copy_s * into + gradient_s * out)


@inner_kernel
def add_copies(num, home, rank, node_G, fan_4G):
    """Adds `num` copies from rank `home` to `rank` to `fan_4G`, int64: out and in on peer links, then out and in on RDMA."""
    link = 0 if node_G[home] == node_G[rank] else 2
    fan_4G[link, home] += num
    fan_4G[link + 1, rank] += num


@inner_kernel
def busiest_s(fan_4G, rates):
    """Returns how many seconds the busiest link works in forward and in backward passes. `add_copies` fills `fan_4G`."""
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
    """Returns the sum of the exposed parts of the two times that `busiest_s` returns."""
    return max(0.0, busiest[0] - rates.hide_forward_s) + max(0.0, busiest[1] - rates.hide_backward_s)


@kernel
def exposed_s(peer_fan, rdma_fan, rates):
    """Returns a lower bound of a row's exposed seconds if one rank sends or receives `peer_fan` and `rdma_fan` replicas."""
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
    """Returns how many copies to or from one rank overlap fully with compute, over peer links and over RDMA links."""
    return (
        _free_fan(rates.copy_peer_s, rates.gradient_peer_s, rates),
        _free_fan(rates.copy_rdma_s, rates.gradient_rdma_s, rates),
    )
