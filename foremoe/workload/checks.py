"""Functions that check the counts of a workload."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, frozen_array, require_non_negative
from foremoe.base.errors import InputError

if TYPE_CHECKING:
    from foremoe.workload.workload import Workload

# Letters: M micro-steps, L MoE layers, G ranks, E experts.


def checked_load(value: npt.ArrayLike) -> Array:
    """Returns the counts of pairs as int32 [M, L, G, E]. Raises InputError if an axis is empty."""
    load_MLGE = frozen_array(value, np.int32, "load_MLGE", (None, None, None, None))
    if 0 in load_MLGE.shape:
        raise InputError(f"load_MLGE [micro-steps, layers, ranks, experts] has an empty axis: {list(load_MLGE.shape)}.")
    require_non_negative(load_MLGE, "load_MLGE")
    return load_MLGE


def check_pairs(work: Workload) -> None:
    """Raises InputError if a rank has more pairs than its tokens allow, or a micro-step has more than its known tokens allow."""
    pairs_MLG = work.load_MLGE.sum(axis=3, dtype=np.int64)
    limit_MG = work.num_topk * work.tokens_MG.astype(np.int64)
    over_MLG = pairs_MLG > limit_MG[:, None]
    if over_MLG.any():
        m, layer, g = np.argwhere(over_MLG)[0]
        row = f"micro-step {m}, layer {layer}, rank {g} counts {pairs_MLG[m, layer, g]} pairs"
        most = f"its {work.tokens_MG[m, g]} tokens make at most {limit_MG[m, g]} at top-{work.num_topk}"
        raise InputError(f"{row} but {most}; correct num_topk or tokens_MG.")
    short_ML = pairs_MLG.sum(axis=2) > work.num_topk * (work.tokens_MG.sum(axis=1, dtype=np.int64)[:, None] - work.unknown_ML)
    if short_ML.any():
        m, layer = np.argwhere(short_ML)[0]
        row = f"micro-step {m}, layer {layer} counts {pairs_MLG[m, layer].sum()} pairs"
        most = f"more than its tokens make without the {work.unknown_ML[m, layer]} unknown ones"
        raise InputError(f"{row}, {most}; correct unknown_ML.")


def check_balance(pairs_ML: Array, tokens_M: Array, unknown_ML: Array, num_topk: int) -> None:
    """Raises InputError unless every micro-step and layer has num_topk * (tokens - unknown) pairs."""
    wrong_ML = pairs_ML != num_topk * (tokens_M[:, None] - unknown_ML)
    if wrong_ML.any():
        m, layer = np.argwhere(wrong_ML)[0]
        row, unknown = f"micro-step {m}, layer {layer} counts {pairs_ML[m, layer]} pairs", unknown_ML[m, layer]
        made = f"its {tokens_M[m]} tokens, {unknown} of them unknown, make {num_topk * (tokens_M[m] - unknown)}"
        raise InputError(f"{row} but {made} at top-{num_topk}; correct num_topk or tokens_MG, or give unknown_ML.")


def require_below(array: Array, limit: int, name: str) -> None:
    """Raises InputError unless every number in `array` is at least -1 and less than `limit`."""
    if array.size and (array.min() < -1 or array.max() >= limit):
        raise InputError(f"{name} holds numbers from {array.min()} to {array.max()}; they must lie in [-1, {limit}).")
