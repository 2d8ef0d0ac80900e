"""`Echo`: clones hot experts into slots of ranks with room. Bin packing chooses the ranks."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.base import RowSolver
from foremoe.solvers.rows import empty_idle
from foremoe.solvers.split.kernels import split_row, start_at_home

# Letters: G ranks, V domains (nodes, or one for all ranks), B base slots, S slots per rank, E experts.


@kernel
def echo_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `Echo` (see `RowSolver.edit`)."""
    G, S = expert_GS.shape
    _, load_G = start_at_home(load_E, num_base, expert_GS, quota_GS)
    domain_G = node_G if options.node_only else np.zeros_like(node_G)
    total_V, size_V = np.zeros(domain_G.max() + 1, np.int64), np.zeros(domain_G.max() + 1, np.int64)
    for g in range(G):
        total_V[domain_G[g]] += load_G[g]
        size_V[domain_G[g]] += 1
    room_G, spill_GB = np.empty(G, np.int64), np.zeros((G, num_base), np.int64)
    for g in range(G):
        mean = -(-total_V[domain_G[g]] // size_V[domain_G[g]])
        room_G[g] = mean - load_G[g]
        # A rank keeps its coldest experts. The load of the hottest experts above the mean spills over.
        kept = np.int64(0)
        for b in np.argsort(quota_GS[g, :num_base], kind="mergesort"):
            stays = min(np.int64(quota_GS[g, b]), mean - kept)
            spill_GB[g, b] = quota_GS[g, b] - stays
            kept += stays
    while True:
        i = np.argmax(spill_GB)
        home, b = i // num_base, i % num_base
        spill, to = spill_GB[home, b], -1
        if spill == 0:
            break
        for g in range(G):
            if domain_G[g] != domain_G[home] or room_G[g] <= 0 or expert_GS[g, S - 1] >= 0:
                continue
            # Choose the rank that the spill fills best. If it fits into none, choose the rank with the most room.
            fits = to >= 0 and room_G[to] >= spill
            if to < 0 or (room_G[g] > room_G[to] and not fits) or room_G[to] > room_G[g] >= spill:
                to = g
        if to < 0:
            spill_GB[home, b] = 0
            continue
        s = num_base
        while expert_GS[to, s] >= 0:
            s += 1
        # A rank that takes less than the whole spill is full, so it never gets the same expert twice.
        amount = min(spill, room_G[to])
        expert_GS[to, s] = expert_GS[home, b]
        room_G[to] -= amount
        spill_GB[home, b] -= amount
    split_row(load_E, expert_GS, quota_GS)
    empty_idle(num_base, expert_GS, quota_GS)


@dataclass(frozen=True)
class Echo(RowSolver):
    """Moves excess load of the hottest experts on overloaded ranks to ranks with room, the largest excess first.

    This follows the description of ECHO, elastic cloning for hot experts (Megatron-Core MoE report, arXiv 2603.07685, section
    4.3). It computes the excess per expert and the room per rank, and packs the excess into R slots per rank. The published code
    has several packings, one of which takes nodes into account. Here, an excess goes to the rank that it fills best, or in part
    to the rank with the most room. Then the kernel of `ExactSplit` splits tokens over the clones. The published code keeps the
    packed amounts instead, so our version balances better than the published one. Kernels without host synchronisation are not
    reproduced. If replicas must stay in their node, each node is balanced separately. The solver starts from the homes and never
    returns a placement that is worse than the homes.
    """

    edit = staticmethod(echo_row)
