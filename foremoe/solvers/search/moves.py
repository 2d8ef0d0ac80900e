"""Moves of the search. Each move aims at a busy rank, link or NIC, often the busiest of the row."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inner_kernel
from foremoe.problem.kernels.row_price import rank_s
from foremoe.problem.kernels.traffic import PAIRS, PEER_IN, PEER_OUT, RDMA_IN, RDMA_OUT
from foremoe.solvers.search.parts import BUSIEST, LINKS, RANKS, REPLACEMENT, WANTED
from foremoe.solvers.search.state import below, chance, give

# Letters: G ranks, V nodes, E experts.

# Shares of the moves that aim at compute and at links.
COMPUTE, LINKED = 0.18, 0.75
NEW, WANTED_SHARE = 0.5, 0.4  # shares with a new replica despite other holders, and with as many pairs as tokens there need


@inner_kernel
def busiest(s):
    """Returns the slowest rank and the busiest link. The link is given as its row of the sums and as its rank or NIC."""
    prices, total_XG = s.prices, s.t.sum_XG
    rank, slowest = np.int64(0), -1.0
    link, at, most = np.int64(PEER_OUT), np.int64(0), -1.0
    for g in range(s.t.quota_EG.shape[1]):
        once_s, back_s = rank_s(g, prices, s.t)
        x = prices.forwards * once_s + back_s
        if x > slowest:
            rank, slowest = g, x
        for way in (PEER_OUT, PEER_IN):
            if total_XG[way, g] * prices.peer_s > most:
                link, at, most = way, g, total_XG[way, g] * prices.peer_s
    for y in range(s.row.ranks.num_nics):
        for way in (RDMA_OUT, RDMA_IN):
            if total_XG[way, y] * prices.rdma_s > most:
                link, at, most = way, y, total_XG[way, y] * prices.rdma_s
    return rank, link, at


@inner_kernel
def _some_expert(g, s):
    """Returns a random expert that a rank serves, or -1 if none was found."""
    num_base = s.home_GB.shape[1]
    for _ in range(4):
        i = below(s, num_base + s.num_G[g])
        e = s.home_GB[g, i] if i < num_base else s.replica_GR[g, i - num_base]
        if s.t.quota_EG[e, g] > 0:
            return e
    return np.int64(-1)


@inner_kernel
def _other_holder(e, g, s):
    """Returns a random holder other than `g` of an expert that `g` holds, or -1 if there is none."""
    num = s.t.num_E[e]
    if num < 2:
        return np.int64(-1)
    h = s.t.holder_EG[e, below(s, num - 1)]
    return s.t.holder_EG[e, num - 1] if h == g else h


@inner_kernel
def _in_node(e, v, s):
    """Returns how many pairs of an expert a node serves."""
    pairs = np.int64(0)
    for i in range(s.t.num_E[e]):
        g = s.t.holder_EG[e, i]
        if s.row.ranks.node_G[g] == v:
            pairs += s.t.quota_EG[e, g]
    return pairs


@inner_kernel
def _least_replica(g, s):
    """Returns the pairs of a rank's smallest replica, which a new one would have to replace, or 0 if a slot is free."""
    if s.num_G[g] < s.num_slots:
        return np.int64(0)
    least = np.int64(s.t.quota_EG[s.replica_GR[g, 0], g])
    for i in range(1, s.num_G[g]):
        least = min(least, np.int64(s.t.quota_EG[s.replica_GR[g, i], g]))
    return least


@inner_kernel
def _some_rank(e, src, inside, s):
    """Returns the best of three random ranks, in the node of `src` or anywhere: many tokens for the expert and little load."""
    ranks, best, top = s.row.ranks, np.int64(-1), -1e300
    v = ranks.node_G[src]
    for _ in range(3):
        if inside:
            g = ranks.order_G[ranks.first_V[v] + below(s, ranks.first_V[v + 1] - ranks.first_V[v])]
        else:
            g = below(s, ranks.node_G.size)
        if g == src:
            continue
        x = s.mean - s.t.sum_XG[PAIRS, g]
        if s.t.quota_EG[e, g] == 0 and g != s.row.home_E[e]:
            x -= _least_replica(g, s)
        if inside or chance(s) < 0.5:
            x += s.row.load_EG[e, g] - s.t.quota_EG[e, g]
        else:
            x += s.row.demand_VE[ranks.node_G[g], e]
        if x > top:
            best, top = g, x
    return best


@inner_kernel
def _busier(row, first, num, s):
    """Returns the busier of two random ranks or NICs in a row of the sums."""
    a, b = first + below(s, num), first + below(s, num)
    return b if s.t.sum_XG[row, b] > s.t.sum_XG[row, a] else a


@inner_kernel
def _off_rank(g, s):
    """Returns a move of a random expert from a rank to another holder or to a new one: (expert, from, to)."""
    e = _some_expert(g, s)
    if e < 0:
        return e, g, g
    other = _other_holder(e, g, s)
    return e, g, other if other >= 0 and chance(s) > NEW else _some_rank(e, g, chance(s) < 0.3, s)


@inner_kernel
def _less_in(g, far, s):
    """Returns a move of an expert from a rank that serves it for tokens of other ranks or nodes: (expert, from, to)."""
    e, top = np.int64(-1), 0.0
    for _ in range(2):
        f = _some_expert(g, s)
        if f >= 0:
            x = float(s.t.quota_EG[f, g] - (s.row.demand_VE[s.row.ranks.node_G[g], f] if far else s.row.load_EG[f, g]))
            if e < 0 or x > top:
                e, top = f, x
    if e < 0:
        return e, g, g
    other = _other_holder(e, g, s)
    return e, g, other if other >= 0 and chance(s) > NEW else _some_rank(e, g, not far, s)


