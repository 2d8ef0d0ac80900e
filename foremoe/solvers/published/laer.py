"""Laer: all experts placed anew, as many copies of each as its load deserves."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.base.fields import whole
from foremoe.base.random import random_below
from foremoe.levels import RankSolver
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers.base import edit_rows, require_start
from foremoe.solvers.split.kernels import even_row

# Letters: N rows, G ranks, V nodes, S slots per rank, E experts, X copies of all experts.


@kernel
def _count_copies(load_E, num_nodes, num_ranks, num_slots):
    """int64 [E]: copies of every expert; the expert with the most load per copy gets one more while a slot is left.

    All begin with one copy per node where slots suffice, else with one; none has more copies than there are ranks.
    """
    first = num_nodes if num_nodes * load_E.size <= num_slots else 1
    count_E = np.full(load_E.size, first, np.int64)
    for _ in range(num_slots - first * load_E.size):
        hot = -1
        for e in range(load_E.size):
            if count_E[e] < num_ranks and (hot < 0 or load_E[e] / count_E[e] > load_E[hot] / count_E[hot]):
                hot = e
        if hot < 0:
            break
        count_E[hot] += 1
    return count_E


@kernel
def _place_copies(load_E, count_E, node_G, expert_GS):
    """Heaviest copies first, each to a node with the fewest copies of its expert, there to the rank with the least load.

    Returns the largest rank load of even shares. A copy that would meet another one of its expert is left out.
    """
    G, S = expert_GS.shape
    num_copies_EV = np.zeros((load_E.size, node_G.max() + 1), np.int64)
    load_G, used_G = np.zeros(G), np.zeros(G, np.int64)
    expert_GS[:, :] = -1
    for e in np.argsort(-load_E / count_E, kind="mergesort"):
        for _ in range(count_E[e]):
            to = -1
            for g in range(G):
                if used_G[g] == S or (expert_GS[g] == e).any():
                    continue
                if to >= 0:
                    fewer = num_copies_EV[e, node_G[g]] - num_copies_EV[e, node_G[to]]
                    if fewer > 0 or (fewer == 0 and load_G[g] >= load_G[to]):
                        continue
                to = g
            if to < 0:
                break
            expert_GS[to, used_G[to]] = e
            used_G[to] += 1
            load_G[to] += load_E[e] / count_E[e]
            num_copies_EV[e, node_G[to]] += 1
    return load_G.max()


@kernel
def laer_row(load_E, node_G, tries, seed, expert_GS, quota_GS):
    """One row: the placement with the smallest largest load among that of `_count_copies` and `tries` perturbed counts."""
    G, S = expert_GS.shape
    pairs_E = load_E.astype(np.float64)
    plain_E = _count_copies(pairs_E, node_G.max() + 1, G, G * S)
    smallest = _place_copies(pairs_E, plain_E, node_G, expert_GS)
    tried_GS, state = np.empty_like(expert_GS), np.full(1, seed, np.uint64)
    for _ in range(tries):
        count_E = plain_E.copy()
        fewer, more = random_below(state, load_E.size), random_below(state, load_E.size)
        if fewer == more or count_E[fewer] == 1 or count_E[more] == G:
            continue
        count_E[fewer] -= 1
        count_E[more] += 1
        largest = _place_copies(pairs_E, count_E, node_G, tried_GS)
        if largest < smallest:
            smallest = largest
            expert_GS[:, :] = tried_GS
    even_row(load_E, expert_GS, quota_GS)


@kernel
def laer_rows(low, high, load_NE, node_G, tries, seed, expert_NGS, quota_NGS):
    """`laer_row` for rows [low, high); rows without load stay as they are."""
    for n in range(low, high):
        if load_NE[n].max() > 0:
            laer_row(load_NE[n], node_G, tries, seed, expert_NGS[n], quota_NGS[n])


@dataclass(frozen=True)
class Laer(RankSolver):
    """Places copies in proportion to load, heaviest first, on the node with fewest and its least loaded rank; splits evenly.

    After LAER-MoE (arXiv 2602.11686), which keeps experts sharded over all ranks and so may lay them out anew in every iteration,
    from the loads of earlier ones. Re-places all experts, so it is scored, never executed. Candidates are the counts in
    proportion to load and perturbed ones; the largest rank load decides between them. The published cost has communication as
    well, which a forecast without sources cannot price, and its perturbations are not described in detail. Not imitated:
    restoring every expert from its shards (in no figure), and ranks of several EP groups as one pool of slots. Rows without load
    keep the start. `Problem.replicas` has no meaning for experts without a home.

    Attributes:
        tries: Perturbed counts, each with one copy moved from an expert to another.
        seed: Of the perturbations; every row draws the same.
    """

    tries: int = 16
    seed: int = 0

    keeps_homes: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole(self.tries, "tries of Laer", 0, 10**6)
        whole(self.seed, "seed of Laer", 0, 2**63 - 1)

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """Returns the placement of all rows."""
        require_start(problem, start)
        load_NE, node_G = problem.load_NE, problem.cluster.node_of_rank_G
        return edit_rows(start, lambda low, high, *placed: laer_rows(low, high, load_NE, node_G, self.tries, self.seed, *placed))
