"""The coefficients of the closed form: what a pair, a slot, a copy and a gradient cost in one problem, in seconds."""

from typing import NamedTuple

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel

# Letters: N rows.


class Rates(NamedTuple):
    """Coefficients of the closed form, in seconds; plain numbers, so that compiled functions take them as they are.

    A row costs ``base_N + fixed_s + max_g(pair_s * load_g + slot_s * busy_g)``, plus ``peer_pair_s`` / ``rdma_pair_s``
    for every pair dispatched inside / across nodes (a rank's own pairs are free; averaged over ranks), plus ``mean_s`` for every
    pair that a rank serves on average (in ``base_N``: no placement changes it), plus
    ``replica_*_s`` per replica, plus what of `busiest_s` does not hide under ``hide_forward_s`` and ``hide_backward_s``.

    ``busy_g`` counts base slots whose expert has load and redundant slots with a quota. Of ``pair_s``, ``late_s`` is for
    exchange: it ends when the rank with the most pairs has its own, so what this rank has above the mean comes on top. The two
    ``hide_*_s`` differ by row: zero until `row_rates` sets them.
    """

    hide_forward_s: float
    hide_backward_s: float
    pair_s: float
    late_s: float
    mean_s: float
    slot_s: float
    fixed_s: float
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
    """What differs by row, float64 [N]."""

    window_N: Array  # seconds of all passes before the layer on the slowest rank
    mean_N: Array  # mean load of a rank, in pairs
    base_N: Array  # seconds that no placement changes: windows and ``mean_s``, less the mean load's ``late_s``
    hide_forward_N: Array  # seconds under which copies hide in forward
    hide_backward_N: Array  # the same in backward


@kernel
def row_rates(rates, times, n):
    """The `Rates` of row `n`, with its own ``hide_*_s`` from `RowTimes`."""
    return Rates(times.hide_forward_N[n], times.hide_backward_N[n], *rates[2:])  # type: ignore[call-arg]


@inner_kernel
def back_s(out, into, copy_s, gradient_s, rates):
    """Seconds of the busier side of a rank's link in backward: replicas of its experts elsewhere (`out`), and of others' on it.

    A gradient goes against its weights: a rank sends weights of its own experts and gradients of others'.
    """
    return rates.trains * max(copy_s * out + gradient_s * into, copy_s * into + gradient_s * out)


@inner_kernel
def add_copies(num, home, rank, node_G, fan_4G):
    """Counts `num` replicas on `rank` of experts of rank `home` in `fan_4G`, int64: by both, on peer links, then on RDMA."""
    link = 0 if node_G[home] == node_G[rank] else 2
    fan_4G[link, home] += num
    fan_4G[link + 1, rank] += num


@inner_kernel
def busiest_s(fan_4G, rates):
    """Seconds of the busiest rank's link in forward and in backward; `add_copies` fills `fan_4G`."""
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
    """What of `busiest_s` does not hide."""
    return max(0.0, busiest[0] - rates.hide_forward_s) + max(0.0, busiest[1] - rates.hide_backward_s)


@kernel
def exposed_s(peer_fan, rdma_fan, rates):
    """The least exposed seconds of a row with so many replicas of one rank's experts, or on one rank, by link class."""
    forward_s = max(peer_fan * rates.copy_peer_s, rdma_fan * rates.copy_rdma_s)
    near_s = back_s(peer_fan, 0, rates.copy_peer_s, rates.gradient_peer_s, rates)
    far_s = back_s(rdma_fan, 0, rates.copy_rdma_s, rates.gradient_rdma_s, rates)
    return late_s((forward_s, max(near_s, far_s)), rates)
