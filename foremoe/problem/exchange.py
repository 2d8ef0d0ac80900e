"""Seconds of an exchange per pair, in closed form around even load; `Rates` and the pack level price tokens with them.

Peer links, or the kernels on them, and RDMA work in parallel, so that an exchange takes as long as the busier of the two. Here
that is the one which is busier under even load.
"""

from typing import NamedTuple

import numpy as np

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.kernels.reached import alone, reached


class PairPrices(NamedTuple):
    """Seconds of one exchange, one way; a rank's own pairs are free.

    Attributes:
        peer_s: For every pair served on another rank of its node, of all ranks.
        rdma_s: For every pair served in another node, of all ranks.
        late_s: For every pair that the busiest rank serves above the mean: an exchange ends when its busiest rank is done.
    """

    peer_s: float
    rdma_s: float
    late_s: float


def pair_prices(model: Model, cluster: Cluster) -> PairPrices:
    """Returns the prices of an exchange of tokens whose sources and experts are spread evenly over ranks.

    Under ``"node"`` dispatch a token goes once to every node and every rank that serve it; see `reached`. Serving a pair nearer
    saves a message only if none of the token's other experts is there.
    """
    G = cluster.num_ranks
    share_V = np.bincount(cluster.node_of_rank_G) / G
    inside = float((share_V**2).sum())  # share of pairs that stay in their node
    peer_byte_s, rdma_byte_s = 1.0 / cluster.kernel_bytes_per_s, 1.0 / cluster.rdma_bytes_per_s_per_rank
    if cluster.dispatch == "pairs":
        peer, rdma = inside - 1.0 / G, 1.0 - inside  # bytes sent, by bytes of a rank's pairs
        peer_saved, rdma_saved, late = 1.0, 1.0, (inside - 1.0 / G, 1.0 - inside)
    else:
        K, E = model.num_topk, model.num_experts
        # A rank of a node of n receives over peer links all but 1/n of what other nodes send: that came to it by RDMA.
        forwarded = 1.0 - 1.0 / (inside * G)
        peer_saved, rdma_saved = alone(1.0 / G, K, E), sum(p * alone(p, K, E) for p in share_V.tolist())
        peer = forwarded * G * reached(1.0 / K, 1.0 / G, K, E)  # of the 1 / K tokens of a pair
        rdma = sum(reached(1.0 / K, p, K, E) * (1.0 - p) for p in share_V.tolist())
        late = forwarded * peer_saved, 0.0  # NICs are chosen by source: a busy rank has no more of its own to do
    if rdma * rdma_byte_s > peer * peer_byte_s:
        # Ranks of a NIC that are not the busiest leave it room.
        prices = PairPrices(0.0, rdma_saved * rdma_byte_s / G, late[1] / cluster.rdma_bytes_per_s)
    else:
        # A pair from another node needs no peer link where the rank that received its token serves it.
        crossing = forwarded * peer_saved * peer_byte_s if cluster.dispatch == "node" else 0.0
        prices = PairPrices(peer_saved * peer_byte_s / G, crossing / G, late[0] * peer_byte_s)
    return PairPrices(*(model.token_bytes * price for price in prices))
