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


_CACHED = 16  # numbers in a line of the cache


@kernel
def sources_of(rows):
    """Returns the memory that `row_of` needs, for all rows in turn."""
    G = rows.ranks.node_G.size
    return np.zeros((rows.counts.load_NE.shape[1], G), np.int32), np.zeros(G), np.zeros(G), np.zeros(G)


@kernel
def row_of(rows, n, sources):
    """Returns row `n`. Its loads by source are written to `sources`."""
    counts, (load_EG, pairs_G, tokens_G, scale_G) = rows.counts, sources
    at, (E, G) = n if counts.located else 0, load_EG.shape
    if counts.located:
        load_GE = counts.load_NGE[n]
        for low in range(0, E, _CACHED):
            for g in range(G):
                for e in range(low, min(low + _CACHED, E)):
                    load_EG[e, g] = load_GE[g, e]
        for g in range(G):
            pairs = load_GE[g].sum()
            pairs_G[g], tokens_G[g], scale_G[g] = pairs, pairs / rows.ranks.num_topk, E / max(1, pairs)
    home_E = rows.home_LE[n % rows.home_LE.shape[0]]
    return Row(load_EG, counts.demand_NVE[at], pairs_G, tokens_G, scale_G, counts.load_NE[n], home_E, rows.ranks)


@kernel
def price_rows(low, high, rows, expert_NGS, quota_NGS, out_N5):
    """Writes the `Seconds` of rows [low, high) to `out_N5`."""
    t, sources = empty_of(rows), sources_of(rows)
    for n in range(low, high):
        row = row_of(rows, n, sources)
        fill_traffic(expert_NGS[n], quota_NGS[n], rows.num_base, row, t)
        all_s, forward_s, backward_s = rows.window_N3[n, 0], rows.window_N3[n, 1], rows.window_N3[n, 2]
        seconds = row_seconds(rows.prices, Windows(all_s, forward_s, backward_s), row, t)
        out_N5[n, 0], out_N5[n, 1], out_N5[n, 2] = seconds.compute_s, seconds.exchange_s, seconds.forward_s
        out_N5[n, 3], out_N5[n, 4] = seconds.backward_s, seconds.slowed_s
        clear_traffic(row, t)
