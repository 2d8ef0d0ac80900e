"""Row kernels of `NodeChain`: replicas across nodes that settle the nodes' totals, within a limit or without."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.compiled import inner_kernel, kernel
from foremoe.solvers.kernels.flow import split_row
from foremoe.solvers.kernels.moves import Rule
from foremoe.solvers.kernels.prune import count_row
from foremoe.solvers.kernels.rows import Placed, assign, clean_row, copy_of, home_of_experts
from foremoe.solvers.kernels.settle import settle_row

# Letters: N rows, G ranks, S slots per rank, E experts, V nodes.


class Options(NamedTuple):
    """Options of `NodeChain` as its row function takes them."""

    node_only: bool  # whether replicas stay inside their home's node
    max_far: int  # most replicas across nodes; -1 for any number


@kernel
def _over(target, node_G, load_G):
    """Pairs by which every node exceeds `target` per rank."""
    over_V = np.zeros(node_G.max() + 1, np.int64)
    for g in range(load_G.size):
        over_V[node_G[g]] += load_G[g] - target
    return over_V


@kernel
def nodes_over(target, node_G, load_G):
    """Pairs by which nodes exceed `target` per rank, summed over nodes."""
    return np.maximum(_over(target, node_G, load_G), 0).sum()


@kernel
def settle_all(goal, home_E, node_G, num_base, placed):
    """Settles ranks with relays and keeps, of the replicas made, only those across nodes; in place."""
    expert_GS, quota_GS, load_G = placed
    G, S = quota_GS.shape
    kept_GS = expert_GS >= 0
    settle_row(goal, Rule(node_G, num_base, False, True, False, False, np.ones(G)), placed)
    for g in range(G):
        for s in range(num_base, S):
            if expert_GS[g, s] < 0 or kept_GS[g, s]:
                continue
            home = home_E[expert_GS[g, s]]
            if node_G[home // S] == node_G[g]:
                quota_GS[home // S, home % S] += quota_GS[g, s]
                load_G[home // S] += quota_GS[g, s]
                load_G[g] -= quota_GS[g, s]
                expert_GS[g, s], quota_GS[g, s] = -1, 0


@inner_kernel
def _taker(node, amount, target, node_G, num_base, expert_GS, load_G):
    """A rank of `node` with a free slot, and that slot, or -1, -1: the least loaded one that `amount` fills to the target.

    Its slot is used up by that: a rank that still fell short could never be filled. Where `amount` fills none, the most loaded.
    """
    rank, slot = -1, -1
    for g in range(load_G.size):
        if node_G[g] != node:
            continue
        for s in range(num_base, expert_GS.shape[1]):
            if expert_GS[g, s] < 0:
                if rank >= 0 and load_G[rank] + amount >= target:
                    better = load_G[g] + amount >= target and load_G[g] < load_G[rank]
                else:
                    better = rank < 0 or load_G[g] > load_G[rank]
                if better:
                    rank, slot = g, s
                break
    return rank, slot


@kernel
def level_nodes(target, num_replicas, node_G, num_base, placed):
    """Brings every node's load per rank down to `target` with at most `num_replicas` more replicas, in place; False if it cannot.

    Time and again, the node that exceeds the target most gives to the one that falls short most: of its experts, the smallest
    with enough left, or else the largest. A taker gets no more than `target`, as what comes from another node stays with it;
    its own experts can go on to its node mates.
    """
    expert_GS, quota_GS, load_G = placed
    (G, S), over_V = quota_GS.shape, _over(target, node_G, load_G)
    for num in range(num_replicas + 1):
        giver, taker = over_V.argmax(), over_V.argmin()
        if over_V[giver] <= 0:
            return True
        want = min(over_V[giver], -over_V[taker], target)
        rank, slot = _taker(taker, want, target, node_G, num_base, expert_GS, load_G)
        if num == num_replicas or rank < 0:
            return False
        for s in range(num_base, S):
            if expert_GS[rank, s] >= 0:
                want = min(want, target - quota_GS[rank, s])
        best_g, best_b, best_left = -1, -1, np.int64(0)
        for g in range(G):
            if node_G[g] != giver:
                continue
            for b in range(num_base):
                left = np.int64(quota_GS[g, b])
                better = (best_left < want or left < best_left) if left >= want else left > best_left
                if better and not (expert_GS[rank] == expert_GS[g, b]).any():
                    best_g, best_b, best_left = g, b, left
        amount = min(want, best_left)
        if amount <= 0:
            return False
        quota_GS[best_g, best_b] -= amount
        expert_GS[rank, slot], quota_GS[rank, slot] = expert_GS[best_g, best_b], amount
        load_G[best_g] -= amount
        load_G[rank] += amount
        over_V[giver] -= amount
        over_V[taker] += amount
    return False


@kernel
def settle_few(goal, num_replicas, node_G, num_base, placed):
    """`level_nodes` to the least target that it reaches, by bisection to a 2048th of the goal; in place."""
    load_G = placed.load_G
    sum_V, size_V = np.zeros(node_G.max() + 1, np.int64), np.zeros(node_G.max() + 1, np.int64)
    for g in range(load_G.size):
        sum_V[node_G[g]] += load_G[g]
        size_V[node_G[g]] += 1
    bottom, top = goal + goal // 1024, np.max(-(-sum_V // size_V))
    first, target = copy_of(placed), bottom
    while bottom < top:
        tried = copy_of(first)
        if level_nodes(target, num_replicas, node_G, num_base, tried):
            top = target
            assign(placed, tried)
        else:
            bottom = target + 1 + goal // 2048
        target = (bottom + top) // 2


@kernel
def node_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """One row of `NodeChain`; see `RowSolver.edit` for the arguments."""
    placed = Placed(expert_GS, quota_GS, np.empty(node_G.size, np.int64))
    clean_row(num_base, placed)
    load_G = placed.load_G
    most, goal = load_G.max(), -(-load_G.sum() // load_G.size)
    home_E = home_of_experts(num_base, expert_GS)
    start, over = copy_of(placed), nodes_over(goal, node_G, load_G)
    settle_all(goal, home_E, node_G, num_base, placed)
    if 0 <= options.max_far < count_row(home_E, node_G, num_base, expert_GS)[0]:
        assign(placed, start)
        num_left = options.max_far - count_row(home_E, node_G, num_base, expert_GS)[0]
        if num_left <= 0:
            return
        settle_few(goal, num_left, node_G, num_base, placed)
    # The start is a split over these slots, so its maximum is in reach: only what is above it has to move.
    split_row(most, most, num_base, placed)
    if nodes_over(goal, node_G, load_G) >= over:
        assign(placed, start)
    clean_row(num_base, placed)


@kernel
def node_rows(low, high, load_NE, node_G, num_base, options, expert_NGS, quota_NGS):
    """`node_row` for rows [low, high)."""
    for n in range(low, high):
        node_row(load_NE[n], node_G, num_base, options, expert_NGS[n], quota_NGS[n])
