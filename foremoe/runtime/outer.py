"""Triton kernel that sums outer products for each slot. It adds the weight gradients of many slots to their totals at once."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from foremoe.runtime.fused import launch
from foremoe.transfer.base import Tensors

# Letters: Y pairs that a rank serves, sorted by slot; S slots; I, O rows and columns of a matrix.

_TILE = {"TILE_I": 128, "TILE_O": 128, "PAIRS": 64}
_OPTIONS = {"num_warps": 4, "num_stages": 3}


def even_runs(tensors_S: Sequence[Tensors | None]) -> list[tuple[int, int, list[int]]]:
    """Cuts slots into runs whose tensors are equally spaced in memory.

    Returns:
        For each run, its first slot, the slot after its last one, and for each tensor the distance in elements between
        neighbouring slots.
    """
    place_S = [None if tensors is None else [tensor.data_ptr() for tensor in tensors] for tensors in tensors_S]
    found, first = list[tuple[int, int, list[int]]](), 0
    while first < len(place_S):
        here, tensors, last = place_S[first], tensors_S[first] or (), first + 1
        steps, most = [0] * len(tensors), first
        if here is not None and last < len(place_S) and (behind := place_S[last]) is not None:
            steps = [there - at for at, there in zip(here, behind, strict=True)]
            if min(steps) > 0:
                memories = [tensor.untyped_storage() for tensor in tensors]
                room = [m.data_ptr() + m.nbytes() - at - t.nbytes for m, at, t in zip(memories, here, tensors, strict=True)]
                most = first + min(space // step for space, step in zip(room, steps, strict=True))
        while here is not None and last <= most and last < len(place_S):
            here = [at + step for at, step in zip(here, steps, strict=True)]
            if place_S[last] != here:
                break
            last += 1
        strides = [step // tensor.element_size() if last - first > 1 else 0 for step, tensor in zip(steps, tensors, strict=True)]
        found.append((first, last, strides))
        first = last
    return found


def add_products(total_SIO: torch.Tensor, left_YI: torch.Tensor, right_YO: torch.Tensor, end_S: torch.Tensor) -> None:
    """Adds ``left[pairs of s].T @ right[pairs of s]`` to ``total[s]`` for every slot s, in float32.

    Args:
        total_SIO: Totals in float32, with any stride between slots.
        left_YI: Left factors in bf16 or fp16.
        right_YO: Right factors in bf16 or fp16.
        end_S: Position in both factors where each slot's pairs end, int32 on the device.
    """
    S, I, O = total_SIO.shape  # noqa: E741
    tiles_I, tiles_O = -(-I // _TILE["TILE_I"]), -(-O // _TILE["TILE_O"])
    tensors = (left_YI.contiguous(), right_YO.contiguous(), total_SIO[0], end_S)
    launch(_kernel(), (S * tiles_I * tiles_O,), *tensors, total_SIO.stride(0), I, O, tiles_I, tiles_O, **_TILE, **_OPTIONS)


@functools.cache
def _kernel() -> Any:
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def add(  # type: ignore[no-untyped-def]
        left, right, total, end_of, stride, num_i, num_o, tiles_I, tiles_O,
        TILE_I: tl.constexpr, TILE_O: tl.constexpr, PAIRS: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(0)
        slot = tile // (tiles_I * tiles_O)
        i = tile // tiles_O % tiles_I * TILE_I + tl.arange(0, TILE_I)
        o = tile % tiles_O * TILE_O + tl.arange(0, TILE_O)
        begin = tl.load(end_of + slot - 1, mask=slot > 0, other=0)
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
