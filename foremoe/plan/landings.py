"""Landings: the copies that the buffers of a rank hold, and the uses until which the buffers hold each copy."""

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.plan.transfers import TransferList

# Letters: C copies, D demands (an expert that a rank reads in a use).


def until(t: TransferList) -> Array:
    """Returns int64 [C], the last use for which each copy is certain to be in its buffer. A later copy may overwrite it then."""
    order_C = order_of(t.dst_C, t.buffer_C, t.need_C)
    this_C, next_C = order_C[:-1], order_C[1:]
    same = (t.dst_C[this_C] == t.dst_C[next_C]) & (t.buffer_C[this_C] == t.buffer_C[next_C])
    until_C = np.full(len(t), np.iinfo(np.int64).max)
    until_C[this_C[same]] = t.after_C[next_C[same]]
    return until_C


def latest(t: TransferList, rank_D: Array, layer_D: Array, expert_D: Array, use_D: Array) -> Array:
    """Returns int64 [D], the last copy of an expert to a rank for use `use_D` or an earlier use, or -1 if there is none."""
    num, span, wanted = len(t), 1, (rank_D, layer_D, expert_D, use_D)
    key_X: Array = np.zeros(num + len(rank_D), np.int64)
    for pair in zip((t.dst_C, t.layer_C, t.expert_C, t.need_C), wanted, strict=True):
        column_X = np.concatenate(pair).astype(np.int64) + 1
        span = int(column_X.max(initial=0)) + 1
        key_X = key_X * span + column_X
    if not num:
        return np.full(len(rank_D), -1)
    order_C = np.argsort(key_X[:num], kind="stable")
    last_D = np.searchsorted(key_X[order_C], key_X[num:], side="right") - 1
    copy_D = order_C[last_D]
    found_D = (last_D >= 0) & (key_X[copy_D] // span == key_X[num:] // span)
    return np.where(found_D, copy_D, -1)
