"""The coefficients of the closed form: what a pair, a slot, a copy and a gradient cost in one problem, in seconds."""

from typing import NamedTuple

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel

# Letters: N rows.


class Rates(NamedTuple):
    """Coefficients of the closed form, in seconds; plain numbers, so that compiled functions take them as they are.

    A row costs ``base_N + fixed_s + max_g(pair_s * load_g + slot_s * busy_g)``, plus ``peer_pair_s`` / ``rdma_pair_s``
    for every pair dispatched inside / across nodes (a rank's own pairs are free; averaged over ranks), plus ``mean_s`` for every
    pair that a rank serves on average (in ``base_N``: no placement changes it), plus
    ``replica_*_s`` per replica, plus ``max(0, t - hide_forward_s)`` (and for sends in backward ``hide_backward_s``) where t is
    the largest ``copies * copy_*_s`` of any rank, direction and link class, plus the same for gradients.

    ``busy_g`` counts base slots whose expert has load and redundant slots with a quota. Of ``pair_s``, ``late_s`` is for
    exchange: it ends when the rank with the most pairs has its own, so what this rank has above the mean comes on top. Of
    ``replica_*_s``, ``contention`` times ``copy_*_s`` is for each time that weights are sent. The two ``hide_*_s`` differ by
    row: zero until `row_rates` sets them.
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
    contention: float
    sends_backward: bool
    returns_gradients: bool


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


@kernel
def exposed_s(peer_fan, rdma_fan, rates):
    """Exposed seconds of copies and gradients in a row, with at most these copies through one rank and direction."""
    copy_s = max(peer_fan * rates.copy_peer_s, rdma_fan * rates.copy_rdma_s)
    late_s = max(0.0, copy_s - rates.hide_forward_s)
    if rates.sends_backward:
        late_s += max(0.0, copy_s - rates.hide_backward_s)
    if rates.returns_gradients:
        back_s = max(peer_fan * rates.gradient_peer_s, rdma_fan * rates.gradient_rdma_s)
        late_s += max(0.0, back_s - rates.hide_backward_s)
    return late_s
