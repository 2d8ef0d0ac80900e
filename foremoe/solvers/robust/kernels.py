"""Row kernels of `Robust`. They choose replicas for loads that are known only as a distribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import Rates, RowTimes, row_rates
from foremoe.solvers.robust.cover import Limits, cover_loads, home_quotas
from foremoe.solvers.robust.limits import LEVELS, Case, expected_s, hidden_levels, limits_of, place_copies, walk_levels
from foremoe.solvers.rows import Placed, empty_idle
from foremoe.solvers.split.flow import UNLIMITED, split_row

# Letters: N rows, X scenarios, K samples, G ranks, S slots per rank, E experts, I levels of a limit.

MOST = np.iinfo(np.int32).max


class Options(NamedTuple):
    """Options of `Robust` and of the problem, in the form that row functions read."""

    node_G: Array  # node of every rank
    num_base: int  # base slots of a rank
    rates: Rates
    times: RowTimes
    node_only: bool  # whether replicas must stay inside their home's node
    spread: float  # load added to every expert, in mean loads; more if few scenarios are known
    priced: bool  # whether copies have a price
    complete: bool  # whether one of the scenarios will occur


class Loads(NamedTuple):
    """The possible loads of all rows."""

    load_NE: Array  # int32, predicted loads
    load_XNE: Array  # int32, scenarios
    factor_KE: Array  # float64, factors between samples and the expected load


@inner_kernel
def keep_replicas(num_base, expert_GS, quota_GS):
    """Gives every replica without pairs one pair from its expert's largest slot, so that the replica stays in the plan."""
    G, S = expert_GS.shape
    for g in range(G):
        for s in range(num_base, S):
            e = expert_GS[g, s]
            if e < 0 or quota_GS[g, s] > 0:
                continue
            rank, slot = -1, -1
            for h in range(G):
                for i in range(S):
                    if expert_GS[h, i] == e and (rank < 0 or quota_GS[h, i] > quota_GS[rank, slot]):
                        rank, slot = h, i
            if quota_GS[rank, slot] > 1:
                quota_GS[rank, slot] -= 1
                quota_GS[g, s] = 1


@kernel
def _level_kept(num_base, placed):
    """Splits load exactly, in place, but leaves one pair in every replica that has pairs."""
    fixed_GS = placed.quota_GS > 0
    fixed_GS[:, :num_base] = False
    placed.quota_GS[:] -= fixed_GS
    split_row(-(-placed.load_G.sum() // placed.load_G.size), UNLIMITED, num_base, placed)
    placed.quota_GS[:] += fixed_GS


@kernel
def keep_rows(low, high, num_base, exact, expert_NGS, quota_NGS):
    """Runs `keep_replicas` on rows [low, high). With `exact`, the rows are balanced again afterwards."""
    for n in range(low, high):
        keep_replicas(num_base, expert_NGS[n], quota_NGS[n])
        if exact:
            load_G = np.zeros(expert_NGS.shape[1], np.int64)
            for g in range(load_G.size):
                load_G[g] = quota_NGS[n, g].sum()
            _level_kept(num_base, Placed(expert_NGS[n], quota_NGS[n], load_G))


@kernel
def _forecast(load_E, load_XE, share_E):
    """Writes the expected load to `share_E`, and returns the number of loads that it is based on, at least 1.

    The expected load is the mean of `load_E` and of the average scenario. Scenarios are scaled to the same total load.
    """
    total, num = max(1.0, load_E.sum()), 0
    for x in range(load_XE.shape[0]):
        num += load_XE[x].max() > 0
    share_E[:] = load_E
    if num == 0:
        return 1
    share_E *= 0.5
    for x in range(load_XE.shape[0]):
        share_E += load_XE[x] * (0.5 * total / num / max(1, load_XE[x].sum()))
    return num


@kernel
def _cover(case, limits, priced, expert_GS):
    """Replaces a row's replicas with the result of `cover_loads` if it takes less time or copies have no price."""
    tried_GS = expert_GS.copy()
    tried_GS[:, case.num_base :] = -1
    cover_loads(case.share_E, case.load_KE, case.node_G, case.num_base, limits, tried_GS)
    if not priced or expected_s(case, tried_GS) < expected_s(case, expert_GS):
        expert_GS[:, :] = tried_GS


@kernel
def robust_row(load_E, load_XE, factor_KE, case, options, expert_GS, quota_GS):
    """Chooses the replicas of one row in place and splits `load_E` over homes and replicas. A row without load is not changed."""
    if load_E.max() <= 0:
        return
    num_base, unlimited = case.num_base, np.int64(LEVELS[-1])
    expert_GS[:, num_base:] = -1
    num = _forecast(load_E, load_XE, case.share_E)
    if options.complete:
        case = Case(case.share_E, load_XE, case.node_G, num_base, case.rates)
    else:
        for k in range(factor_KE.shape[0]):
            scale = case.share_E.sum() / max(1e-300, (case.share_E * factor_KE[k]).sum())
            for e in range(load_E.size):
                case.load_KE[k, e] = min(case.share_E[e] * factor_KE[k, e] * scale, MOST)
    # The factor follows the standard error of a forecast from `num` loads of equal spread.
    case.share_E[:] += options.spread * np.sqrt(1.0 + 1.0 / num) * case.share_E.mean()
    limits = Limits(unlimited, np.int64(0) if options.node_only else unlimited, unlimited)
    if options.priced:
        limits = walk_levels(case, options.node_only, expert_GS)
    elif not options.complete:
        place_copies(case, limits, expert_GS)
    if options.complete:
        _cover(case, limits, options.priced, expert_GS)
        peer, rdma = hidden_levels(case.rates, options.node_only)
        if options.priced and (LEVELS[peer] != limits.peer or LEVELS[rdma] != limits.rdma):
            _cover(case, limits_of(peer, rdma, limits.slots), True, expert_GS)
    load_G = np.zeros(expert_GS.shape[0], np.int64)
    home_quotas(load_E, num_base, expert_GS, quota_GS, load_G)
    split_row(-(-load_G.sum() // load_G.size), UNLIMITED, num_base, Placed(expert_GS, quota_GS, load_G))
    keep_replicas(num_base, expert_GS, quota_GS)
    empty_idle(num_base, expert_GS, quota_GS)


@kernel
def robust_rows(low, high, loads, options, expert_NGS, quota_NGS):
    """Runs `robust_row` on rows [low, high)."""
    load_NE, load_XNE, factor_KE = loads
    share_E, load_KE = np.empty(load_NE.shape[1]), np.empty(factor_KE.shape, np.int32)
    for n in range(low, high):
        case = Case(share_E, load_KE, options.node_G, options.num_base, row_rates(options.rates, options.times, n))
        robust_row(load_NE[n], load_XNE[:, n].copy(), factor_KE, case, options, expert_NGS[n], quota_NGS[n])
