"""`Lpt`: homes by longest processing time first. Also functions that home solvers share to assign base slots with few moves."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.parallel import for_rows
from foremoe.levels import HomeSolver
from foremoe.problem.problem import Problem

# Letters: M micro-steps, L layers, G ranks, V nodes, E experts, B base slots per rank.


@dataclass(frozen=True)
class Lpt(HomeSolver):
    """Assigns the experts of a layer, heaviest first, to the least loaded node and its least loaded rank, once per step.

    It is quick but ignores how loads change between micro-steps. `Anneal` starts from it. A node's load is divided by its number
    of ranks, so nodes of unequal size get their share. Every rank gets exactly B experts. Among equal choices, an expert keeps
    its present node and rank, and otherwise the lowest index wins. Source: R. L. Graham, "Bounds on multiprocessing timing
    anomalies" (1969).
    """

    def solve(self, problem: Problem) -> Array:
        """Returns ``home_LE``, int32. Layers that a cancellation skipped keep their homes."""
        home_LE, node_G = problem.home_LE.copy(), problem.cluster.node_of_rank_G
        load_LE = problem.load_MLE.sum(axis=0, dtype=np.int64)

        def block(layer: int, _: int) -> None:
            now_E = problem.home_LE[layer] // problem.B
            rank_E = lpt_ranks(load_LE[layer], now_E, node_G)
            home_LE[layer] = home_slots(few_moves(rank_E, now_E, node_G), problem.home_LE[layer], problem.B)

        for_rows(block, problem.L, rows_per_block=1)
        return home_LE


@kernel
def lpt_ranks(load_E, now_E, node_G):
    """Returns the rank that `Lpt` gives every expert, int64 [E], from the step's pairs and the present ranks."""
    G, E = node_G.size, load_E.size
    base = E // G
    ranks_V = np.bincount(node_G)
    num_nodes, room_G, room_V = ranks_V.size, np.full(G, base), base * ranks_V
    load_G, load_V = np.zeros(G, np.int64), np.zeros(num_nodes, np.int64)
    rank_E = np.empty(E, np.int64)
    for e in np.argsort(-load_E, kind="mergesort"):
        home = now_E[e]
        node = node_G[home] if room_V[node_G[home]] > 0 else -1
        for v in range(num_nodes):
            # Compare loads per rank as integers.
            if room_V[v] > 0 and (node < 0 or load_V[v] * ranks_V[node] < load_V[node] * ranks_V[v]):
                node = v
        rank = home if node_G[home] == node and room_G[home] > 0 else -1
        for g in range(G):
            if node_G[g] == node and room_G[g] > 0 and (rank < 0 or load_G[g] < load_G[rank]):
                rank = g
        rank_E[e] = rank
        load_G[rank] += load_E[e]
        load_V[node] += load_E[e]
        room_G[rank] -= 1
        room_V[node] -= 1
    return rank_E


def few_moves(rank_E: Array, now_E: Array, node_G: Array, rename_nodes: bool = True) -> Array:
    """Renumbers ranks without changing the grouping of experts, so that fewer experts move.

    Nodes of equal size are renumbered first, then ranks inside their node, starting from the largest overlap of old and new
    experts. Renumbering does not change the balance, only the number of experts that move, and is kept only if fewer move. With
    `rename_nodes` False, nodes keep their numbers, because tokens were taken into account and do not move with the number.
    """
    num_nodes, G = int(node_G.max()) + 1, len(node_G)
    ranks_V = [np.flatnonzero(node_G == v) for v in range(num_nodes)]
    name_G = np.arange(G)
    node_of_V = np.arange(num_nodes)
    if rename_nodes and num_nodes > 1 and len({len(ranks) for ranks in ranks_V}) == 1:
        node_of_V = _match(_overlap(node_G[rank_E], node_G[now_E], num_nodes))
    overlap_GG = _overlap(rank_E, now_E, G)
    for v, ranks in enumerate(ranks_V):
        to = ranks_V[node_of_V[v]]
        name_G[ranks] = to[_match(overlap_GG[np.ix_(ranks, to)])]
    renamed_E = name_G[rank_E]
    return renamed_E if (renamed_E == now_E).sum() > (rank_E == now_E).sum() else rank_E


def _overlap(new_E: Array, now_E: Array, num: int) -> Array:
    return np.bincount(new_E * num + now_E, minlength=num * num).reshape(num, num)


def _match(overlap: Array) -> Array:
    """Returns the old number for every new group, assigned by largest overlap, with ties by lowest index."""
    num = len(overlap)
    name = np.full(num, -1)
    taken = np.zeros(num, bool)
    shared = np.flatnonzero(overlap)
    for flat in shared[np.argsort(-overlap.ravel()[shared], kind="stable")]:
        new, old = divmod(int(flat), num)
        if name[new] < 0 and not taken[old]:
            name[new], taken[old] = old, True
    name[name < 0] = np.flatnonzero(~taken)
    return name


def home_slots(rank_E: Array, home_E: Array, num_base: int) -> Array:
    """Returns home slots for experts whose ranks are given, int32 [E].

    An expert that stays on its rank keeps its base slot. The others take the free slots, lowest expert first.
    """
    stays_E = rank_E == home_E // num_base
    new_E = np.where(stays_E, home_E, -1)
    free = np.ones(len(rank_E), bool)
    free[home_E[stays_E]] = False
    # Every rank has as many free slots as arriving experts, so both lists, sorted by rank and index, match one to one.
    movers = np.flatnonzero(~stays_E)
    new_E[movers[np.argsort(rank_E[movers], kind="stable")]] = np.flatnonzero(free)
    return new_E.astype(np.int32)
