"""A row and its placement as compiled functions take them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.counts import Counts
from foremoe.problem.estimate import problem_rates, row_times
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates, RowTimes, row_rates

# Letters: N rows, G ranks, S slots per rank, E experts, V nodes.


class Rows(NamedTuple):
    """All rows of a problem."""

    counts: Counts  # load by expert, and by source if that is known
    node_G: Array  # node of every rank
    num_base: int  # base slots of a rank
    node_only: bool  # whether replicas stay inside their home's node
    rates: Rates  # coefficients of the closed form
    times: RowTimes  # what of the closed form differs by row


class Row(NamedTuple):
    """One row: all that its placements are priced by."""

    load_E: Array  # int32, pairs per expert
    load_GE: Array  # int32, pairs by source rank; read if `located`
    demand_VE: Array  # int32, pairs by source node; read if `located`
    located: bool  # whether sources are known
    node_G: Array  # node of every rank
    num_base: int  # base slots of a rank
    node_only: bool  # whether replicas stay inside their home's node
    rates: Rates  # coefficients of the closed form, of this row
    home_E: Array  # int64, home slot p = g*S + b of every expert
    busy_G: Array  # int64, base slots whose expert has load


class Placed(NamedTuple):
    """The placement of one row, changed in place: -1 in a redundant slot is a free slot."""

    expert_GS: Array  # int16, expert in every slot
    quota_GS: Array  # int32, pairs that every slot serves
    load_G: Array  # int64, sums of `quota_GS`


def problem_rows(problem: Problem) -> Rows:
    """The rows of a problem."""
    node_G, node_only = problem.cluster.node_of_rank_G, problem.replicas == "node"
    return Rows(problem.counts(), node_G, problem.B, node_only, problem_rates(problem), row_times(problem))


@kernel
def row_of(rows, n, expert_GS):
    """Row `n`; `expert_GS` holds its homes."""
    counts, num_base = rows.counts, rows.num_base
    load_E, at = counts.load_NE[n], n if counts.located else 0
    G, S = expert_GS.shape
    home_E, busy_G = np.empty(load_E.size, np.int64), np.zeros(G, np.int64)
    for g in range(G):
        for b in range(num_base):
            e = expert_GS[g, b]
            home_E[e] = g * S + b
            busy_G[g] += load_E[e] > 0
    return Row(
        load_E, counts.load_NGE[at], counts.demand_NVE[at], counts.located, rows.node_G, num_base, rows.node_only,
        row_rates(rows.rates, rows.times, n), home_E, busy_G,
    )  # fmt: skip


@kernel
def home_of_experts(num_base, expert_GS):
    """int64 [E]: home p = g*S + b of every expert."""
    G, S = expert_GS.shape
    home_E = np.empty(G * num_base, np.int64)
    for g in range(G):
        for b in range(num_base):
            home_E[expert_GS[g, b]] = g * S + b
    return home_E


@kernel
def bare_homes(load_E, num_base, expert_GS):
    """The `Placed` with all load at home and no replicas; `expert_GS` holds the homes."""
    G = expert_GS.shape[0]
    home_GS, quota_GS, load_G = expert_GS.copy(), np.zeros(expert_GS.shape, np.int32), np.zeros(G, np.int64)
    home_GS[:, num_base:] = -1
    for g in range(G):
        for b in range(num_base):
            quota_GS[g, b] = load_E[expert_GS[g, b]]
            load_G[g] += quota_GS[g, b]
    return Placed(home_GS, quota_GS, load_G)


@kernel
def copy_of(placed):
    """A copy of a placement."""
    return Placed(placed.expert_GS.copy(), placed.quota_GS.copy(), placed.load_G.copy())


@inner_kernel
def assign(placed, other):
    """Overwrites a placement with another."""
    (expert_GS, quota_GS, load_G), (from_expert_GS, from_quota_GS, from_load_G) = placed, other
    for g in range(load_G.size):
        load_G[g] = from_load_G[g]
        for s in range(expert_GS.shape[1]):
            expert_GS[g, s], quota_GS[g, s] = from_expert_GS[g, s], from_quota_GS[g, s]


@kernel
def empty_idle(num_base, expert_GS, quota_GS):
    """Empties redundant slots without quota: the canonical form of a row."""
    for g in range(expert_GS.shape[0]):
        for s in range(num_base, expert_GS.shape[1]):
            if quota_GS[g, s] == 0:
                expert_GS[g, s] = -1


@inner_kernel
def clean_row(num_base, placed):
    """Empties redundant slots without quota and sums up loads."""
    expert_GS, quota_GS, load_G = placed
    for g in range(expert_GS.shape[0]):
        load_G[g] = 0
        for s in range(expert_GS.shape[1]):
            load_G[g] += quota_GS[g, s]
            if s >= num_base and quota_GS[g, s] == 0:
                expert_GS[g, s] = -1
