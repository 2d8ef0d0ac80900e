"""State of a row's search, with its traffic, the replicas of every rank, and the changes of the current move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.kernels.dispatch import keep, put, restore
from foremoe.problem.kernels.row_price import (
    Prices,
    Windows,
    clear_traffic,
    fill_traffic,
    rank_s,
    row_seconds,
    set_quota,
)
from foremoe.problem.kernels.traffic import PEER_IN, PEER_OUT, RDMA_IN, RDMA_OUT, Row, Traffic
from foremoe.problem.rates import Rates

# Letters: G ranks, E experts, B base slots, R redundant slots, I changes of a move.

_MOST_CHANGES = 8


class State(NamedTuple):
    """The state of a row during the search."""

    row: Row
    prices: Prices
    windows: Windows
    rates: Rates  # rates that limit the copies of a start
    num_slots: int  # R
    located: bool  # whether sources are known
    node_only: bool
    parts: int  # bits of `foremoe.solvers.search.parts`
    mean: float  # mean number of pairs per rank
    t: Traffic
    home_GB: Array  # experts at home on every rank
    replica_GR: Array  # experts of which a rank holds a replica; room for at least one
    num_G: Array  # number of replicas on a rank
    change_4I: Array  # changes of the current move: expert, from, to, pairs
    num_changes: Array  # int64 [1]
    random: Array  # uint64 [1]


@kernel
def empty_arrays(num_ranks, num_base, num_slots):
    """Returns empty arrays for all parts of a `State` except its traffic."""
    return (
        np.zeros((num_ranks, num_base), np.int64), np.zeros((num_ranks, max(1, num_slots)), np.int64),
        np.zeros(num_ranks, np.int64), np.zeros((4, _MOST_CHANGES), np.int64), np.zeros(1, np.int64), np.zeros(1, np.uint64),
    )  # fmt: skip


@kernel
def list_homes(row, home_GB, num_G):
    """Lists the experts at home on every rank."""
    num_G[:] = 0
    for e in range(row.load_E.size):
        g = row.home_E[e]
        home_GB[g, num_G[g]] = e
        num_G[g] += 1


@kernel
def list_replicas(s):
    """Lists the replicas of every rank."""
    s.num_G[:] = 0
    for e in range(s.row.load_E.size):
        for i in range(1, s.t.num_E[e]):
            g = s.t.holder_EG[e, i]
            s.replica_GR[g, s.num_G[g]] = e
            s.num_G[g] += 1


@inner_kernel
def chance(s):
    """Returns a random number in [0, 1)."""
    x = s.random[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    s.random[0] = x
    return np.float64(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@inner_kernel
def below(s, num):
    """Returns a random integer in [0, num)."""
    return np.int64(chance(s) * num)


@inner_kernel
def _set(e, g, quota, s):
    """Calls `set_quota` and updates the list of the rank's replicas."""
    had = s.t.quota_EG[e, g]
    set_quota(e, g, quota, s.row, s.t)
    if g == s.row.home_E[e] or (had > 0) == (quota > 0):
        return
    if quota > 0:
        s.replica_GR[g, s.num_G[g]] = e
        s.num_G[g] += 1
        return
    i = 0
    while s.replica_GR[g, i] != e:
        i += 1
    s.num_G[g] -= 1
    s.replica_GR[g, i] = s.replica_GR[g, s.num_G[g]]


@inner_kernel
def _shift(e, src, dst, pairs, s):
    _set(e, src, s.t.quota_EG[e, src] - pairs, s)
    _set(e, dst, s.t.quota_EG[e, dst] + pairs, s)


@inner_kernel
def give(e, src, dst, pairs, s):
    """Moves pairs of an expert from rank `src` to rank `dst`, as a change of the current move.

    If `dst` does not hold the expert yet, it gets a replica.
    """
    i = s.num_changes[0]
    if i == 0:
        keep(s.t)
    s.change_4I[0, i], s.change_4I[1, i], s.change_4I[2, i], s.change_4I[3, i] = e, src, dst, pairs
    s.num_changes[0] = i + 1
    put(e, -1, s.row, s.t)
    _shift(e, src, dst, pairs, s)
    put(e, 1, s.row, s.t)


@inner_kernel
def undo(settled, s):
    """Undoes all changes of the current move, and its `settle` if that was called."""
    if s.num_changes[0] == 0:
        return
    for i in range(s.num_changes[0] - 1, -1, -1):
        _shift(s.change_4I[0, i], s.change_4I[2, i], s.change_4I[1, i], s.change_4I[3, i], s)
    restore(settled, s.row, s.t)


@inner_kernel
def total_s(parts):
    """Returns the time of a row in seconds, without the part that is the same for all placements of the row."""
    return parts.compute_s + parts.exchange_s + parts.forward_s + parts.backward_s + parts.slowed_s


@inner_kernel
def seconds(s):
    """Returns the `total_s` of the row with its current placement."""
    return total_s(row_seconds(s.prices, s.windows, s.row, s.t))


@kernel
def price_of(placed, s):
    """Returns the price of a placement in seconds. The traffic must be empty before the call, and is empty again afterwards."""
    fill_traffic(placed.expert_GS, placed.quota_GS, s.home_GB.shape[1], s.row, s.t)
    found_s = seconds(s)
    clear_traffic(s.row, s.t)
    return found_s


@inner_kernel
def smoothed(soft, s):
    """Returns `seconds` plus `soft` times a term for all ranks and links, which is their mean square divided by their maximum."""
    prices, total_XG, num_ranks, num_nics = s.prices, s.t.sum_XG, s.t.quota_EG.shape[1], s.row.ranks.num_nics
    parts = row_seconds(prices, s.windows, s.row, s.t)
    total = total_s(parts)
    if soft == 0.0:
        return total
    work = peer = rdma = 0.0
    for g in range(num_ranks):
        out, into = total_XG[PEER_OUT, g], total_XG[PEER_IN, g]
        once_s, back_s = rank_s(g, prices, s.t)
        work += (prices.forwards * once_s + back_s) * (prices.forwards * once_s + back_s)
        peer += out * out + into * into
    for y in range(num_nics):
        out, into = total_XG[RDMA_OUT, y], total_XG[RDMA_IN, y]
        rdma += out * out + into * into
    slowest = max(parts.compute_s, 1e-30)
    busiest = max(parts.exchange_s / (2.0 * prices.exchange_passes) - prices.latency_s, 1e-30)
    links = peer * prices.peer_s * prices.peer_s / (2 * num_ranks) + rdma * prices.rdma_s * prices.rdma_s / (2 * num_nics)
    return total + soft * (work / (num_ranks * slowest) + 2.0 * prices.exchange_passes * links / busiest)