@inner_kernel
def _less_out(g, far, s):
    """Returns a move of an expert that a rank's tokens use elsewhere, to this rank or to one of its node: (expert, from, to)."""
    ranks, e, top = s.row.ranks, np.int64(-1), np.int64(0)
    v = ranks.node_G[g]
    for _ in range(6):
        f = below(s, s.row.load_E.size)
        x = np.int64(s.row.load_EG[f, g]) - s.t.quota_EG[f, g]
        if far and x > top:
            x = s.row.demand_VE[v, f] - _in_node(f, v, s)
        if x > top:
            e, top = f, x
    if e < 0:
        return e, g, g
    src = s.t.holder_EG[e, below(s, s.t.num_E[e])]
    if not far:
        return e, src, g
    if ranks.node_G[src] == v:
        src = s.t.holder_EG[e, below(s, s.t.num_E[e])]
    if chance(s) > NEW:
        for i in range(s.t.num_E[e]):
            if ranks.node_G[s.t.holder_EG[e, i]] == v:
                return e, src, s.t.holder_EG[e, i]
    low, num = ranks.first_V[v], ranks.first_V[v + 1] - ranks.first_V[v]
    a, b = ranks.order_G[low + below(s, num)], ranks.order_G[low + below(s, num)]
    return e, src, a if _least_replica(a, s) < _least_replica(b, s) else b


@inner_kernel
def _rank_of_nic(y, s):
    """Returns a random rank of a NIC."""
    nic_G, g = s.row.ranks.nic_G, np.int64(-1)
    num = 0
    for h in range(nic_G.size):
        if nic_G[h] == y:
            num += 1
            if below(s, num) == 0:
                g = h
    return g


@inner_kernel
def _aimed(aim, s):
    """Returns a move off the busiest rank or link, or off another busy one: (expert, from, to)."""
    rank, link, at = aim
    near = chance(s) < 0.5 and s.parts & BUSIEST != 0  # whether it aims at the busiest itself
    num_ranks, u = s.t.quota_EG.shape[1], chance(s)
    if u < COMPUTE and s.parts & RANKS:
        return _off_rank(rank if near else _busier(PAIRS, 0, num_ranks, s), s)
    if COMPUTE <= u < COMPUTE + LINKED and s.parts & LINKS:
        far = link >= RDMA_OUT
        way = link if near else np.int64(RDMA_OUT if far else PEER_OUT) + below(s, 2)
        if not near:
            at = _busier(way, 0, s.row.ranks.num_nics if far else num_ranks, s)
        g = _rank_of_nic(at, s) if far and s.row.ranks.num_nics < num_ranks else at
        return _less_in(g, far, s) if way in (PEER_IN, RDMA_IN) else _less_out(g, far, s)
    return _off_rank(below(s, num_ranks), s)


@inner_kernel
def _amount(e, src, dst, s):
    """Returns how many pairs to move: as many as tokens of `dst` still need, as many as level the ranks, or a random number."""
    quota, v = np.int64(s.t.quota_EG[e, src]), s.row.ranks.node_G[dst]
    if chance(s) < WANTED_SHARE and s.parts & WANTED:
        pairs = np.int64(s.row.load_EG[e, dst]) - s.t.quota_EG[e, dst]
        if v != s.row.ranks.node_G[src] and chance(s) < 0.7:
            pairs = s.row.demand_VE[v, e] - _in_node(e, v, s)
    else:
        u = chance(s)
        if u < 0.25:
            pairs = quota
        elif u < 0.5:
            pairs = np.int64((s.t.sum_XG[PAIRS, src] - s.t.sum_XG[PAIRS, dst]) / 2)
        elif u < 0.65:
            pairs = np.int64(s.mean - s.t.sum_XG[PAIRS, dst])
        elif u < 0.8:
            pairs = np.int64(s.t.sum_XG[PAIRS, src] - s.mean)
        else:
            pairs = np.int64(quota * chance(s) * chance(s)) + 1
    if pairs <= 0:
        pairs = np.int64(quota * chance(s)) + 1
    return min(pairs, quota)


@inner_kernel
def _make_room(e, dst, s):
    """Moves the pairs of the smaller of two random replicas on a full rank to another holder. Returns False if it cannot."""
    if s.num_slots == 0 or s.parts & REPLACEMENT == 0:
        return False
    f, h = s.replica_GR[dst, below(s, s.num_slots)], s.replica_GR[dst, below(s, s.num_slots)]
    if h != e and (f == e or s.t.quota_EG[h, dst] < s.t.quota_EG[f, dst]):
        f = h
    if f == e:
        return False
    give(f, dst, _other_holder(f, dst, s), np.int64(s.t.quota_EG[f, dst]), s)
    return True


@inner_kernel
def move(aim, s):
    """Makes a random move. Returns False if it found none, so that the caller must undo its changes."""
    e, src, dst = _aimed(aim, s)
    if e < 0 or dst < 0 or src == dst or s.t.quota_EG[e, src] == 0:
        return False
    home = s.row.home_E[e]
    if s.node_only and s.row.ranks.node_G[dst] != s.row.ranks.node_G[home]:
        return False
    new = s.t.quota_EG[e, dst] == 0 and dst != home
    if new and s.num_G[dst] >= s.num_slots and not _make_room(e, dst, s):
        return False
    give(e, src, dst, _amount(e, src, dst, s), s)
    return True
