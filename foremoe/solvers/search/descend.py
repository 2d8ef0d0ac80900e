"""The search of a row: moves until there were enough of them."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.problem.kernels.row_price import Windows, clear_traffic, fill_traffic
from foremoe.problem.kernels.traffic import settle
from foremoe.problem.rows import empty_of, row_of
from foremoe.solvers.search.moves import busiest, move
from foremoe.solvers.search.state import State, empty_arrays, hold, list_homes, list_replicas, seconds, smoothed, undo

# Letters: N rows, G ranks, S slots per rank, B base slots.

# The price is smoothed by SOFT at first, and not at all in the last SHARP of the moves.
SOFT, SHARP = 1.0, 0.2
_STEP = 64  # moves between two looks at how smooth the price is


@kernel
def _descend(effort, s):
    """Tries `effort` moves."""
    current, soft, aim = 0.0, 0.0, busiest(s)
    for i in range(effort):
        if i % _STEP == 0:
            left = 1.0 - i / effort
            soft = SOFT * max(0.0, (left - SHARP) / (1.0 - SHARP))
            current = smoothed(soft, s)
        s.num_changes[0] = 0
        if move(aim, s):
            settle(s.row, s.t)
            after = smoothed(soft, s)
            if after < current:
                current, aim = after, busiest(s)
                continue
        undo(s)


@kernel
def search_rows(low, high, rows, effort, node_only, expert_NGS, quota_NGS):
    """Searches rows [low, high), in place."""
    G, S = expert_NGS.shape[1:]
    num_base = rows.num_base
    t, pairs_G, own = empty_of(rows), np.empty(G), empty_arrays(G, num_base, S - num_base)
    home_GB, replica_GR, num_G, change_4I, num_changes, random = own
    for n in range(low, high):
        row, w = row_of(rows, n, pairs_G), rows.window_N3[n]
        mean = 0.0
        for g in range(G):
            mean += pairs_G[g] / G
        windows = Windows(w[0], w[1], w[2])
        list_homes(row, home_GB, num_G)
        s = State(
            row, rows.prices, windows, S - num_base, node_only, mean, t, home_GB, replica_GR, num_G, change_4I, num_changes,
            random,
        )  # fmt: skip
        hold(s)
        at_home = seconds(s)
        clear_traffic(row, t)
        fill_traffic(expert_NGS[n], quota_NGS[n], num_base, row, t)
        started = seconds(s)
        if at_home < started:
            clear_traffic(row, t)
            hold(s)
        list_replicas(s)
        random[0] = np.uint64(88172645463325252) + np.uint64(n)
        _descend(effort, s)
        if seconds(s) >= min(at_home, started):  # smoothness was worth more than what it led to
            clear_traffic(row, t)
            hold(s)
            list_replicas(s)
        if seconds(s) < started:
            _write(s, num_base, expert_NGS[n], quota_NGS[n])
        clear_traffic(row, t)


@kernel
def _write(s, num_base, expert_GS, quota_GS):
    for g in range(expert_GS.shape[0]):
        for b in range(num_base):
            quota_GS[g, b] = s.t.quota_EG[expert_GS[g, b], g]
        for r in range(s.num_slots):
            e = s.replica_GR[g, r] if r < s.num_G[g] else -1
            expert_GS[g, num_base + r] = e
            quota_GS[g, num_base + r] = s.t.quota_EG[e, g] if e >= 0 else 0
