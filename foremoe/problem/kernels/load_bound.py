"""Lower bound of the largest rank load, computed from the load that the busiest ranks can give to other ranks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel

# Letters: N rows, G ranks, S slots per rank, B base slots, E experts, I ranks in an order.


class Homes(NamedTuple):
    """Homes of experts and limits for replicas. If `node_only` is set, a replica must be in the node of its home."""

    base_NGB: Array
    node_G: Array
    node_only: bool
    redundant: int


@kernel
def _insert(value, hot, count):
    """Inserts `value` into the first `count` entries of `hot`, which are in descending order."""
    i = count
    while i > 0 and hot[i - 1] < value:
        hot[i] = hot[i - 1]
        i -= 1
    hot[i] = value


@kernel
def _many_slots(target, redundant, rank_I, load_G, load_GB):
    """Computes `least_load` with several redundant slots per rank.

    The k most loaded ranks can only give load to the slots of the other ranks. These slots take at most as many of the largest
    experts at home on the k ranks. The maximum is at least the mean of the load that is left.
    """
    num, B = rank_I.size, load_GB.shape[1]
    hot = np.empty(num * B, np.int64)
    total, count = np.int64(0), 0
    for k in range(1, num + 1):
        g = rank_I[k - 1]
        total += load_G[g]
        for b in range(B):
            _insert(load_GB[g, b], hot, count)
            count += 1
        slots = redundant * (num - k)
        if slots < count:
            target = max(target, -((hot[:slots].sum() - total) // k))
    return target


@kernel
def _one_slot(target, rank_I, load_G, load_GB):
    """Computes `least_load` with one redundant slot per rank.

    Let T be a maximum that can be reached, and H some of the ranks above T. Group the other ranks so that ranks with replicas of
    each other's experts are together. A group of c ranks uses c - 1 of its slots inside, so it takes at most one expert of H. It
    takes at most the load that its ranks together need to reach T. Let A be any set of j ranks below T. The groups with a rank of
    A take at most the j largest experts of H. The other groups take at most the load that ranks below T outside A need to reach
    T. The sum is least if A holds the j least loaded ranks. If it is less than the load of H above T, then T cannot be reached,
    nor can any T up to the load of the least loaded rank above T outside H, because only a higher T lets that rank take load.
    """
    num, B = rank_I.size, load_GB.shape[1]
    hot = np.empty(num * B, np.int64)
    while True:
        above, below_total = 0, np.int64(0)
        for i in range(num):
            if load_G[rank_I[i]] > target:
                above += 1
            else:
                below_total += load_G[rank_I[i]]
        best, total, count = target, np.int64(0), 0
        for k in range(1, above + 1):
            g = rank_I[k - 1]
            total += load_G[g]
            for b in range(B):
                _insert(load_GB[g, b], hot, count)
                count += 1
            held, members = total + below_total, k + num - above
            reached = -(-held // members)
            for j in range(1, num - above + 1):
                held -= load_G[rank_I[num - j]]
                if j <= count:
                    held -= hot[j - 1]
                members -= 1
                if held > reached * members:  # otherwise, divisions would take most of the planning time of a large row
                    reached = -(-held // members)
            if k < above:
                reached = min(reached, load_G[rank_I[above - 1]] + 1)
            best = max(best, reached)
        if best == target:
            return target
        target = best


@kernel
def least_load(target, member_G, redundant, load_GB):
    """Returns a lower bound of the largest load of the ranks in `member_G` if homes are kept and only these ranks hold replicas.

    The bound is at least `target`. `load_GB` (int64) is the load of the experts at home on each rank.
    """
    G = load_GB.shape[0]
    load_G = np.empty(G, np.int64)
    total, num = np.int64(0), 0
    for g in range(G):
        load_G[g] = load_GB[g].sum()
        if member_G[g]:
            total += load_G[g]
            num += 1
    rank_I = np.empty(num, np.int64)
    num = 0
    for g in range(G):
        if member_G[g]:
            i = num
            while i > 0 and load_G[rank_I[i - 1]] < load_G[g]:
                rank_I[i] = rank_I[i - 1]
                i -= 1
            rank_I[i] = g
            num += 1
    if redundant == 0:
        return max(target, load_G[rank_I[0]])
    target = max(target, -(-total // num))
    if load_G[rank_I[0]] <= target:
        return target
    if redundant == 1:
        return _one_slot(target, rank_I, load_G, load_GB)
    return _many_slots(target, redundant, rank_I, load_G, load_GB)


@kernel
def bound_row(target, member_G, num_base, quota_GS):
    """Returns `least_load` of a row in which homes serve all pairs."""
    load_GB = quota_GS[:, :num_base].astype(np.int64)
    return least_load(np.int64(target), member_G, quota_GS.shape[1] - num_base, load_GB)


@kernel
def load_bound_rows(low, high, load_NE, homes, bound_N):
    """Fills ``bound_N[low:high]`` with `least_load` of all ranks, or of the worst node if replicas must stay in their node."""
    base_NGB, node_G, node_only, redundant = homes
    G, B = base_NGB.shape[1:]
    num_domains = node_G.max() + 1 if node_only else 1
    member_G = np.ones(G, np.bool_)
    load_GB = np.empty((G, B), np.int64)
    for n in range(low, high):
        for g in range(G):
            for b in range(B):
                load_GB[g, b] = load_NE[n, base_NGB[n, g, b]]
        bound = np.int64(0)
        for domain in range(num_domains):
            if node_only:
                for g in range(G):
                    member_G[g] = node_G[g] == domain
            bound = least_load(bound, member_G, redundant, load_GB)
        bound_N[n] = bound
