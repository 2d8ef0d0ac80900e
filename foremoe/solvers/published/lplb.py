"""`Lplb`: places replicas along a fixed graph and finds the best split over them."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.base import RowSolver
from foremoe.solvers.rows import empty_idle
from foremoe.solvers.split.kernels import split_row

# Letters: G ranks, V nodes, R redundant slots, S slots per rank, E experts.


@kernel
def lplb_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `Lplb` (see `RowSolver.edit`). Slot r of the rank at position i of a ring serves position i + 2^r."""
    G, S = expert_GS.shape
    hot_G = np.full(G, -1, np.int64)
    for g in range(G):
        for b in range(num_base):
            e = expert_GS[g, b]
            if hot_G[g] < 0 or load_E[e] > load_E[hot_G[g]]:
                hot_G[g] = e
    ring_G = np.empty(G, np.int64)
    expert_GS[:, num_base:] = -1
    for g in range(G):
        size, place = 0, 0
        for other in range(G):
            if not options.node_only or node_G[other] == node_G[g]:
                if other == g:
                    place = size
                ring_G[size] = other
                size += 1
        step = 1 % size
        for s in range(num_base, S):
            source = ring_G[(place + step) % size]
            step = 2 * step % size
            duplicate = source == g
            for t in range(num_base, s):
                duplicate |= expert_GS[g, t] == hot_G[source]
            if not duplicate:
                expert_GS[g, s] = hot_G[source]
    split_row(load_E, expert_GS, quota_GS)
    empty_idle(num_base, expert_GS, quota_GS)


@dataclass(frozen=True)
class Lplb(RowSolver):
    """Places replicas along a fixed graph of ranks and splits tokens for the smallest maximum rank load.

    This follows the description of DeepSeek's LPLB. The graph is fixed. Here, redundant slot r of rank g serves rank g + 2^r
    modulo G, which arranges the edges of a hypercube around a ring. The expert of an edge is the hottest expert of the rank that
    is served. LPLB splits tokens along the edges with a linear program. Here, the kernel of `ExactSplit` finds the optimum in
    whole pairs. If replicas must stay in their node, each node has its own ring. The solver ignores replicas of the start
    placement.
    """

    edit = staticmethod(lplb_row)
