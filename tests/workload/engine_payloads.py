"""Hypothesis routing, and how each rollout engine would send it; `torch` is None where there is none."""

import base64
import io

import numpy as np
from hypothesis import strategies as st

try:
    import torch
except ModuleNotFoundError:
    torch = None


@st.composite
def routings(draw, max_topk=4, max_tokens=9):
    """(topk_TLK of one sequence with distinct experts and no all-zero token, num_experts, moe_layer_L, layers of the model)."""
    E = draw(st.sampled_from([5, 64, 200, 300, 1000]))
    K = draw(st.integers(2, max_topk))
    all_layers = draw(st.integers(1, 4))
    moe = sorted(draw(st.sets(st.integers(0, all_layers - 1), min_size=1, max_size=all_layers)))
    all_layers = moe[-1] + 1
    T = draw(st.integers(2, max_tokens))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    return distinct(rng, (T, len(moe)), E, K), E, moe, all_layers


def distinct(rng, shape, E, K):
    """int64 [*shape, K] of distinct experts."""
    return np.argsort(rng.random((*shape, E)), axis=-1)[..., :K]


def spread(topk_TLK, moe, all_layers, fill=0):
    """Rows of all layers; what dense layers hold must not matter."""
    out = np.full((len(topk_TLK), all_layers, topk_TLK.shape[2]), fill, topk_TLK.dtype)
    out[:, moe] = topk_TLK
    return out


def b64(data):
    return base64.b64encode(data).decode()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def narrow(num_experts, wide=np.uint16):
    """The smallest of the dtypes that engines use on the wire."""
    return np.uint8 if num_experts <= 256 else wide
