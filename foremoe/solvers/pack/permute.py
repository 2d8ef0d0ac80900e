"""Level pack: sequences change micro-steps so that expert load is even over ranks; nothing else is looked at."""

import math
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.fields import whole
from foremoe.base.random import random_below
from foremoe.levels import PackSolver
from foremoe.routing.trace import RoutingTrace
from foremoe.solvers.pack.kernels import exchange_load
from foremoe.solvers.pack.value import home_pairs, home_ranks
from foremoe.workload.packing import AsGiven, sample_groups

# Letters: M micro-steps, L layers, G ranks, Q sequences, X = Q + 1: the last entry is zero; I places of an order of sequences.


@dataclass(frozen=True, slots=True)
class Permute(PackSolver):
    """A baseline: permutes samples only. Greedy, then swaps, on a smoothed maximum of the rank loads with contiguous homes.

    Longest first, every sequence goes to the micro-step with room where the sum over layers of the smoothed largest rank load
    grows least; where they do not fit, micro-steps stay as given. Then pairs of sequences of different micro-steps change
    places while that helps. Attention and locality play no part: in a micro-step, sequences in file order go to the rank with
    the fewest tokens, as in `AsGiven`. The behaviour is that of sample packing in open-instruct's trainer as it is described;
    the norm of power 16 and the order of swaps are our own.

    Attributes:
        passes: proposed swaps per sequence; fewer once a pass gains less than a ten-thousandth.
    """

    passes: int = 50

    def __post_init__(self) -> None:
        whole(self.passes, "passes of Permute", 0, 10**6)

    def solve(
        self, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, sample_group_Q: Array | None = None, seed: int = 0
    ) -> tuple[Array, Array]:
        """As `PackSolver.solve`; `seed` is of the proposed swaps."""
        given_Q, _ = AsGiven().solve(trace, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank, sample_group_Q=sample_group_Q)
        step_Q = given_Q.astype(np.int64)
        group_Q = sample_groups(sample_group_Q, trace.Q)
        pairs_XLG = home_pairs(trace, num_ranks, home_ranks(trace, num_ranks, None))
        len_Q, budget = trace.seq_len_Q, num_ranks * tokens_per_rank
        for group in np.unique(group_Q):
            index_I = np.flatnonzero((group_Q == group) & (len_Q <= budget))
            steps_M = np.unique(given_Q[index_I]).astype(np.int64)
            if len(steps_M) > 1:
                longest_I = index_I[np.argsort(-len_Q[index_I], kind="stable")]
                _greedy(longest_I, len_Q, pairs_XLG, steps_M, budget, step_Q)
                _swap(index_I, len_Q, pairs_XLG, steps_M, budget, self.passes, np.uint64(seed % 2**64), step_Q)
        micro_step_Q, rank_Q = step_Q.astype(np.int32), np.empty(trace.Q, np.int32)
        tokens_MG = np.zeros((int(step_Q.max()) + 1, num_ranks), np.int64)
        for q, (m, length) in enumerate(zip(step_Q.tolist(), len_Q.tolist(), strict=True)):
            rank_Q[q] = tokens_MG[m].argmin()
            tokens_MG[m, rank_Q[q]] += length
        return micro_step_Q, rank_Q


@kernel
def _smooth(load_LG, out_LG, in_LG):
    """Sum over layers of the 16-norm over ranks, if one sequence left the micro-step and another came."""
    total = 0.0
    for layer in range(load_LG.shape[0]):
        powers = 0.0
        for g in range(load_LG.shape[1]):
            x = np.float64(load_LG[layer, g] - out_LG[layer, g] + in_LG[layer, g])
            x *= x
            x *= x
            x *= x
            powers += x * x
        total += math.sqrt(math.sqrt(math.sqrt(math.sqrt(powers))))
    return total


@kernel
def _greedy(longest_I, len_Q, pairs_XLG, steps_M, budget, step_Q):
    """Writes `step_Q` if all sequences find room and no micro-step stays empty."""
    num = steps_M.size
    load_MLG = np.zeros((num, *pairs_XLG.shape[1:]), np.int32)
    tokens_M, value_M, found_I = np.zeros(num, np.int64), np.zeros(num), np.empty(longest_I.size, np.int64)
    none_LG = pairs_XLG[len_Q.size]
    for i in range(longest_I.size):
        q = longest_I[i]
        chosen, least, value = -1, np.inf, 0.0
        for m in range(num):
            if tokens_M[m] + len_Q[q] > budget:
                continue
            with_q = _smooth(load_MLG[m], none_LG, pairs_XLG[q])
            if with_q - value_M[m] < least:
                chosen, least, value = m, with_q - value_M[m], with_q
        if chosen < 0:
            return
        found_I[i] = chosen
        load_MLG[chosen] += pairs_XLG[q]
        tokens_M[chosen] += len_Q[q]
        value_M[chosen] = value
    if tokens_M.min() == 0:
        return
    for i in range(longest_I.size):
        step_Q[longest_I[i]] = steps_M[found_I[i]]


@kernel
def _swap(index_I, len_Q, pairs_XLG, steps_M, budget, passes, seed, step_Q):
    first, num = steps_M.min(), steps_M.max() - steps_M.min() + 1
    load_MLG, tokens_M, value_M = np.zeros((num, *pairs_XLG.shape[1:]), np.int32), np.zeros(num, np.int64), np.zeros(num)
    none_LG = pairs_XLG[len_Q.size]
    for q in index_I:
        load_MLG[step_Q[q] - first] += pairs_XLG[q]
        tokens_M[step_Q[q] - first] += len_Q[q]
    for m in range(num):
        value_M[m] = _smooth(load_MLG[m], none_LG, none_LG)
    state = np.array([seed], np.uint64)
    for _ in range(passes):
        before = value_M.sum()
        for q in index_I:
            r = index_I[random_below(state, index_I.size)]
            m, n = step_Q[q] - first, step_Q[r] - first
            grow = len_Q[q] - len_Q[r]
            if m == n or tokens_M[n] + grow > budget or tokens_M[m] - grow > budget:
                continue
            value_m = _smooth(load_MLG[m], pairs_XLG[q], pairs_XLG[r])
            value_n = _smooth(load_MLG[n], pairs_XLG[r], pairs_XLG[q])
            if value_m + value_n >= value_M[m] + value_M[n]:
                continue
            value_M[m], value_M[n] = value_m, value_n
            tokens_M[m] -= grow
            tokens_M[n] += grow
            exchange_load(load_MLG[m], load_MLG[n], pairs_XLG[q], pairs_XLG[r])
            step_Q[q], step_Q[r] = n + first, m + first
        if before - value_M.sum() < 1e-4 * before:
            return
