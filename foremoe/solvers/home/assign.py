"""Assignment of base slots to experts whose ranks are given, so that few experts move."""

import numpy as np

from foremoe.base.arrays import Array

# Letters: G ranks, V nodes, E experts, B base slots per rank.


def few_moves(rank_E: Array, now_E: Array, node_G: Array, rename_nodes: bool = True) -> Array:
    """Renumbers ranks without changing the grouping of experts, so that fewer experts move.

    Nodes of equal size are renumbered first, then ranks inside their node, starting from the largest overlap of old and new
    experts. The new numbers do not change the balance. They are used only if fewer experts move with them. If `rename_nodes` is
    False, nodes keep their numbers, because the grouping depends on the nodes of tokens.
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
    """Returns the old number for every new group, assigned by largest overlap. The lowest index breaks ties."""
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

    An expert that stays on its rank keeps its base slot. All other experts take the free slots, in order of their number.
    """
    stays_E = rank_E == home_E // num_base
    new_E = np.where(stays_E, home_E, -1)
    free = np.ones(len(rank_E), bool)
    free[home_E[stays_E]] = False
    # Every rank has as many free slots as arriving experts, so both lists, sorted by rank and index, match one to one.
    movers = np.flatnonzero(~stays_E)
    new_E[movers[np.argsort(rank_E[movers], kind="stable")]] = np.flatnonzero(free)
    return new_E.astype(np.int32)
