"""Counts routing into pairs per expert. Payloads of any integer type are read in place, without conversion."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, as_array
from foremoe.base.budget import require_budget
from foremoe.base.compiled import kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows, row_runner

# Letters: T tokens, L layers counted, K top-k, E experts, M micro-steps, G ranks, X ranges.

# Number of tokens to copy at once if a payload cannot be read in place (not contiguous, not aligned, or of another byte order).
_BLOCK_TOKENS = 4096
# Entries of a tally, int64 [4]: pairs that repeat an expert of their token and layer; (token, layer) combinations with a -1 among
# their experts; tokens whose experts are all 0; tokens with at least one unknown layer.
REPEATED, MARKED, BLANK, UNKNOWN = range(4)


def count_pairs(topk_TLK: Any, num_experts: int) -> Array:
    """Returns the number of pairs of each expert, int32 [L, E]. `topk_TLK` is a numpy or torch array of integers.

    -1 means an unknown expert and is not counted. An expert that a token lists twice in a layer counts as one pair, as in a
    router's map of tokens to experts.
    """
    topk = as_array(topk_TLK, "routing")
    if topk.ndim != 3 or topk.dtype.kind not in "iu":
        raise InputError(f"routing must be whole numbers [tokens, layers, top-k]; got {topk.dtype} of shape {list(topk.shape)}.")
    what = f"counts of {topk.shape[1]} layers x {num_experts} experts"
    require_budget(4 * topk.shape[1] * num_experts, what, "correct the routing's shape or num_experts", topk.nbytes)
    load_LE = np.zeros((topk.shape[1], num_experts), np.int32)
    limit, missing = _limits(topk.dtype, num_experts)
    for _, ids_TLK in blocks(topk):
        if not add_pairs(ids_TLK, limit, missing, load_LE):
            raise InputError(f"routing holds experts {topk.min()} to {topk.max()}; there are {num_experts}, from 0.")
    return load_LE


def count_micro_steps(topk_of: Sequence[Any], num_experts: int, num_threads: int | None = None) -> Array:
    """Returns the result of `count_pairs` for every micro-step, int32 [M, L, E]. Uses all cores if `num_threads` is None."""
    loads: list[Array] = [np.zeros((0, 0), np.int32)] * len(topk_of)

    def block(low: int, high: int) -> None:
        for m in range(low, high):
            loads[m] = count_pairs(topk_of[m], num_experts)

    with row_runner(num_threads):
        for_rows(block, len(loads), 1, whole=True)
    if any(load.shape != loads[0].shape for load in loads):
        raise InputError("the micro-steps have routing of different numbers of layers; give the same layers in all.")
    return np.stack(loads)


def count_ranges(topk_TLK: Array, layer_L: Array, range_X4: Array, load_MLGE: Array, unknown_ML: Array, tally: Array) -> None:
    """Adds the pairs in ranges of tokens to the counts of their micro-steps and source ranks, in place.

    An expert that is listed twice for a (token, layer) counts once. A (token, layer) with a -1 is unknown and not counted. A
    token whose experts are all 0 in every layer is not counted either, because engines pad with zeros. At top-1, such a token is
    counted, because the zeros may be routing. `load_MLGE` must be int32 and C-contiguous. If an error is raised, `load_MLGE` and
    `unknown_ML` hold partial sums.

    Args:
        layer_L: Layers of the payload to count, int64.
        range_X4: First token, end, micro-step and source rank of each range, int64.
    """
    num_experts = load_MLGE.shape[3]
    limit, missing = _limits(topk_TLK.dtype, num_experts)
    for first, ids_TLK in blocks(topk_TLK):
        cut_X4 = range_X4.copy()
        cut_X4[:, :2] = np.clip(range_X4[:, :2] - first, 0, len(ids_TLK))
        fault = add_ranges(ids_TLK, layer_L, limit, missing, cut_X4, load_MLGE, unknown_ML, tally)
        _require_none(fault, first, topk_TLK, num_experts)


def narrow_into(out_TLK: Array, known_T: Array, topk_TLK: Array, layer_L: Array, num_experts: int, tally: Array) -> None:
    """Copies the chosen layers of known tokens to `out_TLK`, which holds zeros, and sets `known_T` of all other tokens to False.

    A token is known if all its layers are known and none lists an expert twice.
    """
    limit, missing = _limits(topk_TLK.dtype, num_experts)
    for first, ids_TLK in blocks(topk_TLK):
        end = first + len(ids_TLK)
        fault = narrow(ids_TLK, layer_L, limit, missing, num_experts, out_TLK[first:end], known_T[first:end], tally)
        _require_none(fault, first, topk_TLK, num_experts)


def known_rows(topk_TLK: Array, layer_L: Array) -> Array:
    """Returns a mask of the tokens whose chosen layers have no -1 and are not all 0, bool [T]. At top-1, zeros are allowed."""
    ids_TLK = topk_TLK[:, layer_L]
    blank_T = (ids_TLK == 0).all(axis=(1, 2)) & (topk_TLK.shape[2] > 1)
    known_T: Array = (ids_TLK >= 0).all(axis=(1, 2)) & ~blank_T
    return known_T


def blocks(topk_TLK: Array) -> Iterator[tuple[int, Array]]:
    """Yields (first token, unsigned read-only view), for the whole array or, if it cannot be read in place, for copied blocks."""
    # All views have the same signedness, layout and mutability, so that kernels are compiled for four types, not for dozens.
    unsigned = np.dtype(f"u{topk_TLK.dtype.itemsize}")
    native = topk_TLK.dtype.newbyteorder("=")
    in_place = topk_TLK.flags.c_contiguous and topk_TLK.flags.aligned and topk_TLK.dtype == native
    step = max(len(topk_TLK), 1) if in_place else _BLOCK_TOKENS
    for first in range(0, len(topk_TLK), step):
        part_TLK = topk_TLK[first : first + step]
        view = np.ascontiguousarray(part_TLK, native).view(unsigned) if not in_place else part_TLK.view(unsigned)
        view.flags.writeable = False
        yield first, view


def _limits(dtype: np.dtype[Any], num_experts: int) -> tuple[np.uint64, np.uint64]:
    """Returns the first unsigned number that is not an expert, and the one that encodes -1 (or 0, an expert, if none does)."""
    bits = 8 * dtype.itemsize
    if dtype.kind == "u":
        return np.uint64(num_experts), np.uint64(0)
    return np.uint64(min(num_experts, 2 ** (bits - 1))), np.uint64(2**bits - 1)


def _require_none(fault: tuple[int, int, int], first: int, topk_TLK: Array, num_experts: int) -> None:
    t, layer, k = fault
    if t >= 0:
        found = f"token {first + t}, layer {layer} of the payload lists expert {topk_TLK[first + t, layer, k]}"
        allowed = f"experts are 0 to {num_experts - 1}, and -1 where routing is not known"
        raise InputError(f"{found}; {allowed}: correct num_experts or dtype, or the payload.")


@kernel
def add_pairs(ids_TLK, limit, missing, load_LE):
    """Adds every distinct pair to `load_LE`, except pairs with the id `missing`. Returns False if an id is invalid."""
    T, L, K = ids_TLK.shape
    seen_E = np.zeros(load_LE.shape[1], np.int64)
    stamp = np.int64(0)
    for t in range(T):
        for layer in range(L):
            stamp += 1
            for k in range(K):
                e = np.uint64(ids_TLK[t, layer, k])
                if e < limit:
                    load_LE[layer, e] += seen_E[e] != stamp
                    seen_E[e] = stamp
                elif e != missing:
                    return False
    return True


@kernel
def is_blank(ids_TLK, t, layer_L):
    """Returns True if a token's experts are 0 in all layers. At top-1, always returns False."""
    K = ids_TLK.shape[2]
    if K == 1:
        return False
    for layer in layer_L:
        for k in range(K):
            if ids_TLK[t, layer, k] != 0:
                return False
    return True


