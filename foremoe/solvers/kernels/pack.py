"""Kernels of the pack level: pairs of every sequence by home rank, and annealed moves and swaps of sequences."""

from __future__ import annotations

import math

import numpy as np

from foremoe.base.compiled import kernel

# Letters: M micro-steps, L layers, J layers of a sample, G ranks, E experts, T tokens, K top-k, Q sequences,
# X = Q + 1: the last entry is no sequence; R rows, C columns of a table.


@kernel
def count_pairs(low, high, topk_TLK, known_T, cuts, layer_J, group_JE, pairs_QJG):  # type: ignore[no-untyped-def]
    """Pairs of sequences [low, high) in the layers of `layer_J`, by the group of their expert (the rank it lives on, say).

    An empty `known_T` means that all tokens are known.
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
def add_rows(amount_QC, row_Q, out_RC):  # type: ignore[no-untyped-def]
    """Adds the amounts of every sequence to its row of `out_RC`."""
    for q in range(row_Q.size):
        to_C, amount_C = out_RC[row_Q[q]], amount_QC[q]
        for c in range(to_C.size):
            to_C[c] += amount_C[c]


@kernel
def _random(state):  # type: ignore[no-untyped-def]
    """SplitMix64 (Steele, Lea, Flood 2014): one uint64, the state moves on."""
    state[0] += np.uint64(0x9E3779B97F4A7C15)
    z = state[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@kernel
def _below(state, num):  # type: ignore[no-untyped-def]
    return np.int64(_random(state) % np.uint64(num))


@kernel
def late(amount_G, a, more_a, b, more_b):  # type: ignore[no-untyped-def]
    """Largest entry if ranks a and b (maybe the same) held so much more."""
    largest = 0.0
    for g in range(amount_G.size):
        amount = amount_G[g]
        if g == a:
            amount += more_a
        if g == b:
            amount += more_b
        largest = max(largest, amount)
    return largest


@kernel
def tops(load_LG, out_LG, in_LG):  # type: ignore[no-untyped-def]
    """Largest rank load, summed over layers, if one sequence left the micro-step and another came."""
    total = np.int64(0)
    for layer in range(load_LG.shape[0]):
        largest = np.int32(0)
        for g in range(load_LG.shape[1]):
            load = np.int32(load_LG[layer, g] - out_LG[layer, g] + in_LG[layer, g])
            if load > largest:
                largest = load
        total += largest
    return total


@kernel
def anneal(  # type: ignore[no-untyped-def]
    len_X, attention_X, pairs_XLG, send_XG, window_s, pair_s, order_Q, place_Q, low_Q, high_Q, budget, room, num_proposals,
    heat, seed, micro_step_Q, rank_Q, tokens_MG,
):  # fmt: skip
    """Improves `micro_step_Q` and `rank_Q` in place, with `tokens_MG` as scratch; returns by how many seconds, as a number <= 0.

    They end at the best of the states seen after every sequence had one proposal on average, and of the last one.
    A proposal moves one sequence, or exchanges two; X = Q, a sequence without tokens, is the other one of a move.
    """
    Q, (M, G) = micro_step_Q.size, tokens_MG.shape
    load_MLG = np.zeros((M, pairs_XLG.shape[1], G), np.int32)
    attention_MG, tokens_M, num_M, top_M = np.zeros((M, G)), np.zeros(M, np.int64), np.zeros(M, np.int64), np.zeros(M, np.int64)
    add_rows(pairs_XLG.reshape(Q + 1, -1), micro_step_Q, load_MLG.reshape(M, -1))
    for q in range(Q):
        m = micro_step_Q[q]
        attention_MG[m, rank_Q[q]] += attention_X[q]
        tokens_M[m] += len_X[q]
        num_M[m] += 1
    none_LG = pairs_XLG[Q]
    for m in range(M):
        top_M[m] = tops(load_MLG[m], none_LG, none_LG)
    state = np.array([seed], np.uint64)
    step = 0.01 ** (1.0 / max(1, num_proposals))
    current, best = 0.0, 0.0
    best_step_Q, best_rank_Q = micro_step_Q.copy(), rank_Q.copy()
    for i in range(num_proposals):
        heat *= step
        if i % Q == Q - 1 and current < best:
            best = current
            best_step_Q[:], best_rank_Q[:] = micro_step_Q, rank_Q
        q = _below(state, Q)
        m, a = micro_step_Q[q], rank_Q[q]
        low, high = low_Q[q], high_Q[q]
        kind = _below(state, 4)
        r = Q
        if kind == 0:  # to another rank
            n, b = m, _below(state, G)
            if b == a:
                continue
        elif kind == 1:  # to the micro-step of some sequence
            n, b = micro_step_Q[low + _below(state, high - low)], _below(state, G)
            if n == m or num_M[m] == 1:
                continue
        else:  # change places with a sequence of about the same length
            reach = max(8, (high - low) // 16)
            place = place_Q[q] + _below(state, 2 * reach + 1) - reach
            if place < low or place >= high:
                continue
            r = order_Q[place]
            n, b = micro_step_Q[r], rank_Q[r]
            if r == q or (n == m and a == b):
                continue
        # q goes to (n, to_q) and r to (m, to_r); a sequence may keep its rank number, and with it the experts nearby.
        to_q, to_r = b, a
        if r < Q and n != m and kind == 3:
            to_q, to_r = a, b
        grow = len_X[q] - len_X[r]
        if n != m and (tokens_M[n] + grow > budget or tokens_M[m] - grow > budget):
            continue
        delta = send_XG[q, to_q] - send_XG[q, a]
        if r < Q:
            delta += send_XG[r, to_r] - send_XG[r, b]
        if n == m:
            if tokens_MG[m, b] + grow > room or tokens_MG[m, a] - grow > room:
                continue
            more = attention_X[q] - attention_X[r]
            delta += window_s * (late(attention_MG[m], b, more, a, -more) - attention_MG[m].max())
        else:
            left, came = tokens_MG[m, to_r] + len_X[r], tokens_MG[n, to_q] + len_X[q]
            left -= len_X[q] if to_r == a else 0
            came -= len_X[r] if to_q == b else 0
            if came > room or (r < Q and left > room):
                continue
            delta += window_s * (
                late(attention_MG[m], a, -attention_X[q], to_r, attention_X[r]) - attention_MG[m].max()
                + late(attention_MG[n], b if r < Q else to_q, -attention_X[r], to_q, attention_X[q]) - attention_MG[n].max()
            )  # fmt: skip
        uniform = (np.float64(_random(state) >> np.uint64(11)) + 1.0) * (1.0 / 9007199254740992.0)
        limit = -heat * math.log(uniform)
        top_m, top_n = top_M[m], top_M[n]
        if n != m and pair_s > 0.0:
            top_m = tops(load_MLG[m], pairs_XLG[q], pairs_XLG[r])
            top_n = tops(load_MLG[n], pairs_XLG[r], pairs_XLG[q])
            delta += pair_s * (top_m + top_n - top_M[m] - top_M[n])
        if delta > limit:
            continue
        current += delta
        micro_step_Q[q], rank_Q[q] = n, to_q
        tokens_MG[m, a] -= len_X[q]
        tokens_MG[n, to_q] += len_X[q]
        attention_MG[m, a] -= attention_X[q]
        attention_MG[n, to_q] += attention_X[q]
        if r < Q:
            micro_step_Q[r], rank_Q[r] = m, to_r
            tokens_MG[n, b] -= len_X[r]
            tokens_MG[m, to_r] += len_X[r]
            attention_MG[n, b] -= attention_X[r]
            attention_MG[m, to_r] += attention_X[r]
        if n != m:
            tokens_M[m] -= grow
            tokens_M[n] += grow
            if r == Q:
                num_M[m] -= 1
                num_M[n] += 1
            top_M[m], top_M[n] = top_m, top_n
            load_m_LG, load_n_LG, out_LG, in_LG = load_MLG[m], load_MLG[n], pairs_XLG[q], pairs_XLG[r]
            for layer in range(load_m_LG.shape[0]):
                for g in range(G):
                    change = in_LG[layer, g] - out_LG[layer, g]
                    load_m_LG[layer, g] += change
                    load_n_LG[layer, g] -= change
    if current <= best:
        return current
    micro_step_Q[:], rank_Q[:] = best_step_Q, best_rank_Q
    return best
