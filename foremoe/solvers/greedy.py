"""`Greedy`: repeatedly evens out the loads of the most and the least loaded rank."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.solvers.base import RowSolver
from foremoe.solvers.split.kernels import start_at_home

# Letters: G ranks, S slots per rank, E experts.


@kernel
def greedy_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `Greedy` (see `RowSolver.edit`)."""
    G, S = expert_GS.shape
    home_E, load_G = start_at_home(load_E, num_base, expert_GS, quota_GS)
    hot_S = np.empty(S, np.int64)
    moved = True
    while moved:
        moved = False
        giver = np.argmax(load_G)
        # The hottest expert has the largest quota on this rank. Ties go to the lowest slot.
        for s in range(S):
            hot_S[s] = -np.int64(quota_GS[giver, s])
        for s in np.argsort(hot_S, kind="mergesort"):
            e = expert_GS[giver, s]
            if e < 0 or quota_GS[giver, s] == 0:
                break
            # The home, or a rank that already holds a replica, needs no free slot.
            to, to_slot = -1, -1
            for g in range(G):
                if load_G[g] + 1 >= load_G[giver] or (to >= 0 and load_G[g] >= load_G[to]):
                    continue
                slot = -1
                for t in range(S):
                    if expert_GS[g, t] == e:
                        slot = t
                        break
                    if slot < 0 and t >= num_base and expert_GS[g, t] < 0:
                        slot = t
                if slot < 0 or (options.node_only and node_G[g] != node_G[home_E[e] // S]):
                    continue
                to, to_slot = g, slot
            if to < 0:
                continue
            amount = min((load_G[giver] - load_G[to]) // 2, np.int64(quota_GS[giver, s]))
            expert_GS[to, to_slot] = e
            quota_GS[to, to_slot] += amount
            quota_GS[giver, s] -= amount
            if s >= num_base and quota_GS[giver, s] == 0:
                expert_GS[giver, s] = -1
            load_G[giver] -= amount
            load_G[to] += amount
            moved = True
            break


@dataclass(frozen=True)
class Greedy(RowSolver):
    """Copies the hottest expert of the most loaded rank to the least loaded rank that can take it, until nothing improves.

    A rank can take an expert if it has a free slot or already holds that expert. It takes as much load as makes the two ranks
    equal. If no rank can take the hottest expert, the next hottest expert is tried. The search ends when the most loaded rank
    cannot give load to any rank. `Greedy` is a plain baseline with neither look-ahead nor a final split. It starts from the homes
    and never returns a placement that is worse than the homes.
    """

    edit = staticmethod(greedy_row)
