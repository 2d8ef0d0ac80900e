"""Time of an exchange per pair, in closed form for nearly even loads. `Rates` and the pack level use it to price tokens.

Peer links (or the kernels that use them) and RDMA links work in parallel, so an exchange takes as long as the busier of the two.
This module prices only the kind of link that is busier if the load is even.
"""

from typing import NamedTuple

import numpy as np

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.kernels.reached import alone, reached


class PairPrices(NamedTuple):
    """Times in seconds that pairs add to one exchange in one direction. Pairs that a rank serves for itself add none.

    Attributes:
        peer_s: Time for every pair served on another rank of its node, counted over all ranks.
        rdma_s: Time for every pair served in another node, counted over all ranks.
        late_s: Time for every pair that the busiest rank serves above the mean, because an exchange ends when this rank is done.
    """

    peer_s: float
    rdma_s: float
    late_s: float


def pair_prices(model: Model, cluster: Cluster) -> PairPrices:
    """Returns the prices of an exchange of tokens whose sources and experts are spread evenly over ranks.

    With ``"node"`` dispatch, a token is sent once to every node and once to every rank that serves it (see `reached`). Serving
    one of its pairs nearby saves a message only if the far node or rank serves no other pair of that token.
    """
    G = cluster.num_ranks
    share_V = np.bincount(cluster.node_of_rank_G) / G
    inside = float((share_V**2).sum())  # share of pairs that stay in their node
    peer_byte_s, rdma_byte_s = 1.0 / cluster.kernel_bytes_per_s, 1.0 / cluster.rdma_bytes_per_s_per_rank
    if cluster.dispatch == "pairs":
        peer, rdma = inside - 1.0 / G, 1.0 - inside  # bytes sent, divided by the bytes of a rank's pairs
        peer_saved, rdma_saved, late = 1.0, 1.0, (inside - 1.0 / G, 1.0 - inside)
    else:
        K, E = model.num_topk, model.num_experts
        # Over peer links, a rank in a node of n ranks receives all but 1/n of the tokens from other nodes. It got 1/n by RDMA.
        forwarded = 1.0 - 1.0 / (inside * G)
        peer_saved, rdma_saved = alone(1.0 / G, K, E), sum(p * alone(p, K, E) for p in share_V.tolist())
        peer = forwarded * G * reached(1.0 / K, 1.0 / G, K, E)  # a pair is 1 / K of a token
        rdma = sum(reached(1.0 / K, p, K, E) * (1.0 - p) for p in share_V.tolist())
        late = forwarded * peer_saved, 0.0  # NICs are chosen by source, so a busy rank has no more RDMA traffic
    if rdma * rdma_byte_s > peer * peer_byte_s:
        # Ranks of the same NIC that are less busy leave bandwidth to the busiest.
        prices = PairPrices(0.0, rdma_saved * rdma_byte_s / G, late[1] / cluster.rdma_bytes_per_s)
    else:
        # A pair from another node needs no peer link if the rank that received its token also serves it.
        crossing = forwarded * peer_saved * peer_byte_s if cluster.dispatch == "node" else 0.0
        prices = PairPrices(peer_saved * peer_byte_s / G, crossing / G, late[0] * peer_byte_s)
    return PairPrices(*(model.token_bytes * price for price in prices))
