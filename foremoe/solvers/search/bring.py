"""Replicas near tokens. Each group of nodes gets the experts that its tokens use most. Prices for ranks level the load.

If the home of a pair's expert is in another node, the pair crosses nodes unless the token's node holds a replica. If a token is
sent once to each node that serves it, only the number of these nodes matters. A small group of nodes that holds most experts can
serve its own tokens alone, so that a token is sent to a few nodes instead of nearly all. The nodes of a group are neighbours
because the split law matches sources and slots in order of rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.kernels.traffic import BY_NODE
from foremoe.solvers.rows import assign, clean_row, home_of_experts
from foremoe.solvers.search.parts import GROUPS
from foremoe.solvers.search.state import price_of

# Letters: G ranks, S slots per rank, V groups of nodes, E experts, P = G*S slots, I replicas.

# The number of price rounds on up to RANKS ranks. On more ranks, rounds take longer and there are fewer, but at least two.
# They end if their best price exceeds FIRST times the cheapest known after the first round, or SECOND times after a later one.
ROUNDS, RANKS, FIRST, SECOND = 8, 64, 1.3, 1.1
# The number of groups is at most this multiple of the number that could each hold every expert.
MOST_GROUPS = 3.0
# If a token is sent once to each node, groups of one node are tried on up to NODES nodes.
NODES = 4
# Replicas must save at least this share of the row's compute.
LEAST = 0.01
# Ranks push pairs until no load exceeds a multiple of the goal. If a token is sent once to each node, the placement is priced at
# each of these multiples, because pairs that leave their group can cost more than an uneven load.
STEPS = (1.08, 1.03, 1.0)
# A rank whose load is twice the goal raises its price by PACE times the seconds of a crossing pair, up to HIGHEST.
PACE, HIGHEST = 3.0, 4.0


class _Groups(NamedTuple):
    """Groups of nodes, and the pairs of each group's tokens with every expert."""

    group_G: Array
    demand_VE: Array


class _Scratch(NamedTuple):
    """Memory of one row."""

    home_E: Array  # int64, home slot p = g*S + b of every expert
    price_G: Array  # float64, price of serving a pair on a rank, in units of a pair that leaves its group
    gain_I: Array  # float64
    expert_I: Array  # int64
    pairs_I: Array  # int64
    first_E: Array  # int64, a replica of the expert, or -1
    next_P: Array  # int64, the next replica of the same expert, or -1
    served_V: Array  # int64


@inner_kernel
def _choose(v, first, num_slots, goal, placed, near, scratch):
    """Writes the most useful replicas for group `v`, the best first, from index `first` on. Returns the index after the last.

    Replicas of an expert from another group take over all pairs of the group's tokens from its home, each at most the goal. A
    replica of an expert of this group takes over half of them, and its gain is the price of the home.
    """
    num_rank_slots = placed.expert_GS.shape[1]
    gain_I, expert_I, pairs_I = scratch.gain_I, scratch.expert_I, scratch.pairs_I
    end = first
    for e in range(scratch.home_E.size):
        home = scratch.home_E[e] // num_rank_slots
        pairs, gain = near.demand_VE[v, e], 1.0 + scratch.price_G[home]
        if near.group_G[home] == v:
            pairs, gain = pairs // 2, scratch.price_G[home]
        num_parts = 1 + pairs // goal
        pairs //= num_parts
        gain *= pairs
        for _ in range(num_parts):
            if gain <= 0.0 or (end == first + num_slots and gain <= gain_I[end - 1]):
                break
            i = end if end < first + num_slots else end - 1
            end = i + 1
            while i > first and gain_I[i - 1] < gain:
                gain_I[i], expert_I[i], pairs_I[i] = gain_I[i - 1], expert_I[i - 1], pairs_I[i - 1]
                i -= 1
            gain_I[i], expert_I[i], pairs_I[i] = gain, e, pairs
    return end


@inner_kernel
def _num_held(rates, num_slots):
    """Returns how many replicas a rank holds at first: at least one, and more if their copies overlap with compute."""
    back_s = rates.trains * (rates.copy_rdma_s + rates.gradient_rdma_s)
    most = rates.hide_forward_s / rates.copy_rdma_s
    if back_s > 0.0:
        most = min(most, rates.hide_backward_s / back_s)
    return max(1, min(num_slots, np.int64(min(most, 1e9))))


@inner_kernel
def _holds(g, e, expert_GS):
    found = False
    for s in range(expert_GS.shape[1]):
        found |= expert_GS[g, s] == e
    return found


