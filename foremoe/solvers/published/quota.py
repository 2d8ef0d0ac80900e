"""`Quota`: searches for the smallest maximum load that a greedy spill can reach."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.fields import whole
from foremoe.solvers.base import RowSolver

# Letters: G ranks, B base slots, R redundant slots, S = B + R, E experts.


class Options(NamedTuple):
    node_only: bool  # whether replicas must stay inside their home's node
    min_pairs: int  # minimum number of pairs of a replica


class _Case(NamedTuple):
    """Data that all spills of a row share."""

    load_E: Array  # pairs per expert
    load_G: Array  # rank loads at home
    hot_GB: Array  # base slots of every rank from the hottest to the coldest
    giver_G: Array  # ranks from the most to the least loaded
    taker_G: Array  # ranks from the least to the most loaded
    node_G: Array  # node of every rank
    now_G: Array  # scratch: rank loads
    open_G: Array  # scratch: receivers left


@kernel
def _spill(target, case, options, expert_GS, quota_GS):
    """Spills load until no rank is above `target`, as far as slots allow. Returns the resulting maximum rank load.

    Writes the redundant slots and all quotas.
    """
    load_E, load_G, hot_GB, giver_G, taker_G, node_G, now_G, open_G = case
    num_base, S = hot_GB.shape[1], expert_GS.shape[1]
    min_pairs = max(1, options.min_pairs)
    expert_GS[:, num_base:] = -1
    quota_GS[:, num_base:] = 0
    # open_G[first : last] holds the open receivers, sorted by decreasing room and then by rank.
    first, last = 0, 0
    for g in taker_G:
        now_G[g] = load_G[g]
        for b in range(num_base):
            quota_GS[g, b] = load_E[expert_GS[g, b]]
        if load_G[g] < target and num_base < S:
            open_G[last] = g
            last += 1
    for g in giver_G:
        if load_G[g] <= target:
            break
        for i in range(num_base):
            b = hot_GB[g, i]
            while now_G[g] > target:
                # A rank may fall below the target if `min_pairs` makes a piece larger than the excess.
                want = min(max(now_G[g] - target, min_pairs), np.int64(quota_GS[g, b]))
                at = first
                while at < last and options.node_only and node_G[open_G[at]] != node_G[g]:
                    at += 1
                if at == last or min(want, target - now_G[open_G[at]]) < min_pairs:
                    break
                r = open_G[at]
                amount, s = min(want, target - now_G[r]), num_base
                while expert_GS[r, s] >= 0:
                    s += 1
                expert_GS[r, s], quota_GS[r, s] = expert_GS[g, b], amount
                quota_GS[g, b] -= amount
                now_G[g] -= amount
                now_G[r] += amount
                # A piece that does not fill its receiver ends this expert's spill, so no receiver gets an expert twice.
                if now_G[r] < target and s + 1 < S:
                    while at + 1 < last and (now_G[open_G[at + 1]], open_G[at + 1]) < (now_G[r], r):
                        open_G[at] = open_G[at + 1]
                        at += 1
                    open_G[at] = r
                elif at == first:
                    first += 1
                else:
                    last -= 1
                    for k in range(at, last):
                        open_G[k] = open_G[k + 1]
            if now_G[g] <= target:
                break
    return now_G.max()


@kernel
def quota_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `Quota` (see `RowSolver.edit`)."""
    G = expert_GS.shape[0]
    load_G = np.zeros(G, np.int64)
    hot_GB = np.empty((G, num_base), np.int64)
    home_B = np.empty(num_base, np.int64)
    for g in range(G):
        for b in range(num_base):
            home_B[b] = -np.int64(load_E[expert_GS[g, b]])
            load_G[g] -= home_B[b]
        hot_GB[g] = np.argsort(home_B, kind="mergesort")
    giver_G, taker_G = np.argsort(-load_G, kind="mergesort"), np.argsort(load_G, kind="mergesort")
    case = _Case(load_E, load_G, hot_GB, giver_G, taker_G, node_G, np.empty(G, np.int64), np.empty(G, np.int64))
    total = load_G.sum()
    low = -(-total // G)
    best = high = threshold = load_G.max()
    while low < high:
        target = (low + high) // 2
        reached = _spill(target, case, options, expert_GS, quota_GS)
        # A spill that misses its target is still a placement, and its maximum is a better upper end of the search.
        if reached < best:
            best, threshold = reached, target
        if reached > target:
            low = target + 1
        high = min(high, best)
    _spill(threshold, case, options, expert_GS, quota_GS)


@dataclass(frozen=True)
class Quota(RowSolver):
    """Finds, by binary search, the smallest maximum rank load that a greedy spill can reach with R slots per rank.

    For a given threshold, ranks above the threshold give their excess to ranks below it that have a free slot. The most loaded
    rank and its hottest expert come first. A rank does not pass on load that it has received. The rule is described for UltraEP's
    planner (arXiv 2606.04101). The order of givers and the choice of receivers are our own. The solver starts from the homes,
    regardless of the start placement, and its result is never worse than the homes.

    Attributes:
        min_pairs: Minimum number of pairs of a replica. 0 means that there is no minimum.
    """

    min_pairs: int = 0

    edit = staticmethod(quota_row)
    Options = Options

    def __post_init__(self) -> None:
        whole(self.min_pairs, "min_pairs of Quota", 0, 2**31 - 1)
