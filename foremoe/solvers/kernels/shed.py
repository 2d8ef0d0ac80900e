"""Stars for tight links: every rank above a target gets rid of its excess in as few copies as it can."""

from __future__ import annotations

import numpy as np

from foremoe.solvers.kernels.compiled import kernel

# Letters: G ranks, S slots per rank.


@kernel
def shed_row(target, near_limit, far_limit, node_only, node_G, num_base, expert_GS, quota_GS, load_G):  # type: ignore[no-untyped-def]
    """Moves load from ranks above `target` to ranks below it, the most loaded first; in place, from bare homes.

    The taker is the fullest that can take the whole excess of one expert; if there is none, the one that takes most. Where every
    copy out of a home counts, filling takers exactly (`settle`) spends copies on takers that leave their giver above the target.

    Args:
        near_limit, far_limit: most copies out of a home rank inside its node, and to other nodes.
        load_G: int64, kept up to date.
    """
    G, S = quota_GS.shape
    free_G = np.zeros(G, np.int64)
    for g in range(G):
        for s in range(num_base, S):
            free_G[g] += expert_GS[g, s] < 0
    for g in np.argsort(-load_G, kind="mergesort"):
        near_left, far_left = near_limit, far_limit
        while load_G[g] > target:
            over = load_G[g] - target
            top, best = -1, np.int64(0)
            for b in range(num_base):
                if quota_GS[g, b] > best:
                    top, best = b, np.int64(quota_GS[g, b])
            taker, taken, need_of = -1, np.int64(0), np.int64(0)
            for r in range(G):
                need = target - load_G[r]
                if need <= 0 or free_G[r] == 0:
                    continue
                if near_left <= 0 if node_G[r] == node_G[g] else (node_only or far_left <= 0):
                    continue
                takes = min(over, min(need, best))
                if takes > taken or (takes == taken and takes > 0 and need < need_of):
                    taker, taken, need_of = r, takes, need
            if taker < 0:
                break
            for b in range(num_base):
                if taken <= quota_GS[g, b] < quota_GS[g, top]:
                    top = b
            for s in range(num_base, S):
                if expert_GS[taker, s] < 0:
                    expert_GS[taker, s], quota_GS[taker, s] = expert_GS[g, top], taken
                    break
            quota_GS[g, top] -= taken
            load_G[g] -= taken
            load_G[taker] += taken
            free_G[taker] -= 1
            if node_G[taker] == node_G[g]:
                near_left -= 1
            else:
                far_left -= 1
