"""Lower bounds that hold for every placement that keeps the homes: on the largest rank load, on compute, on dispatch."""

from __future__ import annotations

import numpy as np
from numba import njit

from foremoe.arrays import Array

# Letters: N rows, G ranks, E experts, B base slots per rank.


@njit(nogil=True, cache=True)
def _capped_fill(total, cap_G, member_G):  # type: ignore[no-untyped-def]
    """The smallest whole T with ``sum over members of min(T, cap) >= total``; total <= sum of caps."""
    low, high = 0, total
    while low < high:
        middle = (low + high) // 2
        held = 0
        for g in range(cap_G.size):
            if member_G[g]:
                held += min(middle, cap_G[g])
        if held >= total:
            high = middle
        else:
            low = middle + 1
    return low


@njit(nogil=True, cache=True)
def _top_sum(value_E, excluded_E, num):  # type: ignore[no-untyped-def]
    """Sum of the `num` largest values outside `excluded_E`."""
    if num <= 0:
        return np.int64(0)
    top = np.zeros(num, np.int64)
    for e in range(value_E.size):
        value = value_E[e]
        if excluded_E[e] or value <= top[num - 1]:
            continue
        i = num - 1
        while i > 0 and top[i - 1] < value:
            top[i] = top[i - 1]
            i -= 1
        top[i] = value
    return top.sum()


@njit(nogil=True, cache=True)
def load_bound_rows(low, high, load_NE, base_NGB, node_G, node_only, redundant, bound_N):  # type: ignore[no-untyped-def]
    """Fills ``bound_N[low:high]``: rank g can serve at most its homes and the `redundant` largest experts it may copy, so the
    capped ranks together must reach the total; under `node_only` this holds inside every node."""
    G, B, E = base_NGB.shape[1], base_NGB.shape[2], load_NE.shape[1]
    num_domains = 1
    if node_only:
        for g in range(G):
            num_domains = max(num_domains, node_G[g] + 1)
    cap_G = np.zeros(G, np.int64)
    member_G = np.zeros(G, np.bool_)
    excluded_E = np.zeros(E, np.bool_)
    outside_E = np.zeros(E, np.bool_)
    num_slots = min(redundant, E)
    for n in range(low, high):
        best = 0
        for domain in range(num_domains):
            outside_E[:] = False
            total = 0
            for g in range(G):
                member_G[g] = not node_only or node_G[g] == domain
                for b in range(B):
                    if member_G[g]:
                        total += load_NE[n, base_NGB[n, g, b]]
                    else:
                        outside_E[base_NGB[n, g, b]] = True
            for g in range(G):
                if not member_G[g]:
                    continue
                home = 0
                excluded_E[:] = outside_E
                for b in range(B):
                    e = base_NGB[n, g, b]
                    home += load_NE[n, e]
                    excluded_E[e] = True
                cap_G[g] = home + _top_sum(load_NE[n], excluded_E, num_slots)
            best = max(best, _capped_fill(total, cap_G, member_G))
        bound_N[n] = best


@njit(nogil=True, cache=True)
def locality_bound_rows(low, high, load_NE, load_NGE, located, base_NGB, node_G, redundant, out_N2):  # type: ignore[no-untyped-def]
    """Fills ``out_N2[low:high]``: upper bounds on pairs served on their own rank, and inside their own node.

    A rank serves locally at most its own demand for its homes and for the `redundant` other experts it wants most; a node
    likewise with all its slots. Without source ranks (``located`` False) the cost model's constants are returned.
    """
    G, B, E = base_NGB.shape[1], base_NGB.shape[2], load_NE.shape[1]
    num_nodes = 0
    for g in range(G):
        num_nodes = max(num_nodes, node_G[g] + 1)
    ranks_V = np.zeros(num_nodes, np.int64)
    for g in range(G):
        ranks_V[node_G[g]] += 1
    demand_E = np.zeros(E, np.int64)
    home_E = np.zeros(E, np.bool_)
    for n in range(low, high):
        pairs = load_NE[n].sum()
        if not located:
            node_pairs = 0.0
            for node in range(num_nodes):
                node_pairs += pairs * (ranks_V[node] / G) * (ranks_V[node] / G)
            out_N2[n, 0] = pairs / G
            out_N2[n, 1] = node_pairs
            continue
        local = 0
        node_local = 0
        for node in range(num_nodes):
            # All demand of the node for its homes, and for the most wanted others that its slots can hold.
            demand_E[:] = 0
            home_E[:] = False
            for g in range(G):
                if node_G[g] != node:
                    continue
                for e in range(E):
                    demand_E[e] += load_NGE[n, g, e]
                for b in range(B):
                    home_E[base_NGB[n, g, b]] = True
            for e in range(E):
                if home_E[e]:
                    node_local += demand_E[e]
            node_local += _top_sum(demand_E, home_E, min(E, redundant * ranks_V[node]))
        for g in range(G):
            home_E[:] = False
            for b in range(B):
                e = base_NGB[n, g, b]
                home_E[e] = True
                local += load_NGE[n, g, e]
            demand_E[:] = load_NGE[n, g]
            local += _top_sum(demand_E, home_E, min(E, redundant))
        out_N2[n, 0] = local
        out_N2[n, 1] = node_local


def offset_fill_bound(pairs_N: Array, active_NG: Array, pair_s: float, slot_s: float) -> Array:
    """float64 [N]: least ``max_g(pair_s * load_g + slot_s * active_g)`` over all loads >= 0 that sum to `pairs_N`.

    Water-filling over ranks whose floor is ``slot_s * active_g``: home slots with load stay busy wherever tokens go.
    """
    floor_NG = np.sort(slot_s * active_NG, axis=1)
    filled_NG = np.arange(1, floor_NG.shape[1] + 1)
    level_NG = (pair_s * pairs_N[:, None] + np.cumsum(floor_NG, axis=1)) / filled_NG
    # The level of filling the k lowest floors is right where it reaches none of the floors above them.
    above_NG = np.concatenate([floor_NG[:, 1:], np.full((len(floor_NG), 1), np.inf)], axis=1)
    right_NG = level_NG <= above_NG
    first_N = right_NG.argmax(axis=1)
    level_N = np.take_along_axis(level_NG, first_N[:, None], axis=1)[:, 0]
    return np.maximum(level_N, floor_NG[:, -1])
