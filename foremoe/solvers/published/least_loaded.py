"""`LeastLoaded`: spills excess load to the least loaded rank."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.fields import real, whole
from foremoe.solvers.base import RowSolver
from foremoe.solvers.split.kernels import start_at_home

# Letters: G ranks, R redundant slots, S slots per rank, E experts.


class Options(NamedTuple):
    node_only: bool  # whether replicas must stay inside their home's node
    alpha: float  # capacity of a rank as a multiple of the mean load
    min_pairs: int  # smallest chunk that is split off a spill
    threshold: float  # rows with a smaller skew are not changed


@kernel
def least_loaded_row(load_E, node_G, num_base, options, expert_GS, quota_GS):
    """Solves one row of `LeastLoaded` (see `RowSolver.edit`)."""
    G, S = expert_GS.shape
    node_only, min_pairs = options.node_only, max(1, options.min_pairs)
    home_E, load_G = start_at_home(load_E, num_base, expert_GS, quota_GS)
    mean = load_G.sum() / G
    if load_G.max() < options.threshold * mean:
        return
    capacity = max(np.int64(options.alpha * (load_G.sum() // G)), np.int64(1))
    for e in np.argsort(-load_E.astype(np.int64), kind="mergesort"):
        home, b = home_E[e] // S, home_E[e] % S
        # The load that colder experts keep at home is already counted, so the hottest experts spill first.
        spill = min(np.int64(quota_GS[home, b]), load_G[home] - capacity)
        while spill > 0:
            to, slot = -1, -1
            for g in range(G):
                if g == home or (node_only and node_G[g] != node_G[home]) or (to >= 0 and load_G[g] >= load_G[to]):
                    continue
                for s in range(num_base, S):
                    if expert_GS[g, s] < 0 or expert_GS[g, s] == e:
                        to, slot = g, s
                        break
            if to < 0 or load_G[to] >= capacity:
                break
            amount = min(spill, capacity - load_G[to])
            if amount < min_pairs:
                amount = spill  # a chunk below the minimum takes the whole rest, even above the capacity
            expert_GS[to, slot] = e
            quota_GS[to, slot] += amount
            quota_GS[home, b] -= amount
            load_G[home] -= amount
            load_G[to] += amount
            spill -= amount


@dataclass(frozen=True)
class LeastLoaded(RowSolver):
    """Keeps up to alpha times the mean load at home and spills the rest to the least loaded ranks.

    This is LLEP (Salesforce, arXiv 2601.17111) with at most R slots per rank. Its planner is published as code, and our defaults
    are the same. A spill is sent in chunks to the least loaded rank with a free slot, each up to that rank's capacity. If a chunk
    would be smaller than the minimum, it takes all that is left of the spill, even above the capacity. Load without a free slot
    stays at home. The solver starts from the homes and never returns a placement that is worse than the homes.

    Attributes:
        alpha: Capacity of a rank as a multiple of the mean load, at least 1.
        min_pairs: Smallest number of pairs in a chunk that is split off a spill.
        threshold: Skew below which a row is not changed. With 1.0, every row may be changed.
    """

    alpha: float = 1.1
    min_pairs: int = 1024
    threshold: float = 1.3

    edit = staticmethod(least_loaded_row)
    Options = Options

    def __post_init__(self) -> None:
        real(self.alpha, "alpha of LeastLoaded", 1.0, open_low=False)
        whole(self.min_pairs, "min_pairs of LeastLoaded", 0, 2**31 - 1)
        if not self.threshold >= 0:
            raise InputError(f"LeastLoaded needs a threshold of at least 0; got {self.threshold!r}.")
