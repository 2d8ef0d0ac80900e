"""Sums of outer products, slot by slot, in one kernel by Triton: weight gradients of many slots, each added to its own total."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from foremoe.runtime.fused import launch

# Letters: Y pairs that a rank serves, sorted by slot; S slots; I, O rows and columns of a matrix.

_TILE = {"TILE_I": 128, "TILE_O": 128, "PAIRS": 64}
_OPTIONS = {"num_warps": 4, "num_stages": 3}


def even_runs(tensor_S: Sequence[torch.Tensor | None]) -> list[tuple[int, int, int]]:
    """Cuts slots into runs (first, behind the last, distance in elements) whose tensors lie at equal distances in one memory."""
    place_S = [None if t is None else (t.untyped_storage().data_ptr(), int(t.storage_offset())) for t in tensor_S]
    found, first = list[tuple[int, int, int]](), 0
    while first < len(place_S):
        last, stride, here = first + 1, 0, place_S[first]
        while here is not None and last < len(place_S):
            behind = place_S[last]
            if behind is None or behind[0] != here[0] or (step := behind[1] - here[1]) <= 0 or step != (stride or step):
                break
            last, stride, here = last + 1, step, behind
        found.append((first, last, stride))
        first = last
    return found


def add_products(
    total_IO: torch.Tensor, stride: int, left_YI: torch.Tensor, right_YO: torch.Tensor, end_S: torch.Tensor, begin: int
) -> None:
    """``total[s] += left[pairs of s].T @ right[pairs of s]``, in float32, for slots whose totals lie `stride` elements apart.

    Args:
        total_IO: float32, of the first slot.
        end_S: int32 on the device, where pairs of slots end in `left_YI` and `right_YO`, bf16 or fp16.
        begin: Where those of the first slot begin.
    """
    (I, O), S = total_IO.shape, len(end_S)  # noqa: E741
    tiles_I, tiles_O = -(-I // _TILE["TILE_I"]), -(-O // _TILE["TILE_O"])
    tensors = (left_YI.contiguous(), right_YO.contiguous(), total_IO, end_S)
    launch(_kernel(), (S * tiles_I * tiles_O,), *tensors, begin, stride, I, O, tiles_I, tiles_O, **_TILE, **_OPTIONS)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def add(  # type: ignore[no-untyped-def]
        left, right, total, end_of, begin, stride, num_i, num_o, tiles_I, tiles_O,
        TILE_I: tl.constexpr, TILE_O: tl.constexpr, PAIRS: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(0)
        slot = tile // (tiles_I * tiles_O)
        i = tile // tiles_O % tiles_I * TILE_I + tl.arange(0, TILE_I)
        o = tile % tiles_O * TILE_O + tl.arange(0, TILE_O)
        if slot > 0:
            begin = tl.load(end_of + slot - 1)
        end = tl.load(end_of + slot)
        if begin < end:
            sums = tl.zeros((TILE_I, TILE_O), tl.float32)
            for first in range(begin, end, PAIRS):
                pair = first + tl.arange(0, PAIRS)
                is_left, is_right = (pair < end)[:, None] & (i < num_i)[None, :], (pair < end)[:, None] & (o < num_o)[None, :]
                row = pair[:, None].to(tl.int64)
                a = tl.load(left + row * num_i + i[None, :], mask=is_left, other=0.0)
                b = tl.load(right + row * num_o + o[None, :], mask=is_right, other=0.0)
                sums = tl.dot(tl.trans(a), b, sums)
            place = total + slot.to(tl.int64) * stride + i[:, None].to(tl.int64) * num_o + o[None, :]
            inside = (i < num_i)[:, None] & (o < num_o)[None, :]
            tl.store(place, tl.load(place, mask=inside, other=0.0) + sums, mask=inside)

    return add
