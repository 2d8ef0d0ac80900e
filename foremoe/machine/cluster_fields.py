"""Ranges and defaults of a `Cluster`'s fields, and the order of its nodes."""

from functools import partial

import numpy as np

from foremoe.base import fields
from foremoe.base.arrays import Array, frozen_array
from foremoe.base.errors import InputError

# Plans store ranks as int16.
MAX_RANKS = int(np.iinfo(np.int16).max)
NODE_SIZE = 8
CHECKS = (
    (fields.text, ("name", "source", "precision")),
    (partial(fields.whole, high=MAX_RANKS), ("num_ranks", "nic_sharing")),
    (partial(fields.whole, high=65536), ("tile_pairs",)),
    (partial(fields.whole, high=fields.MAX_WHOLE), ("memory_bytes",)),
    (fields.real, ("flops_per_s", "peer_bytes_per_s", "rdma_bytes_per_s", "exchange_bytes_per_s", "memory_bytes_per_s")),
    (fields.real, ("plain_bytes_per_s", "return_bytes_per_s", "score_flops_per_s")),
    (fields.real, ("backward_ratio", "attention_backward_ratio")),
    (partial(fields.real, open_low=False), ("residual",)),
    (partial(fields.real, high=1.0), ("compute_efficiency", "attention_efficiency")),
    (partial(fields.real, open_low=False), ("slot_overhead_s", "layer_overhead_s", "pair_overhead_s")),
    (partial(fields.real, open_low=False), ("element_overhead_s", "host_layer_s", "slot_backward_s")),
    (partial(fields.real, open_low=False), ("planned_layer_s", "planned_token_s")),
    (partial(fields.real, open_low=False), ("host_bytes_per_s", "peer_latency_s", "rdma_latency_s", "host_latency_s")),
    (partial(fields.real, high=1.0, open_low=False), ("copy_contention",)),
    (fields.flag, ("calibrated",)),
)
# Ways of sending tokens to their experts.
DISPATCHES = ("pairs", "node")
# Fields left out of tables if they have their default: fields that only a fit or a newer version knows, and the dispatch.
OPTIONAL = (
    "dispatch", "attention_efficiency", "backward_ratio", "attention_backward_ratio", "layer_overhead_s", "pair_overhead_s",
    "residual", "precision", "tile_pairs", "element_overhead_s", "host_layer_s", "slot_backward_s",
    "planned_layer_s", "planned_token_s",
)  # fmt: skip


def nodes_in_order(num_ranks: int, ranks_per_node: int) -> Array:
    """Returns int32 [G], the node of each rank if ranks fill one node after the other. The last node may be smaller."""
    num_ranks = fields.whole(num_ranks, "num_ranks", 1, MAX_RANKS)
    ranks_per_node = fields.whole(ranks_per_node, "ranks_per_node", 1, MAX_RANKS)
    return np.arange(num_ranks, dtype=np.int32) // np.int32(ranks_per_node)


def checked_nodes(node_of_rank_G: Array | None, num_ranks: int) -> Array:
    """Returns the node of each rank, int32 [G], read-only. None stands for nodes of `NODE_SIZE` ranks, filled in order."""
    given = nodes_in_order(num_ranks, NODE_SIZE) if node_of_rank_G is None else node_of_rank_G
    node_of_rank_G = frozen_array(given, np.int32, "node_of_rank_G")
    if node_of_rank_G.shape != (num_ranks,):
        shape = list(node_of_rank_G.shape)
        raise InputError(f"num_ranks is {num_ranks} but node_of_rank_G has shape {shape}; give one node per rank.")
    used = np.unique(node_of_rank_G)
    if used[0] != 0 or used[-1] != len(used) - 1:
        numbers = f"{len(used)} nodes numbered from {used[0]} to {used[-1]}"
        raise InputError(f"node_of_rank_G uses {numbers}; number them 0 to {len(used) - 1}.")
    return node_of_rank_G
