"""Time of work besides GEMMs and scores, divided into a part per token and a part per (token, expert) pair."""

from typing import NamedTuple

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model


class ElementShares(NamedTuple):
    """Shares of `Cluster.element_overhead_s` in an MoE layer. The rest is for residuals, attention inputs, router and sums."""

    norms: float
    activation: float  # of the experts
    moved: float  # gathering and scattering pairs


def element_shares(model: Model) -> ElementShares:
    """Returns the shares, computed from the number of bytes that each part reads and writes.

    In units of a token's width, the two norms take 4 and the two residuals 6. Queries, keys and values take 4, the router 1, and
    the sum of experts 1. For each of the K experts, the gather takes 2, the addition 1, and the activation three times the
    expert's width.
    """
    activation, moved = 3.0 * model.num_topk * model.ffn_size / model.hidden_size, 3.0 * model.num_topk
    every = 16.0 + activation + moved
    return ElementShares(4.0 / every, activation / every, moved / every)


def token_element_seconds(model: Model, cluster: Cluster) -> float:
    """Returns the time in seconds that a token adds to a forward pass on its own rank, not counting GEMMs and scores."""
    shares = element_shares(model)
    return (1.0 - shares.activation - shares.moved) * model.hidden_size * cluster.element_overhead_s


def pair_overhead_seconds(model: Model, cluster: Cluster) -> float:
    """Returns the time in seconds that a pair adds to a forward pass on the rank that serves it, not counting GEMMs."""
    shares = element_shares(model)
    element_s = (shares.activation + shares.moved) * model.hidden_size / model.num_topk * cluster.element_overhead_s
    return cluster.pair_overhead_s + element_s
