"""Tiles of grouped GEMMs: a slot computes its pairs, rounded up to whole tiles."""

from typing import Any

from foremoe.base.compiled import inner_kernel


@inner_kernel
def padded_pairs(quota: Any, tile: int) -> Any:
    """Pairs that a GEMM computes for `quota` pairs of one slot, an integer; from Python also an array."""
    return (quota + (tile - 1)) // tile * tile
