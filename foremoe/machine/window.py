"""Seconds of what precedes the experts of a layer, on one rank and in one forward pass."""

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model


def window_seconds(model: Model, cluster: Cluster, tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike) -> Array:
    """Attention, shared experts, and all else that every token takes.

    Args:
        tokens: Number of tokens, any shape.
        sum_len_sq: Sum of the squared sequence lengths, a shape that broadcasts with it.

    Returns:
        float64 of the common shape.
    """
    tokens_f = np.asarray(tokens, np.float64)
    if cluster.score_flops_per_s is None:
        attention_s = model.attention_flops(tokens_f, sum_len_sq) / cluster.attention_flops_per_s
    else:
        scores_s = model.attention_flops(0.0, sum_len_sq) / cluster.score_flops_per_s
        attention_s = model.attention_flops(tokens_f, 0.0) / cluster.attention_flops_per_s + scores_s
    shared_s = 2.0 * model.shared_params / cluster.expert_flops_per_s
    element_s = model.hidden_size * cluster.element_overhead_s
    return np.asarray(attention_s + (shared_s + element_s) * tokens_f + cluster.layer_overhead_s)