@inner_kernel
def _place(v, chosen, num_held, group_G, placed, scratch):
    """Gives the chosen replicas [first, end), the largest first, to the least loaded ranks of group `v` with a free slot."""
    expert_GS, quota_GS, load_G = placed
    (first, end), (G, S), num_base = chosen, expert_GS.shape, scratch.home_E.size // expert_GS.shape[0]
    for _ in range(first, end):
        i = first + scratch.pairs_I[first:end].argmax()
        e, pairs = scratch.expert_I[i], scratch.pairs_I[i]
        home = scratch.home_E[e] // S
        scratch.pairs_I[i] = -1
        rank, slot, least = home, scratch.home_E[e] % S, np.int64(-1)
        for g in range(G):
            if group_G[g] != v or (least >= 0 and load_G[g] >= least) or _holds(g, e, expert_GS):
                continue
            for s in range(num_base, num_base + num_held):
                if expert_GS[g, s] < 0:
                    rank, slot, least = g, s, load_G[g]
                    break
        expert_GS[rank, slot] = e
        quota_GS[rank, slot] += pairs
        load_G[rank] += pairs


@inner_kernel
def _link(placed, scratch):
    """Links the replicas of every expert. Replicas without quota are included because pairs may be pushed to them."""
    G, S = placed.expert_GS.shape
    scratch.first_E[:] = -1
    for g in range(G):
        for s in range(scratch.home_E.size // G, S):
            e = placed.expert_GS[g, s]
            if e >= 0:
                scratch.next_P[g * S + s], scratch.first_E[e] = scratch.first_E[e], g * S + s


@inner_kernel
def _count_served(e, group_G, placed, scratch):
    """Counts the pairs of an expert that each group serves, in `scratch.served_V`."""
    S, home = placed.expert_GS.shape[1], scratch.home_E[e]
    scratch.served_V[:] = 0
    scratch.served_V[group_G[home // S]] += placed.quota_GS[home // S, home % S]
    p = scratch.first_E[e]
    while p >= 0:
        scratch.served_V[group_G[p // S]] += placed.quota_GS[p // S, p % S]
        p = scratch.next_P[p]


@inner_kernel
def _best_push(busiest, goal, near, placed, scratch):
    """Returns the cheapest push of pairs from a rank to another slot of their expert: (slot, other slot, pairs), or -1 slots.

    A push is cheap if it does not make more pairs leave their group, and cheaper if fewer leave it. Ranks that are above the goal
    are the last choice because they would have to push pairs themselves.
    """
    expert_GS, quota_GS, load_G = placed
    S, group_G = expert_GS.shape[1], near.group_G
    best_cost, best = 9, (np.int64(-1), np.int64(-1), np.int64(0))
    for s in range(S):
        e = np.int64(expert_GS[busiest, s])
        if e < 0 or quota_GS[busiest, s] == 0 or scratch.first_E[e] < 0:
            continue
        _count_served(e, group_G, placed, scratch)
        here = group_G[busiest]
        p, following = scratch.home_E[e], scratch.first_E[e]
        while p >= 0:
            g = p // S
            if g != busiest and load_G[g] < load_G[busiest] - 1:
                room = goal - load_G[g] if load_G[g] < goal else (load_G[busiest] - load_G[g]) // 2
                pairs, cost = min(room, load_G[busiest] - goal, np.int64(quota_GS[busiest, s])), 0 if load_G[g] < goal else 1
                if group_G[g] != here:
                    spare = scratch.served_V[here] - near.demand_VE[here, e]
                    lack = near.demand_VE[group_G[g], e] - scratch.served_V[group_G[g]]
                    pairs = min(pairs, spare) if spare > 0 else pairs
                    pairs = min(pairs, lack) if lack > 0 else pairs
                    cost += 2 * (spare <= 0) - 2 * (lack > 0)
                if pairs > 0 and (cost < best_cost or (cost == best_cost and pairs > best[2])):
                    best_cost, best = cost, (busiest * S + s, p, pairs)
            p = following
            following = scratch.next_P[p] if p >= 0 else -1
    return best


@inner_kernel
def _push(goal, near, placed, scratch):
    """Pushes pairs off the busiest rank until no rank is above the goal or the busiest rank cannot push any."""
    S, load_G = placed.expert_GS.shape[1], placed.load_G
    _link(placed, scratch)
    for _ in range(6 * load_G.size):
        busiest = load_G.argmax()
        if load_G[busiest] <= goal:
            return
        p, q, pairs = _best_push(busiest, goal, near, placed, scratch)
        if p < 0:
            return
        placed.quota_GS[p // S, p % S] -= pairs
        placed.quota_GS[q // S, q % S] += pairs
        load_G[p // S] -= pairs
        load_G[q // S] += pairs


@kernel
def _grouped(num_groups, row):
    """Returns nodes in groups of about equal size, in the order of their lowest ranks, with each group's demand."""
    (num_nodes, E), node_G = row.demand_VE.shape, row.ranks.node_G
    group_V, num_seen, demand_VE = np.full(num_nodes, -1), 0, np.zeros((num_groups, E), np.int64)
    for v in node_G:
        if group_V[v] < 0:
            group_V[v] = num_seen * num_groups // num_nodes
            num_seen += 1
            demand_VE[group_V[v]] += row.demand_VE[v]
    return _Groups(group_V[node_G], demand_VE)


@kernel
def _rounds(goal, near, num_held, home, tried, most_s, best, s):
    """Overwrites `best` with the cheapest set of replicas near tokens that it tries, if that costs less than `most_s`.

    Prices of ranks start at 0. Each round chooses replicas for all groups and gives them to ranks. Then it raises the prices of
    ranks above the goal and lowers those of ranks below it, and pushes pairs until the row is level. The rounds are subgradient
    steps on the Lagrangian of "no rank above the goal". Returns the cost of `best`, or `most_s` if nothing cheaper was found.
    """
    (G, S), (V, E), group_G = home.expert_GS.shape, near.demand_VE.shape, near.group_G
    num_base, by_node = S - s.num_slots, s.row.ranks.travel == BY_NODE
    slots = G * num_held
    scratch = _Scratch(
        home_of_experts(num_base, home.expert_GS), np.zeros(G), np.empty(slots), np.empty(slots, np.int64),
        np.empty(slots, np.int64), np.empty(E, np.int64), np.empty(G * S, np.int64), np.empty(V, np.int64),
    )  # fmt: skip
    slots_V, end_V = np.zeros(V, np.int64), np.zeros(V, np.int64)
    for g in range(G):
        slots_V[group_G[g]] += num_held
    least_s = np.inf
    for n in range(max(2, min(ROUNDS, ROUNDS * RANKS // G))):
        assign(tried, home)
        for v in range(V):
            end_V[v] = _choose(v, end_V[v - 1] if v else 0, slots_V[v], goal, tried, near, scratch)
        for i in range(end_V[V - 1]):
            p = scratch.home_E[scratch.expert_I[i]]
            tried.quota_GS[p // S, p % S] -= scratch.pairs_I[i]
            tried.load_G[p // S] -= scratch.pairs_I[i]
        for v in range(V):
            _place(v, (end_V[v - 1] if v else 0, end_V[v]), num_held, group_G, tried, scratch)
        for g in range(G):
            over = (tried.load_G[g] - goal) / goal
            scratch.price_G[g] = min(HIGHEST, max(0.0, scratch.price_G[g] + PACE / (1.0 + 0.3 * n) * over))
        for step in STEPS:
            if step > 1.0 and (not by_node or tried.load_G.max() <= step * goal):
                continue
            _push(np.int64(step * goal), near, tried, scratch)
            this_s = price_of(tried, s)
            least_s = min(least_s, this_s)
            if this_s < most_s:
                most_s = this_s
                assign(best, tried)
                clean_row(num_base, best)
        if least_s > (FIRST if n == 0 else SECOND) * most_s:
            break
    return most_s


@kernel
def _try_groups(num_groups, home, goal, tried, most_s, best, s):
    """Overwrites `best` with replicas for `num_groups` groups if they cost less than `most_s`.

    At first, a rank holds as many replicas as overlap with compute, and then as many as fit.
    """
    near, num_held = _grouped(num_groups, s.row), _num_held(s.rates, s.num_slots)
    most_s = _rounds(goal, near, num_held, home, tried, most_s, best, s)
    if num_held < s.num_slots:
        most_s = _rounds(goal, near, np.int64(s.num_slots), home, tried, most_s, best, s)
    return most_s


@kernel
def bring_row(goal, home, tried, best_s, best, s):
    """Overwrites `best` with the cheapest of several sets of replicas near tokens, if that costs less than `best_s`.

    If a token is sent once to each node, 2, 4, 8 ... groups with about equal numbers of nodes are tried, and if there are few
    nodes also single nodes. If every pair is sent separately, every group is a single node.
    """
    num_nodes, num_base = np.int64(s.row.demand_VE.shape[0]), s.home_GB.shape[1]
    by_node, many = s.row.ranks.travel == BY_NODE, s.parts & GROUPS != 0
    most_s, num_groups = best_s - LEAST * s.rates.pair_s * goal, np.int64(2)
    while many and by_node and num_groups < num_nodes and num_groups <= MOST_GROUPS * (num_base + s.num_slots) / num_base:
        most_s = _try_groups(num_groups, home, goal, tried, most_s, best, s)
        num_groups *= 2
    if num_nodes <= NODES or (many and not by_node):
        _try_groups(num_nodes, home, goal, tried, most_s, best, s)
