"""Replicas near tokens. Each group of nodes gets the experts that its tokens use most. Prices for ranks level the load.

If the home of a pair's expert is in another node, the pair crosses nodes unless the token's node holds a replica. If a token is
sent once to each node that serves it, only the number of these nodes matters. A small group of nodes that holds most experts can
serve its own tokens alone, so that a token is sent to a few nodes instead of nearly all. The nodes of a group are neighbours
because the split law matches sources and slots in order of rank.
"""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.kernels.traffic import BY_NODE
from foremoe.solvers.rows import assign, clean_row, home_of_experts
from foremoe.solvers.search.parts import GROUPS
from foremoe.solvers.search.push import Groups, Scratch, push
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


@inner_kernel
def _choose(v, first, num_slots, most_out, goal, placed, near, scratch):
    """Writes the most useful replicas for group `v`, the best first, from index `first` on. Returns the index after the last.

    Replicas of an expert from another group take over all pairs of the group's tokens from its home, each at most the goal. A
    replica of an expert of this group takes over half of them, and its gain is the price of the home. At most `most_out` replicas
    of all groups have the same home.
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
            if gain <= 0.0:
                break
            i = end if end < first + num_slots else end - 1
            if scratch.out_G[home] >= most_out:  # replaces the least useful one from this home
                i = end - 1
                while i >= first and scratch.home_E[expert_I[i]] // num_rank_slots != home:
                    i -= 1
            if i < first or (i < end and gain <= gain_I[i]):
                break
            if i < end:
                scratch.out_G[scratch.home_E[expert_I[i]] // num_rank_slots] -= 1
            scratch.out_G[home] += 1
            end = max(end, i + 1)
            while i > first and gain_I[i - 1] < gain:
                gain_I[i], expert_I[i], pairs_I[i] = gain_I[i - 1], expert_I[i - 1], pairs_I[i - 1]
                i -= 1
            gain_I[i], expert_I[i], pairs_I[i] = gain, e, pairs
    return end


@inner_kernel
def _num_free(rates):
    """Returns how many copies of a rank to or from other nodes overlap with compute, or 1 if none does."""
    back_s = rates.trains * (rates.copy_rdma_s + rates.gradient_rdma_s)
    most = rates.hide_forward_s / rates.copy_rdma_s
    if back_s > 0.0:
        most = min(most, rates.hide_backward_s / back_s)
    return max(1, np.int64(min(most, 1e9)))


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
    return Groups(group_V[node_G], demand_VE)


@kernel
def _rounds(goal, near, most, home, tried, most_s, best, s):
    """Overwrites `best` with the cheapest set of replicas near tokens that it tries, if that costs less than `most_s`.

    Prices of ranks start at 0. Each round chooses replicas for all groups and gives them to ranks. Then it raises the prices of
    ranks above the goal and lowers those of ranks below it, and pushes pairs until the row is level. The rounds are subgradient
    steps on the Lagrangian of "no rank above the goal". `most` limits the replicas on a rank and the copies out of a home.
    Returns the cost of `best`, or `most_s` if nothing cheaper was found.
    """
    (G, S), (V, E), group_G = home.expert_GS.shape, near.demand_VE.shape, near.group_G
    num_base, by_node = S - s.num_slots, s.row.ranks.travel == BY_NODE
    num_held, most_out = most
    slots = G * num_held
    scratch = Scratch(
        home_of_experts(num_base, home.expert_GS), np.zeros(G), np.empty(slots), np.empty(slots, np.int64),
        np.empty(slots, np.int64), np.empty(E, np.int64), np.empty(G * S, np.int64), np.empty(V, np.int64),
        np.empty(G, np.int64),
    )  # fmt: skip
    slots_V, end_V = np.zeros(V, np.int64), np.zeros(V, np.int64)
    for g in range(G):
        slots_V[group_G[g]] += num_held
    least_s = np.inf
    for n in range(max(2, min(ROUNDS, ROUNDS * RANKS // G))):
        assign(tried, home)
        scratch.out_G[:] = 0
        for v in range(V):
            end_V[v] = _choose(v, end_V[v - 1] if v else 0, slots_V[v], most_out, goal, tried, near, scratch)
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
            push(np.int64(step * goal), near, tried, scratch)
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

    At first, a rank holds as many replicas as overlap with compute, and then as many as fit. If every pair is sent separately,
    sets in which the copies out of a home overlap with compute, too, are tried before.
    """
    near, free, unlimited = _grouped(num_groups, s.row), _num_free(s.rates), np.int64(home.expert_GS.size)
    num_held = min(free, s.num_slots)
    if s.row.ranks.travel != BY_NODE:
        most_s = _rounds(goal, near, (num_held, free), home, tried, most_s, best, s)
    most_s = _rounds(goal, near, (num_held, unlimited), home, tried, most_s, best, s)
    if num_held < s.num_slots:
        most_s = _rounds(goal, near, (np.int64(s.num_slots), unlimited), home, tried, most_s, best, s)
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
