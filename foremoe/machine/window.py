"""Times of one rank in one forward pass, for attention and other work before a layer's experts, and for dense layers."""

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.elements import token_element_seconds
from foremoe.machine.model import Model


def window_seconds(model: Model, cluster: Cluster, tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike) -> Array:
    """Returns the seconds that a rank spends on its own tokens, for attention, shared experts and other work before the experts.

    Args:
        tokens: Numbers of tokens, an array of any shape.
        sum_len_sq: Sums of the squared sequence lengths. Their shape must broadcast with that of `tokens`.

    Returns:
        float64 array of the common shape.
    """
    element_s = token_element_seconds(model, cluster)
    return _seconds(model, cluster, tokens, sum_len_sq, model.shared_params, element_s)


def dense_layer_seconds(model: Model, cluster: Cluster, tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike) -> Array:
    """Returns the seconds of a whole dense layer, or 0 if its width is not known. The arguments are those of `window_seconds`."""
    if not model.dense_ffn_size:
        return np.zeros(np.broadcast_shapes(np.shape(tokens), np.shape(sum_len_sq)))
    params = model.num_matrices * model.hidden_size * model.dense_ffn_size
    return _seconds(model, cluster, tokens, sum_len_sq, params, model.hidden_size * cluster.element_overhead_s)


def _seconds(
    model: Model, cluster: Cluster, tokens: npt.ArrayLike, sum_len_sq: npt.ArrayLike, mlp_params: int, element_s: float
) -> Array:
    tokens_f = np.asarray(tokens, np.float64)
    if cluster.score_flops_per_s is None:
        attention_s = model.attention_flops(tokens_f, sum_len_sq) / cluster.attention_flops_per_s
    else:
        scores_s = model.attention_flops(0.0, sum_len_sq) / cluster.score_flops_per_s
        attention_s = model.attention_flops(tokens_f, 0.0) / cluster.attention_flops_per_s + scores_s
    mlp_s = 2.0 * mlp_params / cluster.expert_flops_per_s
    return np.asarray(attention_s + (mlp_s + element_s) * tokens_f + cluster.layer_overhead_s)
