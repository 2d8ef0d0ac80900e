"""The search of a row, which begins at the row's start and tries a given number of moves."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.problem.kernels.dispatch import settle
from foremoe.problem.kernels.row_price import Windows, clear_traffic, fill_traffic, row_seconds
from foremoe.problem.kernels.traffic import BY_NODE, PEER_IN, RDMA_IN
from foremoe.problem.rates import Rates, RowTimes, row_rates
from foremoe.problem.rows import empty_of, row_of, sources_of
from foremoe.solvers.rows import Placed
from foremoe.solvers.search.moves import busiest, move
from foremoe.solvers.search.parts import SMOOTHING
from foremoe.solvers.search.start import start_row
from foremoe.solvers.search.state import State, empty_arrays, list_homes, list_replicas, seconds, smoothed, undo

# Letters: N rows, G ranks, S slots per rank, B base slots.

# The weight of the smoothing falls from SOFT to 0. The last moves, a share SHARP, use the price without smoothing.
SOFT, SHARP = 1.0, 0.2
_STEP = 64  # moves between two updates of the smoothing
_SEED = 88172645463325252  # the same for every row, so that a row's plan does not depend on the other rows
# The search of a row may take SHARE of the row's time after its start, or GAIN of the most that it could save if that is less.
# This is a time per rank because all ranks plan at once. The limit is MOST_S on up to MANY ranks and falls with more.
SHARE, GAIN, MOST_S, MANY = 0.005, 0.05, 0.0125, 64
AS_PAYS = -1  # value of `effort`: as many moves as pay
# Seconds of a move on one thread and the seconds that each rank adds, with pairs dispatch and with node dispatch.
PAIR_MOVE_S, PAIR_MOVE_RANK_S = 0.75e-6, 0.009e-6
NODE_MOVE_S, NODE_MOVE_RANK_S = 0.9e-6, 0.045e-6


class Choice(NamedTuple):
    """The settings of the search."""

    effort: int  # moves per row, or AS_PAYS
    parts: int  # bits of `foremoe.solvers.search.parts`
    node_only: bool  # whether replicas stay inside their home's node
    rates: Rates  # rates that limit the copies of a start
    times: RowTimes


@kernel
def _to_gain(num_base, s):
    """Returns the most seconds that a search could save in a row: uneven compute, exposed copies and exchanges. Exchanges count
    without the pairs that a mean rank must receive however its slots are filled."""
    prices, row, sum_XG = s.prices, s.row, s.t.sum_XG
    parts = row_seconds(prices, s.windows, row, s.t)
    even_s = (prices.forwards + prices.backward_ratio) * (prices.gemm_s + prices.pair_s) * s.mean
    num_ranks, num_nics = s.num_G.size, row.ranks.num_nics
    peer, rdma = sum_XG[PEER_IN, :num_ranks].sum() / num_ranks, sum_XG[RDMA_IN, :num_nics].sum() / num_nics
    travels = max(0.0, 1.0 - s.num_slots / num_base)
    least_s = 2.0 * prices.exchange_passes * (prices.latency_s + travels * max(peer * prices.peer_s, rdma * prices.rdma_s))
    exchange_s = max(0.0, parts.exchange_s - least_s)
    return max(0.0, parts.compute_s - even_s) + exchange_s + parts.forward_s + parts.backward_s + parts.slowed_s


@kernel
def moves_of(started_s, num_base, s):
    """Returns the number of moves that pay off in a row whose start placement takes `started_s`."""
    num_ranks = s.num_G.size
    spent_s = min(SHARE * started_s, GAIN * _to_gain(num_base, s)) * num_ranks
    # With more ranks, a move takes longer and a row needs more moves, but the gain of a move does not grow as fast.
    most_s = MOST_S * min(1.0, (MANY / num_ranks) ** (4.0 / 3.0))
    by_node = s.row.ranks.travel == BY_NODE
    move_s = NODE_MOVE_S + NODE_MOVE_RANK_S * num_ranks if by_node else PAIR_MOVE_S + PAIR_MOVE_RANK_S * num_ranks
    return np.int64(min(spent_s, most_s) / move_s)


@kernel
def _descend(effort, s):
    """Tries `effort` moves and keeps those that lower the price."""
    current, soft, aim = 0.0, 0.0, busiest(s)
    for i in range(effort):
        if i % _STEP == 0:
            left = 1.0 - i / effort
            soft = SOFT * max(0.0, (left - SHARP) / (1.0 - SHARP)) if s.parts & SMOOTHING else 0.0
            current = smoothed(soft, s)
        s.num_changes[0] = 0
        made = move(aim, s)
        if made:
            settle(s.row, s.t)
            after = smoothed(soft, s)
            if after < current:
                current, aim = after, busiest(s)
                continue
        undo(made, s)


@kernel
def _search_row(n, rows, choice, t, sources, own, best):
    """Starts and searches row `n` in place: its placement `best` never costs more than its start. `t` is an empty traffic, and
    `own` is the memory of a `State`."""
    (G, S), num_base = best.expert_GS.shape, rows.num_base
    home_GB, replica_GR, num_G, change_4I, num_changes, random = own
    row, w = row_of(rows, n, sources), rows.window_N3[n]
    windows = Windows(w[0], w[1], w[2])
    s = State(
        row, rows.prices, windows, row_rates(choice.rates, choice.times, n), S - num_base, rows.counts.located, choice.node_only,
        choice.parts, row.load_E.sum() / G, t, home_GB, replica_GR, num_G, change_4I, num_changes, random,
    )  # fmt: skip
    start_row(s, best)
    if choice.effort == 0:
        return
    list_homes(row, home_GB, num_G)
    fill_traffic(best.expert_GS, best.quota_GS, num_base, row, t)
    started_s = seconds(s)
    list_replicas(s)
    random[0] = np.uint64(_SEED)
    _descend(moves_of(windows.all_s + started_s, num_base, s) if choice.effort == AS_PAYS else choice.effort, s)
    if seconds(s) < started_s:
        _write(s, num_base, best.expert_GS, best.quota_GS)
    clear_traffic(row, t)


@kernel
def search_rows(low, high, rows, choice, expert_NGS, quota_NGS):
    """Computes the start of rows [low, high) and searches from it. Changes the rows in place."""
    G, S = expert_NGS.shape[1:]
    t, sources, own = empty_of(rows), sources_of(rows), empty_arrays(G, rows.num_base, S - rows.num_base)
    for n in range(low, high):
        _search_row(n, rows, choice, t, sources, own, Placed(expert_NGS[n], quota_NGS[n], np.empty(G, np.int64)))


@kernel
def _write(s, num_base, expert_GS, quota_GS):
    for g in range(expert_GS.shape[0]):
        for b in range(num_base):
            quota_GS[g, b] = s.t.quota_EG[expert_GS[g, b], g]
        for r in range(s.num_slots):
            e = s.replica_GR[g, r] if r < s.num_G[g] else -1
            expert_GS[g, num_base + r] = e
            quota_GS[g, num_base + r] = s.t.quota_EG[e, g] if e >= 0 else 0
