"""Placement of replicas that balance several possible loads. There is one placement, and a separate split for each load."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rates import add_copies
from foremoe.solvers.rows import Placed, home_of_experts
from foremoe.solvers.split.flow import UNLIMITED, split_row

# Letters: X loads, G ranks, S slots per rank, E experts.

# A load counts as balanced if the largest rank load exceeds the mean by at most this share.
BALANCED = 5e-4


class Limits(NamedTuple):
    """Maximum numbers of copies to or from one rank, inside its node and between nodes, and of copies on one rank."""

    peer: int
    rdma: int
    slots: int


@inner_kernel
def home_quotas(load_E, num_base, expert_GS, quota_GS, load_G):
    """Writes the quotas for which homes serve all load, and the resulting load of every rank."""
    G, S = expert_GS.shape
    for g in range(G):
        load_G[g] = 0
        for s in range(S):
            quota_GS[g, s] = load_E[expert_GS[g, s]] if s < num_base else 0
            load_G[g] += quota_GS[g, s]


class _Cover(NamedTuple):
    """Placement under construction."""

    expert_GS: np.ndarray
    home_E: np.ndarray  # int64, home rank of every expert
    used_G: np.ndarray  # int64, number of occupied slots of every rank
    slots: int  # maximum number of occupied slots per rank
    fan_4G: np.ndarray  # int64, copies out of every rank and into it, first on peer links, then on RDMA links
    even_G: np.ndarray  # float64, expected load of every rank if all copies of an expert had equal shares


@inner_kernel
def _room(e, g, node_G, limits, cover):
    """Returns whether rank g can take a copy of expert e."""
    home = cover.home_E[e]
    if cover.used_G[g] == cover.slots or g == home:
        return False
    for s in range(cover.used_G[g]):
        if cover.expert_GS[g, s] == e:
            return False
    link, fan = (0, limits.peer) if node_G[g] == node_G[home] else (2, limits.rdma)
    return cover.fan_4G[link, home] < fan and cover.fan_4G[link + 1, g] < fan


@inner_kernel
def _best_copy(quota_GS, load_G, node_G, limits, cover):
    """Returns the expert and the rank of the next copy, or -1 and -1 if no expert of the most loaded rank has room elsewhere.

    The expert is the one with the largest quota on the most loaded rank. Its copy goes to the rank where the sum of load and
    expected load is smallest.
    """
    G, S = quota_GS.shape
    full = 0
    for g in range(G):
        if load_G[g] > load_G[full]:
            full = g
    expert, to, most = -1, -1, np.int64(0)
    for s in range(S):
        e = cover.expert_GS[full, s]
        if e < 0 or quota_GS[full, s] <= most:
            continue
        rank, least = -1, np.inf
        for g in range(G):
            load = cover.even_G[g] + load_G[g]
            if load < least and load_G[g] < load_G[full] and _room(e, g, node_G, limits, cover):
                rank, least = g, load
        if rank >= 0:
            expert, to, most = e, rank, np.int64(quota_GS[full, s])
    return expert, to


@inner_kernel
def _add_copy(e, to, share, num_copies, node_G, cover):
    """Adds a copy of an expert that has `num_copies` copies to a rank."""
    old, new = share / num_copies, share / (num_copies + 1)
    for g in range(cover.even_G.size):
        for s in range(cover.used_G[g]):
            if cover.expert_GS[g, s] == e:
                cover.even_G[g] += new - old
    cover.even_G[to] += new
    cover.expert_GS[to, cover.used_G[to]] = e
    cover.used_G[to] += 1
    add_copies(1, cover.home_E[e], to, node_G, cover.fan_4G)


@kernel
def cover_loads(share_E, load_XE, node_G, num_base, limits, expert_GS):
    """Adds replicas to empty redundant slots until every load can be balanced or no further replica within `limits` helps.

    The load with the worst balance gets the next replica and is split again. Any other load is split again only when its balance
    is the worst, because additional replicas can only improve its balance.
    """
    (G, S), X = expert_GS.shape, load_XE.shape[0]
    even_G, copies_E = np.zeros(G), np.ones(share_E.size, np.int64)
    home_E = home_of_experts(num_base, expert_GS) // S
    slots = num_base + min(limits.slots, S - num_base)
    cover = _Cover(expert_GS, home_E, np.full(G, num_base), slots, np.zeros((4, G), np.int64), even_G)
    for e in range(share_E.size):
        even_G[home_E[e]] += share_E[e]
    quota_XGS, load_XG = np.zeros((X, G, S), np.int32), np.zeros((X, G), np.int64)
    skew_X, known_X, num = np.zeros(X), np.zeros(X, np.int64), 0
    for x in range(X):
        home_quotas(load_XE[x], num_base, expert_GS, quota_XGS[x], load_XG[x])
        skew_X[x] = load_XG[x].max() * G / max(1, load_XG[x].sum())
    while True:
        x = np.argmax(skew_X)
        if skew_X[x] <= 1.0 + BALANCED:
            return
        quota_GS, load_G = quota_XGS[x], load_XG[x]
        total = load_G.sum()
        if known_X[x] < num:
            known_X[x] = num
            skew_X[x] = split_row(-(-total // G), UNLIMITED, num_base, Placed(expert_GS, quota_GS, load_G)) * G / total
            continue
        e, to = _best_copy(quota_GS, load_G, node_G, limits, cover)
        if e < 0:
            skew_X[x] = 0.0
            continue
        _add_copy(e, to, share_E[e], copies_E[e], node_G, cover)
        copies_E[e] += 1
        num += 1
