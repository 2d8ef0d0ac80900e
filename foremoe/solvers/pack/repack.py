"""Repacking, which exchanges samples between the micro-batches of the same rank to shorten the predicted stage.

It works like `ExpertAware`, but only moves sequences within their rank. The cost consists of the attention of the slowest rank
and the pairs of the busiest rank. The source ranks of pairs do not change.
"""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.random import next_random
from foremoe.solvers.pack.kernels import exchange_load, largest_with, tops

# Letters: Q samples, M micro-batches, J layers, D data-parallel ranks, G ranks of the EP group.

# Price of one pair of the busiest rank.
UNIT = 1024
# Proposals per sample.
_SWEEPS = 100


def repack(
    len_Q: Array, attention_Q: Array, pairs_QJG: Array, rank_D_Q: Array, limit_D: Array, num_micro_steps: int, micro_step_Q: Array
) -> int:
    """Improves `micro_step_Q` in place. Sequences stay on their rank.

    The search uses late acceptance (Burke and Bykov, "The late acceptance hill-climbing heuristic", 2017). A change is accepted
    if it does not raise the cost, or if the new cost is lower than the cost was some changes ago. Only integers are compared, so
    every rank finds the same result. `rank_D_Q` must be ascending. `limit_D` is the maximum number of tokens in a micro-batch of
    each rank. No micro-batch of a rank may be empty.

    Returns the decrease of the cost, summed over micro-batches. The cost of a micro-batch is the attention work of the slowest
    rank, an integer, plus `UNIT` times the pairs of the busiest home rank, summed over layers.
    """
    if num_micro_steps < 2 or len(len_Q) < 2:
        return 0
    first_D = np.searchsorted(rank_D_Q, np.arange(len(limit_D) + 1))
    arrays = (len_Q, attention_Q, rank_D_Q, pairs_QJG, first_D, limit_D)
    samples = _Samples(*(np.ascontiguousarray(array, np.int64) for array in arrays))
    return -int(_improve(samples, num_micro_steps, _SWEEPS * len(len_Q), micro_step_Q))


class _Samples(NamedTuple):
    """Samples as int64 arrays: tokens, attention, rank and pairs of each sample, and each rank's first sample and token limit."""

    len_Q: Array
    attention_Q: Array
    rank_Q: Array
    pairs_QJG: Array
    first_D: Array
    limit_D: Array


class _Packing(NamedTuple):
    """Micro-batches as int64 arrays: the micro-batch of every sample and the sums that the search updates."""

    micro_step_Q: Array  # micro-batch of every sample
    tokens_MD: Array  # tokens
    attention_MD: Array  # attention
    num_MD: Array  # samples
    longest_D: Array  # largest attention of a micro-batch at the start, which no later one may exceed
    load_MJG: Array  # pairs
    top_M: Array  # largest rank load, summed over layers


@kernel
def _packing_of(samples, M, micro_step_Q):
    D, none_JG = samples.limit_D.size, np.zeros(samples.pairs_QJG.shape[1:], np.int64)
    tokens_MD, attention_MD, num_MD = np.zeros((M, D), np.int64), np.zeros((M, D), np.int64), np.zeros((M, D), np.int64)
    load_MJG = np.zeros((M, *samples.pairs_QJG.shape[1:]), np.int64)
    for q in range(micro_step_Q.size):
        m, d = micro_step_Q[q], samples.rank_Q[q]
        tokens_MD[m, d] += samples.len_Q[q]
        attention_MD[m, d] += samples.attention_Q[q]
        num_MD[m, d] += 1
        load_MJG[m] += samples.pairs_QJG[q]
    longest_D, top_M = np.zeros(D, np.int64), np.zeros(M, np.int64)
    for m in range(M):
        top_M[m] = tops(load_MJG[m], none_JG, none_JG)
        longest_D[:] = np.maximum(longest_D, attention_MD[m])
    return _Packing(micro_step_Q, tokens_MD, attention_MD, num_MD, longest_D, load_MJG, top_M)


@kernel
def _improve(samples, M, num_proposals, micro_step_Q):
    packing = _packing_of(samples, M, micro_step_Q)
    none_JG = np.zeros(samples.pairs_QJG.shape[1:], np.int64)
    past, state = np.zeros(64, np.int64), np.ones(1, np.uint64)
    now, best = np.int64(0), np.int64(0)
    best_Q = micro_step_Q.copy()
    for i in range(num_proposals):
        z = next_random(state)
        q = np.int64((z & np.uint64(0xFFFFFFFF)) % np.uint64(micro_step_Q.size))
        d = samples.rank_Q[q]
        first = samples.first_D[d]
        r = first + np.int64((z >> np.uint64(34)) % np.uint64(samples.first_D[d + 1] - first))
        m, n = micro_step_Q[q], micro_step_Q[r]
        moves = (z >> np.uint64(32)) & np.uint64(3) == 0  # otherwise q and r are swapped
        if m == n or (moves and packing.num_MD[m, d] == 1):
            continue
        grow, more, out_JG, in_JG = samples.len_Q[q], samples.attention_Q[q], samples.pairs_QJG[q], none_JG
        if not moves:
            grow, more, in_JG = grow - samples.len_Q[r], more - samples.attention_Q[r], samples.pairs_QJG[r]
        tokens_MD, attention_MD = packing.tokens_MD, packing.attention_MD
        if tokens_MD[n, d] + grow > samples.limit_D[d] or tokens_MD[m, d] - grow > samples.limit_D[d]:
            continue
        if attention_MD[n, d] + more > packing.longest_D[d] or attention_MD[m, d] - more > packing.longest_D[d]:
            continue
        top_m, top_n = tops(packing.load_MJG[m], out_JG, in_JG), tops(packing.load_MJG[n], in_JG, out_JG)
        change = UNIT * (top_m + top_n - packing.top_M[m] - packing.top_M[n])
        change += largest_with(attention_MD[m], d, -more, d, 0) - attention_MD[m].max()
        change += largest_with(attention_MD[n], d, more, d, 0) - attention_MD[n].max()
        before, past[i % past.size] = past[i % past.size], now
        if change > 0 and now + change >= before:
            continue
        now += change
        past[i % past.size] = now
        micro_step_Q[q] = n
        if not moves:
            micro_step_Q[r] = m
        for step, sign in ((m, -1), (n, 1)):
            tokens_MD[step, d] += sign * grow
            attention_MD[step, d] += sign * more
            packing.num_MD[step, d] += sign * moves
        exchange_load(packing.load_MJG[m], packing.load_MJG[n], out_JG, in_JG)
        packing.top_M[m], packing.top_M[n] = top_m, top_n
        if now < best:
            best = now
            best_Q[:] = micro_step_Q
    micro_step_Q[:] = best_Q
    return best
