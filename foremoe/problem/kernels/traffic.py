"""Traffic: the pairs that every rank of a row serves, sends and receives, updated incrementally.

The part of one expert can be removed, changed and added again. The time for this depends on the number of ranks that hold the
expert and on their nodes, but not on the other experts. All sums except messages under ``"node"`` dispatch are whole numbers, so
a part that is removed and added again leaves them exactly as they were.
"""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel

# Letters: G ranks, V nodes, P = G + V places (ranks, then nodes), E experts, X sums, H holders, I some ranks or places.

# First axis of `Traffic.sum_XG`, summed by rank. RDMA is summed by NIC, except FAR_COPIES, the RDMA copies from or to a rank.
PAIRS, PADDED, BUSY, PEER_OUT, PEER_IN, RDMA_OUT, RDMA_IN = range(7)
COPY_OUT, COPY_IN, RDMA_COPY_OUT, RDMA_COPY_IN, FAR_COPIES = range(7, 12)
NUM_SUMS = 12
# Kinds of dispatch. With SPREAD, sources are unknown, and each rank is assumed to send an equal part of every expert's pairs.
BY_PAIR, BY_NODE, SPREAD_BY_PAIR, SPREAD_BY_NODE = range(4)


class Ranks(NamedTuple):
    """The ranks of a cluster, with the kind of dispatch between them."""

    node_G: Array
    order_G: Array  # ranks, node by node, in ascending order in a node
    first_V: Array  # start of each node in `order_G`, and the end
    nic_G: Array
    num_nics: int
    forward_VG: Array  # rank that a message of rank g reaches first in node v; in its own node, g itself
    travel: int
    num_topk: int
    tile: int  # number of pairs in a tile; the pairs of an expert on a rank are computed in whole tiles


class Row(NamedTuple):
    """The data of a row that do not depend on the placement."""

    load_EG: Array  # int32, pairs of an expert by the source of their tokens
    demand_VE: Array
    pairs_G: Array  # float64, pairs of every source
    tokens_G: Array  # float64, tokens of every source
    scale_G: Array  # float64, number of experts divided by `pairs_G`, or 0
    load_E: Array
    home_E: Array  # home rank of every expert
    ranks: Ranks


class Messages(NamedTuple):
    """The flow of a row's pairs and the messages that result from it."""

    flow_GG: Array  # int64, pairs of a source (second axis) that a rank serves
    came_2PG: Array  # float64, messages of a source to a place, after two settlings
    side_P: Array  # int64, which of the two is the last
    stale_G: Array  # bool, ranks whose flow has changed since the last settling
    stale_I: Array  # int64, these ranks
    stale_V: Array  # bool, their nodes; all False outside of `settle`
    place_I: Array  # int64, places that the last settling changed
    num_2: Array  # int64, lengths of `stale_I` and `place_I`
    kept_GG: Array  # int64, flow before the change, for ranks in `stale_I` or `place_I`
    rest_G: Array  # int32, scratch: pairs of one expert that sources still have
    room_G: Array  # int64, scratch: pairs of the expert that its holders can still take
    holder_H: Array  # int64, scratch: the holders in ascending order
    pairs_G: Array  # int64, scratch: pairs of every source that a node serves
    held_G: Array  # float64, scratch


class Traffic(NamedTuple):
    """A placement of a row and the traffic that results from it."""

    quota_EG: Array  # int32, pairs of an expert that a rank serves
    holder_EG: Array  # int64, ranks that hold an expert: its home, then its replicas in any order
    num_E: Array  # int64, number of those ranks
    sum_XG: Array  # float64
    kept_XG: Array  # float64, the sums of links that `keep` noted
    messages: Messages  # only for node dispatch


@kernel
def empty_traffic(num_experts, num_ranks, num_nodes, num_nics, by_node):
    """Returns a traffic in which no expert has been placed yet."""
    E, G, L = num_experts, num_ranks, max(num_ranks, num_nics)
    (G_, V_) = (G, num_nodes) if by_node else (0, 0)
    P = G_ + V_
    messages = Messages(
        np.zeros((G_, G_), np.int64), np.zeros((2, P, G_)), np.zeros(P, np.int64), np.zeros(G_, np.bool_), np.empty(G_, np.int64),
        np.zeros(V_, np.bool_), np.empty(P, np.int64), np.zeros(2, np.int64), np.zeros((G_, G_), np.int64),
        np.empty(G_, np.int32), np.empty(G_, np.int64), np.empty(G_, np.int64), np.empty(G_, np.int64), np.empty(G_),
    )  # fmt: skip
    return Traffic(
        np.zeros((E, G), np.int32), np.zeros((E, G), np.int64), np.zeros(E, np.int64), np.zeros((NUM_SUMS, L)),
        np.zeros((4, L)), messages,
    )  # fmt: skip
