"""The least maximum load that ranks can reach, by what the most loaded ones can give away."""

from __future__ import annotations

import numpy as np

from foremoe.solvers.kernels.compiled import kernel

# Letters: N rows, G ranks, S slots per rank, E experts, P = G*S physical slots (p = g*S + s), V nodes.


@kernel
def bound_row(target, member_G, num_base, quota_GS):  # type: ignore[no-untyped-def]
    """The least maximum load that the ranks of `member_G` can have among themselves, or `target` if that is more.

    The k most loaded ranks can only give into the slots of the others: those n = R * (number of others) slots take at most the
    n largest experts at home on the k ranks. What is left has a mean, and the maximum is no smaller.

    Args:
        member_G: bool; ranks outside take no part.
        quota_GS: int32, every expert's whole load at home.
    """
    G, S = quota_GS.shape
    load_G = np.zeros(G, np.int64)
    for g in range(G):
        for b in range(num_base):
            load_G[g] += quota_GS[g, b]
    inside_G = member_G.copy()
    total, num_inside, num_slots = np.int64(0), 0, 0
    for g in range(G):
        if inside_G[g]:
            total += load_G[g]
            num_inside += 1
    hot_I = np.argsort(-quota_GS[:, :num_base].copy().reshape(-1).astype(np.int64), kind="mergesort")
    for g in np.argsort(load_G, kind="mergesort"):
        if not inside_G[g]:
            continue
        if load_G[g] > target or num_inside == 1:
            break
        inside_G[g] = False
        total -= load_G[g]
        num_inside -= 1
        num_slots += S - num_base
        given, used = np.int64(0), 0
        for i in hot_I:
            if used == num_slots:
                break
            if inside_G[i // num_base]:
                given += quota_GS[i // num_base, i % num_base]
                used += 1
        target = max(target, -((given - total) // num_inside))
    return target
