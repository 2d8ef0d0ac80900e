"""Row kernels of `Robust`: replicas for loads that are known as a distribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import Rates, row_rates
from foremoe.solvers.kernels.cover import Fans, cover_loads, home_quotas
from foremoe.solvers.kernels.flow import UNLIMITED, split_row
from foremoe.solvers.kernels.price import fans_seconds, free_fans
from foremoe.solvers.kernels.rows import Placed, empty_idle, home_of_experts

# Letters: N rows, X scenarios, K samples, G ranks, S slots per rank, E experts, I levels of a limit.

# A step along the levels goes on if it saves at least this share.
WORTH = 2e-3
# Copies through one rank, direction and link that are tried; the last is no limit.
LEVELS = (0, 1, 2, 3, 4, 6, 8, 2**31 - 1)
MOST = np.iinfo(np.int32).max


class Options(NamedTuple):
    """Options of `Robust` and of the problem, as row functions take them."""

    node_only: bool  # whether replicas stay inside their home's node
    spread: float  # added to the load of every expert, in mean loads; more where few scenarios are known
    priced: bool  # whether copies cost anything
    complete: bool  # whether one scenario will be real
    most: int  # redundant slots of a rank that are used


class Loads(NamedTuple):
    """What may come in all rows."""

    load_NE: Array  # int32, as foreseen
    load_XNE: Array  # int32, scenarios
    factor_KE: Array  # float64, by which samples differ from what is expected


class Case(NamedTuple):
    """One row: what its replicas are chosen by."""

    share_E: Array  # float64, what experts deserve copies by
    load_KE: Array  # int32, loads that placements are priced on
    node_G: Array  # node of every rank
    num_base: int  # base slots of a rank
    rates: Rates  # coefficients of the closed form, of this row


@kernel
def count_copies(share_E, num, most_E):
    """int64 [E]: copies of every expert, its home included; `num` times, the largest share per copy gets one more.

    No expert has more than `most_E`.
    """
    copies_E, per_copy_E = np.ones(share_E.size, np.int64), share_E.copy()
    for _ in range(num):
        e = np.argmax(per_copy_E)
        while per_copy_E[e] > 0.0 and copies_E[e] >= most_E[e]:
            per_copy_E[e] = 0.0
            e = np.argmax(per_copy_E)
        if per_copy_E[e] <= 0.0:
            break
        copies_E[e] += 1
        per_copy_E[e] = share_E[e] / copies_E[e]
    return copies_E


@kernel
def place_copies(case, fans, expert_GS):
    """Fills redundant slots, which are empty before: heaviest copies first, each to the least loaded rank within `fans`.

    A copy that finds no rank is left out. Returns whether `fans` kept any copy from the least loaded rank: on links inside nodes,
    and across.
    """
    share_E, node_G, num_base = case.share_E, case.node_G, case.num_base
    G, S = expert_GS.shape
    home_E = home_of_experts(num_base, expert_GS) // S
    most = min(np.int64(G), 1 + np.int64(fans.peer) + np.int64(fans.rdma))
    copies_E = count_copies(share_E, G * (S - num_base), np.full(share_E.size, most))
    per_copy_E, load_G, used_G, fan_4G = share_E / copies_E, np.zeros(G), np.full(G, num_base), np.zeros((4, G), np.int64)
    for e in range(share_E.size):
        load_G[home_E[e]] += per_copy_E[e]
    peer_bound = rdma_bound = False
    for e in np.argsort(-per_copy_E, kind="mergesort"):
        home = home_E[e]
        for _ in range(copies_E[e] - 1):
            to, least = -1, np.inf
            for g in range(G):
                if load_G[g] >= least or used_G[g] == S or g == home:
                    continue
                link, fan = (0, fans.peer) if node_G[g] == node_G[home] else (2, fans.rdma)
                if fan_4G[link, home] >= fan or fan_4G[link + 1, g] >= fan:
                    peer_bound |= link == 0
                    rdma_bound |= link == 2
                    continue
                held = False
                for s in range(num_base, used_G[g]):
                    held |= expert_GS[g, s] == e
                if not held:
                    to, least = g, load_G[g]
            if to < 0:
                break
            link = 0 if node_G[to] == node_G[home] else 2
            fan_4G[link, home] += 1
            fan_4G[link + 1, to] += 1
            expert_GS[to, used_G[to]] = e
            used_G[to] += 1
            load_G[to] += per_copy_E[e]
    return peer_bound, rdma_bound


@kernel
def expected_s(case, expert_GS):
    """Seconds of a placement on average over `load_KE`: the slowest rank under the exact split, and all copies."""
    node_G, num_base, (G, S) = case.node_G, case.num_base, expert_GS.shape
    home_E, fan_4G, quota_GS = home_of_experts(num_base, expert_GS), np.zeros((4, G), np.int64), np.zeros((G, S), np.int32)
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] >= 0:
                home = home_E[expert_GS[g, s]] // S
                link = 0 if node_G[home] == node_G[g] else 2
                fan_4G[link, home] += 1
                fan_4G[link + 1, g] += 1
    load_G, compute_s = np.zeros(G, np.int64), 0.0
    for load_E in case.load_KE:
        home_quotas(load_E, num_base, expert_GS, quota_GS, load_G)
        split_row(-(-load_G.sum() // G), UNLIMITED, num_base, Placed(expert_GS, quota_GS, load_G))
        slowest_s = 0.0
        for g in range(G):
            copies = fan_4G[1, g] + fan_4G[3, g]
            slowest_s = max(slowest_s, case.rates.pair_s * load_G[g] + case.rates.slot_s * (num_base + copies))
        compute_s += slowest_s
    return compute_s / case.load_KE.shape[0] + fans_seconds(fan_4G, case.rates)


class _Walk(NamedTuple):
    """The walk over limits: where it began, and the best so far."""

    home_GS: Array
    best_GS: Array
    best_s: Array  # float64 [1]


@kernel
def _try(case, peer, rdma, walk):
    """Whether `place_copies` with these levels of limits takes clearly less than the best, and whether each limit bound.

    The best is replaced by what takes less.
    """
    tried_GS = walk.home_GS.copy()
    peer_bound, rdma_bound = place_copies(case, Fans(np.int64(LEVELS[peer]), np.int64(LEVELS[rdma])), tried_GS)
    tried_s = expected_s(case, tried_GS)
    better = tried_s < (1.0 - WORTH) * walk.best_s[0]
    if tried_s < walk.best_s[0]:
        walk.best_GS[:, :] = tried_GS
        walk.best_s[0] = tried_s
    return better, peer_bound, rdma_bound


@inner_kernel
def _hidden_levels(rates, node_only):
    """The highest levels at which all copies hide, inside nodes and across."""
    free_peer, free_rdma = free_fans(rates)
    peer = rdma = 0
    for level in range(len(LEVELS) - 1):
        peer = level if LEVELS[level] <= free_peer else peer
        rdma = level if LEVELS[level] <= free_rdma and not node_only else rdma
    return peer, rdma


@kernel
def walk_levels(case, node_only, best_GS):
    """The limits whose replicas take the fewest expected seconds; these replicas are written to `best_GS`, bare homes before.

    Homes stay where no replicas are cheaper. Begins with as many copies as hide; then each limit is raised while it keeps copies
    from where they are wanted and more of them pay.
    """
    last = len(LEVELS) - 1
    walk = _Walk(best_GS.copy(), best_GS, np.full(1, expected_s(case, best_GS)))
    peer, rdma = _hidden_levels(case.rates, node_only)
    _, peer_bound, rdma_bound = _try(case, peer, rdma, walk)
    better = not node_only
    while better and rdma_bound and rdma < last:
        better, peer_bound, rdma_bound = _try(case, peer, rdma + 1, walk)
        rdma += better
    better = True
    while better and peer_bound and peer < last:
        better, peer_bound, _ = _try(case, peer + 1, rdma, walk)
        peer += better
    return Fans(np.int64(LEVELS[peer]), np.int64(LEVELS[rdma]))


@inner_kernel
def keep_replicas(num_base, expert_GS, quota_GS):
    """Gives every replica without pairs one of those of its expert's largest slot: what was copied is part of the plan."""
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
def keep_rows(low, high, num_base, expert_NGS, quota_NGS):
    """`keep_replicas` for rows [low, high)."""
    for n in range(low, high):
        keep_replicas(num_base, expert_NGS[n], quota_NGS[n])


