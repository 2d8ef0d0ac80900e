"""Tiles of grouped GEMMs. The pairs of a slot are rounded up to whole tiles."""

from typing import Any

from foremoe.base.compiled import inner_kernel


@inner_kernel
def padded_pairs(quota: Any, tile: int) -> Any:
    """Returns the integer number of pairs that a GEMM computes for `quota` pairs. Python callers may pass an array."""
    return (quota + (tile - 1)) // tile * tile
