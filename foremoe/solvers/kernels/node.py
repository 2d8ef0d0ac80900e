"""Row kernels of `NodeChain`: replicas across nodes that settle the nodes' totals, within a limit or without."""

from __future__ import annotations

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.flow import split_row
from foremoe.solvers.kernels.prune import clean_row, count_row, home_of_experts
from foremoe.solvers.kernels.settle import settle_row

# Letters: N rows, G ranks, S slots per rank, E experts, V nodes.


@kernel
def nodes_over(target, node_G, load_G):  # type: ignore[no-untyped-def]
    """Pairs by which nodes exceed `target` per rank, summed over nodes."""
    over_V = np.zeros(node_G.max() + 1, np.int64)
    for g in range(load_G.size):
        over_V[node_G[g]] += load_G[g] - target
    return np.maximum(over_V, 0).sum()


@kernel
def settle_all(goal, home_E, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Settles ranks with relays and keeps, of the replicas made, only those across nodes; in place."""
    G, S = quota_GS.shape
    kept_GS = expert_GS >= 0
    settle_row(goal, True, G, G, False, np.ones(G), node_G, num_base, expert_GS, quota_GS, load_G)
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


@kernel
def _taker(node, amount, target, node_G, num_base, expert_GS, load_G):  # type: ignore[no-untyped-def]
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
def level_nodes(target, num_replicas, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Brings every node's load per rank down to `target` with at most `num_replicas` more replicas, in place; False if it cannot.

    Time and again, the node that exceeds the target most gives to the one that falls short most: of its experts, the smallest
    with enough left, or else the largest. A taker gets no more than `target`, as what comes from another node stays with it;
    its own experts can go on to its node mates.
    """
    G, S = quota_GS.shape
    over_V = np.zeros(node_G.max() + 1, np.int64)
    for g in range(G):
        over_V[node_G[g]] += load_G[g] - target
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
def settle_few(goal, num_replicas, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """`level_nodes` to the least target that it reaches, by bisection to a 2048th of the goal; in place."""
    sum_V, size_V = np.zeros(node_G.max() + 1, np.int64), np.zeros(node_G.max() + 1, np.int64)
    for g in range(load_G.size):
        sum_V[node_G[g]] += load_G[g]
        size_V[node_G[g]] += 1
    bottom, top = goal + goal // 1024, np.max(-(-sum_V // size_V))
    first_expert_GS, first_quota_GS, first_load_G = expert_GS.copy(), quota_GS.copy(), load_G.copy()
    target = bottom
    while bottom < top:
        try_expert_GS, try_quota_GS, try_load_G = first_expert_GS.copy(), first_quota_GS.copy(), first_load_G.copy()
        if level_nodes(target, num_replicas, node_G, num_base, try_expert_GS, try_quota_GS, try_load_G):
            top = target
            expert_GS[:], quota_GS[:], load_G[:] = try_expert_GS, try_quota_GS, try_load_G
        else:
            bottom = target + 1 + goal // 2048
        target = (bottom + top) // 2


@kernel
def node_row(load_E, node_G, num_base, params, expert_GS, quota_GS):  # type: ignore[no-untyped-def]
    """One row of `NodeChain`; see `RowSolver.edit` for the arguments.

    Args:
        params: stay inside nodes (0 or 1), most replicas across nodes; -1 for any number.
    """
    load_G = np.empty(quota_GS.shape[0], np.int64)
    clean_row(num_base, expert_GS, quota_GS, load_G)
    most, goal = load_G.max(), -(-load_G.sum() // load_G.size)
    home_E = home_of_experts(load_E.size, num_base, expert_GS)
    start_expert_GS, start_quota_GS, over = expert_GS.copy(), quota_GS.copy(), nodes_over(goal, node_G, load_G)
    settle_all(goal, home_E, node_G, num_base, expert_GS, quota_GS, load_G)
    if 0.0 <= params[1] < count_row(home_E, node_G, num_base, expert_GS)[0]:
        expert_GS[:], quota_GS[:] = start_expert_GS, start_quota_GS
        clean_row(num_base, expert_GS, quota_GS, load_G)
        num_left = np.int64(params[1]) - count_row(home_E, node_G, num_base, expert_GS)[0]
        if num_left <= 0:
            return
        settle_few(goal, num_left, node_G, num_base, expert_GS, quota_GS, load_G)
    # The start is a split over these slots, so its maximum is in reach: only what is above it has to move.
    split_row(most, most, load_E.size, expert_GS, quota_GS, load_G)
    if nodes_over(goal, node_G, load_G) >= over:
        expert_GS[:], quota_GS[:] = start_expert_GS, start_quota_GS
    clean_row(num_base, expert_GS, quota_GS, load_G)


@kernel
def node_rows(low, high, load_NE, node_G, num_base, params, expert_NGS, quota_NGS):  # type: ignore[no-untyped-def]
    """`node_row` for rows [low, high)."""
    for n in range(low, high):
        node_row(load_NE[n], node_G, num_base, params, expert_NGS[n], quota_NGS[n])
