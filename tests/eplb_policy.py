"""The published policy of DeepSeek's expert-parallel load balancer in readable numpy: what `Eplb`'s kernel is compared with."""

import numpy as np

# Letters: L layers, P physical slots, E experts, I items and K packs of a packing, C groups of experts.

# Its published example: loads, and the expert in every slot.
PUBLISHED_LOAD = [
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_PLACES = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def rebalance(load_LE, num_physical, num_groups, num_nodes, num_ranks):
    """Replicates hot experts and packs the copies onto ranks, layer by layer.

    Where groups do not divide over nodes, all ranks count as one node and all experts as one group.

    Returns:
        The expert in every slot, int64 [L, P].
    """
    load_LE = np.asarray(load_LE).astype(np.float64)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    return np.stack([_place(load_E, num_physical, num_groups, num_nodes, num_ranks) for load_E in load_LE])


def _pack(weight_I, num_packs):
    """Heaviest first, each item to the lightest pack with room; every pack gets equally many.

    Returns:
        pack of each item and its place in it. Packs of one item take the items in order.
    """
    room = len(weight_I) // num_packs
    if room == 1:
        return np.arange(num_packs), np.zeros(num_packs, np.int64)
    pack_I, place_I = np.empty((2, len(weight_I)), np.int64)
    weight_K, count_K = np.zeros(num_packs), np.zeros(num_packs, np.int64)
    for item in np.argsort(-weight_I, kind="stable"):
        pack = np.argmin(np.where(count_K < room, weight_K, np.inf))
        pack_I[item], place_I[item] = pack, count_K[pack]
        weight_K[pack] += weight_I[item]
        count_K[pack] += 1
    return pack_I, place_I


def _replicate(load_E, num_copies):
    """One copy of every expert, then again and again one more of the expert with the most load per copy.

    Returns:
        expert of each copy.
    """
    expert_X = np.arange(num_copies)
    count_E = np.ones(len(load_E), np.int64)
    for x in range(len(load_E), num_copies):
        e = np.argmax(load_E / count_E)
        expert_X[x] = e
        count_E[e] += 1
    return expert_X


def _place(load_E, num_physical, num_groups, num_nodes, num_ranks):
    """One layer: the expert in every physical slot. Groups divide over nodes."""
    group = len(load_E) // num_groups
    # Step 1: pack groups to nodes.
    node_C, place_C = _pack(load_E.reshape(num_groups, group).sum(axis=1), num_nodes)
    order_C = np.lexsort((place_C, node_C))
    expert_P = np.empty(num_physical, np.int64)
    per_node = num_physical // num_nodes
    for node, groups in enumerate(order_C.reshape(num_nodes, -1)):
        local_E = (groups[:, None] * group + np.arange(group)).ravel()
        # Step 2: replicate experts inside the node.
        expert_X = _replicate(load_E[local_E], per_node)
        share_X = (load_E[local_E] / np.bincount(expert_X))[expert_X]
        # Step 3: pack copies to the node's ranks.
        rank_X, place_X = _pack(share_X, num_ranks // num_nodes)
        slot_X = node * per_node + rank_X * (num_physical // num_ranks) + place_X
        expert_P[slot_X] = local_E[expert_X]
    return expert_P
