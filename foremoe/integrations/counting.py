"""Counting routing into pairs per expert."""

from __future__ import annotations

from typing import Any

import numpy as np

from foremoe.arrays import Array
from foremoe.errors import InputError

# Letters: T tokens, L layers, K top-k, E experts.


def count_pairs(topk_TLK: Any, num_experts: int) -> Array:
    """int32 [L, E]: pairs of each expert. -1 is an expert that is not known and counts nowhere.

    Args:
        topk_TLK: integers, numpy or torch.

    Raises:
        InputError: another shape, or experts out of range.
    """
    topk = np.asarray(topk_TLK)
    if topk.ndim != 3 or topk.dtype.kind not in "iu":
        raise InputError(f"routing must be whole numbers [tokens, layers, top-k]; got {topk.dtype} of shape {list(topk.shape)}.")
    if topk.size and (int(topk.min()) < -1 or int(topk.max()) >= num_experts):
        raise InputError(f"routing holds experts {topk.min()} to {topk.max()}; there are {num_experts}, from 0.")
    _, L, _ = topk.shape
    flat = topk.transpose(1, 0, 2).reshape(L, -1).astype(np.int64)
    key = np.where(flat >= 0, flat + np.arange(L)[:, None] * num_experts, L * num_experts)
    return np.bincount(key.reshape(-1), minlength=L * num_experts + 1)[:-1].reshape(L, num_experts).astype(np.int32)
