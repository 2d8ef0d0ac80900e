"""Kernels of the pack level. They count pairs by home rank, and move and swap sequences by simulated annealing."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.base.random import next_random, random_below
from foremoe.problem.kernels.demand import add_rows

# Letters: M micro-steps, L layers, J layers of a sample, G ranks, E experts, T tokens, K top-k, Q sequences,
# X = Q + 1: the last entry is no sequence; R rows, C columns of a table.


class Sequences(NamedTuple):
    """The sequences to pack."""

    len_X: Array  # int64, tokens
    attention_X: Array  # float64, FLOPs of a layer's attention
    pairs_XLG: Array  # int32, pairs by home rank
    send_XG: Array  # float64, seconds to dispatch the pairs from every rank
    order_Q: Array  # int64, sequences sorted by length within their group, so that likely swaps are near each other
    place_Q: Array  # int64, position of every sequence in `order_Q`
    low_Q: Array  # int64, first position of the sequence's group
    high_Q: Array  # int64, position after the last one of the sequence's group


class Terms(NamedTuple):
    """Prices and limits of a packing."""

    window_s: float  # seconds per attention FLOP of the slowest rank
    pair_s: float  # seconds per pair of the largest rank load
    budget: int  # tokens that a micro-step may hold
    room: int  # tokens that one of its ranks may hold


class Packing(NamedTuple):
    """A packing and its sums (tokens, attention and load), which the search changes in place."""

    micro_step_Q: Array  # int64
    rank_Q: Array  # int64
    tokens_MG: Array  # int64, tokens
    attention_MG: Array  # float64, attention FLOPs
    tokens_M: Array  # int64, tokens of all ranks
    num_M: Array  # int64, sequences
    load_MLG: Array  # int32, pairs by home rank
    top_M: Array  # int64, largest rank load, summed over layers


class Change(NamedTuple):
    """A move of sequence q from (m, a) to (n, to_q) and of r from (n, b) to (m, to_r), where r = Q stands for no sequence."""

    q: int
    r: int
    m: int
    n: int
    a: int
    b: int
    to_q: int
    to_r: int


@kernel
def count_pairs(low, high, topk_TLK, known_T, cuts, layer_J, group_JE, pairs_QJG):
    """Counts the pairs of sequences [low, high) in the layers `layer_J`, by a group of their expert such as its home rank.

    An empty `known_T` means that the routing of all tokens is known.
    """
    num_topk = topk_TLK.shape[2]
    for q in range(low, high):
        for t in range(cuts[q], cuts[q + 1]):
            if known_T.size and not known_T[t]:
                continue
            for j in range(layer_J.size):
                for k in range(num_topk):
                    pairs_QJG[q, j, group_JE[j, np.int64(topk_TLK[t, layer_J[j], k])]] += 1


@kernel
def largest_with(amount_G, a, more_a, b, more_b):
    """Returns the largest entry, at least 0, after `more_a` is added to rank a and `more_b` to rank b, which may be the same."""
    largest = amount_G.dtype.type(0)
    for g in range(amount_G.size):
        amount = amount_G[g]
        if g == a:
            amount += more_a
        if g == b:
            amount += more_b
        largest = max(largest, amount)
    return largest


@kernel
def tops(load_LG, out_LG, in_LG):
    """Returns the largest rank load, summed over layers, after one sequence of the micro-step is replaced with another."""
    total = np.int64(0)
    for layer in range(load_LG.shape[0]):
        largest = load_LG.dtype.type(0)
        for g in range(load_LG.shape[1]):
            load = load_LG.dtype.type(load_LG[layer, g] - out_LG[layer, g] + in_LG[layer, g])
            if load > largest:
                largest = load
        total += largest
    return total


@kernel
def exchange_load(load_m_LG, load_n_LG, out_LG, in_LG):
    """Moves `out_LG` from micro-step m to n, and `in_LG` back, in place."""
    for layer in range(load_m_LG.shape[0]):
        for g in range(load_m_LG.shape[1]):
            change = in_LG[layer, g] - out_LG[layer, g]
            load_m_LG[layer, g] += change
            load_n_LG[layer, g] -= change


@kernel
def packing_of(sequences, micro_step_Q, rank_Q, tokens_MG):
    """Returns a `Packing` that uses the given arrays, and computes its other sums."""
    Q, (M, G) = micro_step_Q.size, tokens_MG.shape
    load_MLG = np.zeros((M, sequences.pairs_XLG.shape[1], G), np.int32)
    attention_MG, tokens_M, num_M, top_M = np.zeros((M, G)), np.zeros(M, np.int64), np.zeros(M, np.int64), np.zeros(M, np.int64)
    add_rows(sequences.pairs_XLG.reshape(Q + 1, -1), micro_step_Q, load_MLG.reshape(M, -1))
    for q in range(Q):
        m = micro_step_Q[q]
        attention_MG[m, rank_Q[q]] += sequences.attention_X[q]
        tokens_M[m] += sequences.len_X[q]
        num_M[m] += 1
    none_LG = sequences.pairs_XLG[Q]
    for m in range(M):
        top_M[m] = tops(load_MLG[m], none_LG, none_LG)
    return Packing(micro_step_Q, rank_Q, tokens_MG, attention_MG, tokens_M, num_M, load_MLG, top_M)


@kernel
def propose(state, sequences, packing):
    """Draws a random change. Returns whether it changes anything, and the change."""
    Q, G = packing.micro_step_Q.size, packing.tokens_MG.shape[1]
    q = random_below(state, Q)
    m, a = packing.micro_step_Q[q], packing.rank_Q[q]
    low, high = sequences.low_Q[q], sequences.high_Q[q]
    kind = random_below(state, 4)
    if kind == 0:  # to another rank
        b = random_below(state, G)
        return b != a, Change(q, Q, m, m, a, b, b, a)
    if kind == 1:  # to the micro-step of some sequence
        n, b = packing.micro_step_Q[low + random_below(state, high - low)], random_below(state, G)
        return n != m and packing.num_M[m] > 1, Change(q, Q, m, n, a, b, b, a)
    # Swap with a sequence of similar length.
    reach = max(8, (high - low) // 16)
    place = sequences.place_Q[q] + random_below(state, 2 * reach + 1) - reach
    if place < low or place >= high:
        return False, Change(q, q, m, m, a, a, a, a)
    r = sequences.order_Q[place]
    n, b = packing.micro_step_Q[r], packing.rank_Q[r]
    to_q, to_r = b, a
    if n != m and kind == 3:  # keep the rank numbers, so that each sequence stays near its experts
        to_q, to_r = a, b
    return r != q and (n != m or a != b), Change(q, r, m, n, a, b, to_q, to_r)


@kernel
def attention_and_dispatch_s(sequences, terms, packing, change):
    """Returns the seconds that a change adds, not counting largest rank loads, or infinity if the change exceeds a limit."""
    Q, tokens_MG, attention_MG = packing.micro_step_Q.size, packing.tokens_MG, packing.attention_MG
    q, r, m, n, a, b, to_q, to_r = change
    len_q, len_r = sequences.len_X[q], sequences.len_X[r]
    attention_q, attention_r = sequences.attention_X[q], sequences.attention_X[r]
    grow = len_q - len_r
    if n != m and (packing.tokens_M[n] + grow > terms.budget or packing.tokens_M[m] - grow > terms.budget):
        return np.inf
    delta = sequences.send_XG[q, to_q] - sequences.send_XG[q, a]
    if r < Q:
        delta += sequences.send_XG[r, to_r] - sequences.send_XG[r, b]
    if n == m:
        if tokens_MG[m, b] + grow > terms.room or tokens_MG[m, a] - grow > terms.room:
            return np.inf
        more = attention_q - attention_r
        return delta + terms.window_s * (largest_with(attention_MG[m], b, more, a, -more) - attention_MG[m].max())
    left, came = tokens_MG[m, to_r] + len_r, tokens_MG[n, to_q] + len_q
    left -= len_q if to_r == a else 0
    came -= len_r if to_q == b else 0
    if came > terms.room or (r < Q and left > terms.room):
        return np.inf
    return delta + terms.window_s * (
        largest_with(attention_MG[m], a, -attention_q, to_r, attention_r) - attention_MG[m].max()
        + largest_with(attention_MG[n], b if r < Q else to_q, -attention_r, to_q, attention_q) - attention_MG[n].max()
    )  # fmt: skip


@kernel
def apply(sequences, packing, change, top_m, top_n):
    """Applies a change. `top_m` and `top_n` are the largest rank loads of its two micro-steps afterwards."""
    Q, (q, r, m, n, a, b, to_q, to_r) = packing.micro_step_Q.size, change
    for moved, from_m, from_g, to_m, to_g in ((q, m, a, n, to_q), (r, n, b, m, to_r)):
        if moved < Q:
            packing.micro_step_Q[moved], packing.rank_Q[moved] = to_m, to_g
            packing.tokens_MG[from_m, from_g] -= sequences.len_X[moved]
            packing.tokens_MG[to_m, to_g] += sequences.len_X[moved]
            packing.attention_MG[from_m, from_g] -= sequences.attention_X[moved]
            packing.attention_MG[to_m, to_g] += sequences.attention_X[moved]
    if n != m:
        grow = sequences.len_X[q] - sequences.len_X[r]
        packing.tokens_M[m] -= grow
        packing.tokens_M[n] += grow
        if r == Q:
            packing.num_M[m] -= 1
            packing.num_M[n] += 1
        packing.top_M[m], packing.top_M[n] = top_m, top_n
        exchange_load(packing.load_MLG[m], packing.load_MLG[n], sequences.pairs_XLG[q], sequences.pairs_XLG[r])


@kernel
def anneal(sequences, terms, num_proposals, heat, seed, micro_step_Q, rank_Q, tokens_MG):
    """Improves `micro_step_Q` and `rank_Q` in place, with scratch space `tokens_MG`. Returns the change in seconds, at most 0.

    The best packing is kept. Packings are compared whenever every sequence has had one more proposal on average, and at the end.
    A proposal swaps two sequences or moves one. A move is a swap with sequence Q, which has no tokens.
    """
    Q = micro_step_Q.size
    packing = packing_of(sequences, micro_step_Q, rank_Q, tokens_MG)
    state = np.array([seed], np.uint64)
    step = 0.01 ** (1.0 / max(1, num_proposals))
    current, best = 0.0, 0.0
    best_step_Q, best_rank_Q = micro_step_Q.copy(), rank_Q.copy()
    for i in range(num_proposals):
        heat *= step
        if i % Q == Q - 1 and current < best:
            best = current
            best_step_Q[:], best_rank_Q[:] = micro_step_Q, rank_Q
        valid, change = propose(state, sequences, packing)
        if not valid:
            continue
        delta = attention_and_dispatch_s(sequences, terms, packing, change)
        if delta == np.inf:
            continue
        uniform = (np.float64(next_random(state) >> np.uint64(11)) + 1.0) * (1.0 / 9007199254740992.0)
        limit = -heat * math.log(uniform)
        m, n = change.m, change.n
        top_m, top_n = packing.top_M[m], packing.top_M[n]
        if n != m and terms.pair_s > 0.0:
            out_LG, in_LG = sequences.pairs_XLG[change.q], sequences.pairs_XLG[change.r]
            top_m, top_n = tops(packing.load_MLG[m], out_LG, in_LG), tops(packing.load_MLG[n], in_LG, out_LG)
            delta += terms.pair_s * (top_m + top_n - packing.top_M[m] - packing.top_M[n])
        if delta > limit:
            continue
        current += delta
        apply(sequences, packing, change, top_m, top_n)
    if current <= best:
        return current
    micro_step_Q[:], rank_Q[:] = best_step_Q, best_rank_Q
    return best
