"""Selective recompute: what backward runs again of a layer's forward, in seconds."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model

# What may be recomputed: norms; the experts' activation; shared experts; scores and values; all of the experts' side.
PARTS = ("layernorm", "moe_act", "mlp", "core_attn", "moe")


def element_shares(model: Model) -> tuple[float, float, float]:
    """Shares of `Cluster.element_overhead_s`: norms, the experts' activation, and moving pairs, by bytes read and written.

    In widths of a token: two norms 4, two residuals 6, queries, keys and values 4, the router 1, the sum of experts 1; for each
    of K experts 2 to gather, 1 to add up, and three times the expert's width.
    """
    activation = 3.0 * model.num_topk * model.ffn_size / model.hidden_size
    moved = 3.0 * model.num_topk + 1.0
    every = 15.0 + moved + activation
    return 4.0 / every, activation / every, moved / every


def recompute_seconds(
    model: Model, cluster: Cluster, parts: Collection[str], tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike
) -> Array:
    """Seconds that one layer's backward takes longer on a rank with an even share of pairs; exchanges are not in it.

    Args:
        parts: Of `PARTS`; others take no time here.
        tokens: Number of tokens, any shape.
        sum_len_sq: Sum of the squared sequence lengths, a shape that broadcasts with it.
    """
    tokens_f = np.asarray(tokens, np.float64)
    norms, activation, moved = element_shares(model)
    again = norms * ("layernorm" in parts) + activation * ("moe_act" in parts or "moe" in parts) + moved * ("moe" in parts)
    params = model.shared_params * ("mlp" in parts or "moe" in parts) + model.num_topk * model.expert_params * ("moe" in parts)
    token_s = again * model.hidden_size * cluster.element_overhead_s + 2.0 * params / cluster.expert_flops_per_s
    scores = model.attention_flops(0.0, sum_len_sq) * ("core_attn" in parts)
    return np.asarray(token_s * tokens_f + scores / (cluster.score_flops_per_s or cluster.attention_flops_per_s))
