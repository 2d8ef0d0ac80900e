"""Tiles of grouped GEMMs: what a slot computes is its pairs, rounded up to whole tiles."""

from foremoe.base.compiled import inner_kernel


@inner_kernel
def padded_pairs(quota, tile):
    """Pairs that a GEMM computes for `quota` pairs of one slot, integers; from Python also for arrays."""
    return (quota + (tile - 1)) // tile * tile
