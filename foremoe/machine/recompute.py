"""Time of selective recomputation, in which the backward pass runs parts of the forward pass again."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.elements import element_shares
from foremoe.machine.model import Model

# Parts that can be recomputed: norms, the experts' activation, shared experts, scores and values, and everything in the experts.
PARTS = ("layernorm", "moe_act", "mlp", "core_attn", "moe")


def recompute_seconds(
    model: Model, cluster: Cluster, parts: Collection[str], tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike
) -> Array:
    """Returns the seconds that recomputation adds to a layer's backward pass, without exchanges and with balanced ranks.

    Args:
        parts: Names of the recomputed parts, from `PARTS`. Other names add no time.
        tokens: Numbers of tokens, an array of any shape.
        sum_len_sq: Sums of the squared sequence lengths. Their shape must broadcast with that of `tokens`.
    """
    tokens_f = np.asarray(tokens, np.float64)
    norms, activation, moved = element_shares(model)
    again = norms * ("layernorm" in parts) + activation * ("moe_act" in parts or "moe" in parts) + moved * ("moe" in parts)
    params = model.shared_params * ("mlp" in parts or "moe" in parts) + model.num_topk * model.expert_params * ("moe" in parts)
    token_s = again * model.hidden_size * cluster.element_overhead_s + 2.0 * params / cluster.expert_flops_per_s
    scores = model.attention_flops(0.0, sum_len_sq) * ("core_attn" in parts)
    return np.asarray(token_s * tokens_f + scores / (cluster.score_flops_per_s or cluster.attention_flops_per_s))
