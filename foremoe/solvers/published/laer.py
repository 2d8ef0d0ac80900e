"""`Laer`: places all experts again in every row, with copies in proportion to load."""

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
    """Returns the number of copies of every expert, int64 [E].

    Each expert begins with one copy per node if there are enough slots, or else with one. While a slot is left, the expert with
    the most load per copy gets one more. An expert never has more copies than there are ranks.
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
    """Places copies, heaviest first, each on the least loaded rank of a node with the fewest copies of its expert.

    Returns the largest rank load with even shares. A copy is left out if its rank already holds the same expert.
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
    """Solves one row: tries the counts of `_count_copies` and `tries` perturbed counts, and keeps the smallest maximum load."""
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
    """Runs `laer_row` on rows [low, high). Rows without load are not changed."""
    for n in range(low, high):
        if load_NE[n].max() > 0:
            laer_row(load_NE[n], node_G, tries, seed, expert_NGS[n], quota_NGS[n])


@dataclass(frozen=True)
class Laer(RankSolver):
    """Copies experts in proportion to load. The heaviest copies go first, each to the least loaded rank of a node with few
    copies.

    This follows LAER-MoE (arXiv 2602.11686). That system keeps experts sharded over all ranks, so it can change the placement in
    every iteration, based on the loads of earlier iterations. Because experts have no fixed home, the result can be rated but not
    executed. Tokens are split evenly over the copies.

    The candidates are the numbers of copies in proportion to load and perturbed numbers. The candidate with the smallest maximum
    rank load is chosen. The published cost also includes communication, which a forecast without source ranks cannot price. The
    paper does not describe the perturbations in detail. Two features are not reproduced. One is to restore every expert from its
    shards, which no figure includes. The other is to pool the slots of several EP groups. Rows without load keep the start
    placement. `Problem.replicas` has no effect, because experts have no home here.

    Attributes:
        tries: Number of perturbed candidates. Each has one copy more of one expert and one copy less of another.
        seed: Seed of the perturbations, which are the same in every row.
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