@kernel
def _forecast(load_E, load_XE, share_E):
    """Expected load to `share_E`: half `load_E`, half the mean of scenarios, which count by their shares of a total.

    Returns the number of loads that this is the mean of, at least 1.
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
def _cover(case, fans, priced, expert_GS):
    """Replaces the replicas of a row by those of `cover_loads`, if they take less or nothing is priced."""
    tried_GS = expert_GS.copy()
    tried_GS[:, case.num_base :] = -1
    cover_loads(case.share_E, case.load_KE, case.node_G, case.num_base, fans, tried_GS)
    if not priced or expected_s(case, tried_GS) < expected_s(case, expert_GS):
        expert_GS[:, :] = tried_GS


@kernel
def robust_row(load_E, load_XE, factor_KE, case, options, expert_GS, quota_GS):
    """Chooses the replicas of one row, in place, and splits `load_E` over them; a row without load keeps what it has."""
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
    # As the standard error of a forecast from so many loads of equal spread.
    case.share_E[:] += options.spread * np.sqrt(1.0 + 1.0 / num) * case.share_E.mean()
    used_GS = expert_GS[:, : min(expert_GS.shape[1], num_base + options.most)].copy()
    fans = Fans(unlimited, np.int64(0) if options.node_only else unlimited)
    if options.priced:
        fans = walk_levels(case, options.node_only, used_GS)
    elif not options.complete:
        place_copies(case, fans, used_GS)
    if options.complete:
        _cover(case, fans, options.priced, used_GS)
        peer, rdma = _hidden_levels(case.rates, options.node_only)
        if options.priced and (LEVELS[peer] != fans.peer or LEVELS[rdma] != fans.rdma):
            _cover(case, Fans(np.int64(LEVELS[peer]), np.int64(LEVELS[rdma])), True, used_GS)
    expert_GS[:, : used_GS.shape[1]] = used_GS
    load_G = np.zeros(expert_GS.shape[0], np.int64)
    home_quotas(load_E, num_base, expert_GS, quota_GS, load_G)
    split_row(-(-load_G.sum() // load_G.size), UNLIMITED, num_base, Placed(expert_GS, quota_GS, load_G))
    keep_replicas(num_base, expert_GS, quota_GS)
    empty_idle(num_base, expert_GS, quota_GS)


@kernel
def robust_rows(low, high, rows, loads, options, expert_NGS, quota_NGS):
    """`robust_row` for rows [low, high)."""
    load_NE, load_XNE, factor_KE = loads
    share_E, load_KE = np.empty(load_NE.shape[1]), np.empty(factor_KE.shape, np.int32)
    for n in range(low, high):
        case = Case(share_E, load_KE, rows.node_G, rows.num_base, row_rates(rows.rates, rows.times, n))
        robust_row(load_NE[n], load_XNE[:, n].copy(), factor_KE, case, options, expert_NGS[n], quota_NGS[n])
