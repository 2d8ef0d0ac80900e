"""Repacking: samples between the micro-batches of their rank, for the predicted time of the stage; `ExpertAware` within ranks.

The late rank's attention and the busiest rank's experts count as there. Where pairs are dispatched from does not change.
"""

from __future__ import annotations

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel

# Letters: Q samples, M micro-batches, J layers, D data-parallel ranks, G ranks of the EP group.

# The price of a pair of the busiest rank; attention is given in the same unit.
UNIT = 1024
# Proposals per sample.
_SWEEPS = 100


def repack(
    len_Q: Array, attention_Q: Array, pairs_QJG: Array, rank_D_Q: Array, limit_D: Array, num_micro_steps: int, micro_step_Q: Array
) -> int:
    """Improves `micro_step_Q` in place, within ranks; returns by how much `cost` fell. Whole numbers in and out.

    Late acceptance (Burke and Bykov, "The late acceptance hill-climbing heuristic", 2017): a change is taken if it makes nothing
    worse, or leaves the whole better than it was some changes ago. It compares whole numbers only, so that every rank finds the
    same.

    Args:
        rank_D_Q: data-parallel rank of every sample, ascending from 0.   limit_D: tokens that a micro-batch may hold.
    """
    if num_micro_steps < 2 or len(len_Q) < 2:
        return 0
    first_D = np.searchsorted(rank_D_Q, np.arange(len(limit_D) + 1))
    arrays = [np.ascontiguousarray(a, np.int64) for a in (len_Q, attention_Q, rank_D_Q, first_D, limit_D, pairs_QJG)]
    return -int(_improve(*arrays, num_micro_steps, _SWEEPS * len(len_Q), micro_step_Q))


def cost(attention_Q: Array, pairs_QJG: Array, rank_D_Q: Array, micro_step_Q: Array) -> int:
    """Attention of the late rank and pairs of the busiest home rank, summed over micro-steps: what `repack` makes less."""
    M, D = int(micro_step_Q.max()) + 1, int(rank_D_Q.max()) + 1
    attention_MD = np.zeros((M, D), np.int64)
    load_MJG = np.zeros((M, *pairs_QJG.shape[1:]), np.int64)
    np.add.at(attention_MD, (micro_step_Q, rank_D_Q), attention_Q)
    np.add.at(load_MJG, micro_step_Q, pairs_QJG)
    return int(attention_MD.max(axis=1).sum() + UNIT * load_MJG.max(axis=2).sum())


@kernel
def _top(load_JG, out_JG, in_JG):  # type: ignore[no-untyped-def]
    """Largest rank load, summed over layers, if some pairs left and others came."""
    total = np.int64(0)
    for j in range(load_JG.shape[0]):
        largest = np.int64(0)
        for g in range(load_JG.shape[1]):
            largest = max(largest, load_JG[j, g] - out_JG[j, g] + in_JG[j, g])
        total += largest
    return total


@kernel
def _late(amount_D, d, more):  # type: ignore[no-untyped-def]
    """Largest entry if one were so much more."""
    largest = np.int64(0)
    for i in range(amount_D.size):
        largest = max(largest, amount_D[i] + (more if i == d else 0))
    return largest


@kernel
def _improve(len_Q, attention_Q, rank_Q, first_D, limit_D, pairs_QJG, M, num_proposals, micro_step_Q):  # type: ignore[no-untyped-def]
    Q, D = len_Q.size, limit_D.size
    tokens_MD, attention_MD, num_MD = np.zeros((M, D), np.int64), np.zeros((M, D), np.int64), np.zeros((M, D), np.int64)
    load_MJG = np.zeros((M, pairs_QJG.shape[1], pairs_QJG.shape[2]), np.int64)
    none_JG = np.zeros(pairs_QJG.shape[1:], np.int64)
    for i in range(Q):
        m, d = micro_step_Q[i], rank_Q[i]
        tokens_MD[m, d] += len_Q[i]
        attention_MD[m, d] += attention_Q[i]
        num_MD[m, d] += 1
        load_MJG[m] += pairs_QJG[i]
    longest_D = np.zeros(D, np.int64)
    top_M = np.zeros(M, np.int64)
    for m in range(M):
        top_M[m] = _top(load_MJG[m], none_JG, none_JG)
        for d in range(D):
            longest_D[d] = max(longest_D[d], attention_MD[m, d])
    past = np.zeros(64, np.int64)
    now, best = np.int64(0), np.int64(0)
    best_Q = micro_step_Q.copy()
    state = np.uint64(1)
    for i in range(num_proposals):
        # SplitMix64 (Steele, Lea, Flood 2014).
        state += np.uint64(0x9E3779B97F4A7C15)
        z = state
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
        q = np.int64((z & np.uint64(0xFFFFFFFF)) % np.uint64(Q))
        d = rank_Q[q]
        r = first_D[d] + np.int64((z >> np.uint64(34)) % np.uint64(first_D[d + 1] - first_D[d]))
        m, n = micro_step_Q[q], micro_step_Q[r]
        move = (z >> np.uint64(32)) & np.uint64(3) == 0  # else q and r change places
        if m == n or (move and num_MD[m, d] == 1):
            continue
        grow, more = len_Q[q], attention_Q[q]
        back_JG = none_JG
        if not move:
            grow, more, back_JG = grow - len_Q[r], more - attention_Q[r], pairs_QJG[r]
        if tokens_MD[n, d] + grow > limit_D[d] or tokens_MD[m, d] - grow > limit_D[d]:
            continue
        if attention_MD[n, d] + more > longest_D[d] or attention_MD[m, d] - more > longest_D[d]:
            continue
        top_m, top_n = _top(load_MJG[m], pairs_QJG[q], back_JG), _top(load_MJG[n], back_JG, pairs_QJG[q])
        change = UNIT * (top_m + top_n - top_M[m] - top_M[n])
        change += _late(attention_MD[m], d, -more) - attention_MD[m].max()
        change += _late(attention_MD[n], d, more) - attention_MD[n].max()
        if change > 0 and now + change >= past[i % past.size]:
            past[i % past.size] = now
            continue
        now += change
        past[i % past.size] = now
        micro_step_Q[q] = n
        tokens_MD[m, d] -= grow
        tokens_MD[n, d] += grow
        attention_MD[m, d] -= more
        attention_MD[n, d] += more
        if move:
            num_MD[m, d] -= 1
            num_MD[n, d] += 1
        else:
            micro_step_Q[r] = m
        load_MJG[m] += back_JG - pairs_QJG[q]
        load_MJG[n] += pairs_QJG[q] - back_JG
        top_M[m], top_M[n] = top_m, top_n
        if now < best:
            best = now
            best_Q[:] = micro_step_Q
    micro_step_Q[:] = best_Q
    return best