@kernel
def check_row(ids_TLK, t, layer, limit, missing, seen_E, stamp):
    """Returns the number of repeated ids of a (token, layer), -1 if an expert is unknown, or -2 - k if the id at k is invalid."""
    repeated, known = 0, True
    for k in range(ids_TLK.shape[2]):
        e = np.uint64(ids_TLK[t, layer, k])
        if e < limit:
            repeated += seen_E[e] == stamp
            seen_E[e] = stamp
        elif e == missing:
            known = False
        else:
            return -2 - k
    return repeated if known else -1


@kernel
def add_ranges(ids_TLK, layer_L, limit, missing, range_X4, load_MLGE, unknown_ML, tally):
    """Runs `count_ranges` on an unsigned array. Returns (token, layer, position) of the first invalid id, or (-1, -1, -1)."""
    L, K, E = len(layer_L), ids_TLK.shape[2], load_MLGE.shape[3]
    # The counts of one rank lie far apart in load_MLGE, so each range is counted in a table that fits the cache.
    pairs_LE = np.zeros((L, E), np.int32)
    seen_E = np.zeros(E, np.int64)
    stamp = np.int64(0)
    for x in range(len(range_X4)):
        first, end, m, g = range_X4[x]
        if first >= end:
            continue
        pairs_LE[:] = 0
        for t in range(first, end):
            if is_blank(ids_TLK, t, layer_L):
                tally[BLANK] += 1
                tally[UNKNOWN] += 1
                unknown_ML[m] += 1
                continue
            num_marked = 0
            for i in range(L):
                layer = layer_L[i]
                stamp += 1
                found = check_row(ids_TLK, t, layer, limit, missing, seen_E, stamp)
                if found == 0:
                    for k in range(K):
                        pairs_LE[i, np.uint64(ids_TLK[t, layer, k])] += 1
                elif found > 0:
                    tally[REPEATED] += found
                    for k in range(K):
                        expert = np.uint64(ids_TLK[t, layer, k])
                        pairs_LE[i, expert] += seen_E[expert] == stamp
                        seen_E[expert] = 0
                elif found == -1:
                    num_marked += 1
                    unknown_ML[m, i] += 1
                else:
                    return t, layer, -2 - found
            tally[MARKED] += num_marked
            tally[UNKNOWN] += num_marked > 0
        for i in range(L):
            for e in range(E):
                load_MLGE[m, i, g, e] += pairs_LE[i, e]
    return -1, -1, -1


@kernel
def narrow(ids_TLK, layer_L, limit, missing, num_experts, out_TLK, known_T, tally):
    """Runs `narrow_into` on an unsigned array. Returns (token, layer, position) of the first invalid id, or (-1, -1, -1)."""
    T, _, K = ids_TLK.shape
    seen_E = np.zeros(num_experts, np.int64)
    stamp = 0
    for t in range(T):
        if is_blank(ids_TLK, t, layer_L):
            tally[BLANK] += 1
            tally[UNKNOWN] += 1
            known_T[t] = False
            continue
        num_marked, num_repeated = 0, 0
        for layer in layer_L:
            stamp += 1
            found = check_row(ids_TLK, t, layer, limit, missing, seen_E, stamp)
            if found < -1:
                return t, layer, -2 - found
            num_marked += found == -1
            num_repeated += max(found, 0)
        tally[MARKED] += num_marked
        tally[UNKNOWN] += num_marked > 0
        tally[REPEATED] += num_repeated
        if num_marked or num_repeated:
            known_T[t] = False
            continue
        for i in range(len(layer_L)):
            for k in range(K):
                out_TLK[t, i, k] = ids_TLK[t, layer_L[i], k]
    return -1, -1, -1
