"""Rows of a problem, in the form that compiled pricing reads."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.problem.counts import Counts
from foremoe.problem.kernels.row_price import Prices, Windows, clear_traffic, fill_traffic, row_seconds
from foremoe.problem.kernels.traffic import BY_NODE, Ranks, Row, empty_traffic

# Letters: N rows, G ranks, E experts, L layers.


class Rows(NamedTuple):
    """All rows of a problem, as arrays that compiled functions read."""

    counts: Counts
    home_LE: Array  # int64, home rank of every expert
    num_base: int
    ranks: Ranks
    prices: Prices
    window_N3: Array  # values of `Windows` for every row


@kernel
def empty_of(rows):
    """Returns an empty `Traffic` for the rows of a problem."""
    ranks = rows.ranks
    return empty_traffic(
        rows.counts.load_NE.shape[1], ranks.node_G.size, ranks.first_V.size - 1, ranks.num_nics, ranks.travel == BY_NODE
    )  # fmt: skip


@kernel
def row_of(rows, n, pairs_G):
    """Returns row `n`. The number of pairs of every source is written to `pairs_G`."""
    counts = rows.counts
    at = n if counts.located else 0
    pairs_G[:] = 0.0
    if counts.located:
        for g in range(pairs_G.size):
            pairs = np.int64(0)
            for e in range(counts.load_NE.shape[1]):
                pairs += counts.load_NGE[n, g, e]
            pairs_G[g] = pairs
    home_E = rows.home_LE[n % rows.home_LE.shape[0]]
    return Row(counts.load_NGE[at], counts.demand_NVE[at], pairs_G, counts.load_NE[n], home_E, rows.ranks)


@kernel
def price_rows(low, high, rows, expert_NGS, quota_NGS, out_N5):
    """Writes the `Seconds` of rows [low, high) to `out_N5`."""
    t, pairs_G = empty_of(rows), np.empty(rows.ranks.node_G.size)
    for n in range(low, high):
        row = row_of(rows, n, pairs_G)
        fill_traffic(expert_NGS[n], quota_NGS[n], rows.num_base, row, t)
        all_s, forward_s, backward_s = rows.window_N3[n, 0], rows.window_N3[n, 1], rows.window_N3[n, 2]
        seconds = row_seconds(rows.prices, Windows(all_s, forward_s, backward_s), row, t)
        out_N5[n, 0], out_N5[n, 1], out_N5[n, 2] = seconds.compute_s, seconds.exchange_s, seconds.forward_s
        out_N5[n, 3], out_N5[n, 4] = seconds.backward_s, seconds.slowed_s
        clear_traffic(row, t)
