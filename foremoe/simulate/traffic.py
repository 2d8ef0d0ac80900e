"""Computes how long the exchanges of every row keep links busy, by link class."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.plan.plan import Plan
from foremoe.problem.kernels.row_price import clear_traffic, fill_traffic
from foremoe.problem.kernels.traffic import PEER_IN, PEER_OUT, RDMA_IN, RDMA_OUT
from foremoe.problem.pricing import problem_rows
from foremoe.problem.problem import Problem
from foremoe.problem.rows import Rows, empty_of, row_of, sources_of
from foremoe.simulate.nics import add_row
from foremoe.simulate.token_traffic import counted_messages

# Letters: N rows, G ranks, V nodes, Y NICs, E experts, S slots per rank.


class Exchange(NamedTuple):
    """Seconds of one dispatch per row. Combine and both exchanges of a backward pass send the same pairs or send them back."""

    peer_N: Array  # busiest rank and direction
    rdma_N: Array  # busiest NIC and direction
    peer_busy_G: Array  # sends plus receives, summed over rows with their weights
    rdma_busy_G: Array


def exchange(problem: Problem, plan: Plan, weight_N: Array) -> Exchange:
    """Returns the exchanges of every row of a plan under the split law. Row n dispatches ``weight_N[n]`` (int64) times.

    If tokens are sent once per node, messages are counted if the problem has the routing of tokens, and otherwise estimated (see
    `reached`).
    """
    load_NGE = problem.load_NGE
    if load_NGE is None:
        raise InputError("simulation needs counts by source rank; give the problem its load_MLGE.")
    cluster, busy_N2, rows = problem.cluster, np.zeros((problem.N, 2)), problem_rows(problem)
    pair_s, nic_G = np.array([rows.prices.peer_s, rows.prices.rdma_s]), cluster.nic_of_rank_G
    parts: list[Array] = []
    if cluster.dispatch == "node" and problem.routed is not None:
        counted = _Counted(*counted_messages(problem, plan), weight_N, nic_G, pair_s, busy_N2)
        for_rows(lambda low, high: parts.append(_busy_rows(low, high, counted)), problem.N, whole=True)
    else:
        # These are per rank. They are summed to NICs below.
        alone = rows.ranks._replace(nic_G=np.arange(problem.G), num_nics=problem.G)
        quota_NGS = np.ascontiguousarray(plan.quota_NGS)
        given = _Rows(rows._replace(ranks=alone), plan.expert_NGS, quota_NGS, weight_N, nic_G, pair_s, busy_N2)
        for_rows(lambda low, high: parts.append(_exchange_rows(low, high, given)), problem.N, whole=True)
    peer_busy_G, rdma_busy_G = np.sum(parts, axis=0) * pair_s[:, None]
    return Exchange(busy_N2[:, 0], busy_N2[:, 1], peer_busy_G, rdma_busy_G)


class _Counted(NamedTuple):
    """Messages of every row, seconds of one message by link class, and output arrays for the seconds of the rows."""

    peer_N2G: Array
    rdma_N2G: Array
    weight_N: Array
    nic_G: Array
    pair_s: Array
    busy_N2: Array


@kernel
def _busy_rows(low, high, rows):
    """Writes the seconds of rows [low, high). Returns the weighted messages of every rank by link class, int64 [2, G]."""
    total_2G, nic_2Y = np.zeros((2, rows.nic_G.size), np.int64), np.empty((2, rows.nic_G.max() + 1), np.int64)
    for n in range(low, high):
        add_row(n, rows.peer_N2G[n], rows.rdma_N2G[n], rows, rows.pair_s, nic_2Y, total_2G)
    return total_2G


class _Rows(NamedTuple):
    """Rows of a plan, seconds of one pair or message by link class, and output arrays for the seconds of the rows."""

    rows: Rows
    expert_NGS: Array
    quota_NGS: Array
    weight_N: Array
    nic_G: Array
    pair_s: Array
    busy_N2: Array


@kernel
def _exchange_rows(low, high, given):
    """Writes the seconds of rows [low, high). Returns weighted pairs or messages of every rank by link class, float64 [2, G]."""
    rows, t = given.rows, empty_of(given.rows)
    G = given.nic_G.size
    sources, total_2G, nic_2Y = sources_of(rows), np.zeros((2, G)), np.empty((2, given.nic_G.max() + 1))
    for n in range(low, high):
        row = row_of(rows, n, sources)
        fill_traffic(given.expert_NGS[n], given.quota_NGS[n], rows.num_base, row, t)
        add_row(n, t.sum_XG[PEER_OUT : PEER_IN + 1], t.sum_XG[RDMA_OUT : RDMA_IN + 1], given, given.pair_s, nic_2Y, total_2G)
        clear_traffic(row, t)
    return total_2G
