"""Kernels for rows with holes. One finds the holes, and the other computes every row's permutations in a single pass."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.plan.split import link_slots

# Letters: N rows, G ranks, E experts, S slots of a rank, P = G*S physical slots, T tokens and K top-k of this source, I
# tokens that are not known (holes), Z = (T - I)*K + I*E pairs that this source sends, Y pairs that this rank serves, X
# those of them that are not planned.


class HoledRows(NamedTuple):
    """Input for computing routes (int32), and the position at which each row's numbers start (int64).

    The numbers of a row are its experts [T, K], followed by the output of `route_holed_rows`, named as in `HoledRoute`:
    `token_Z`, `prob_Z`, `by_token_Z` [T, K], `rest_Z` [I, E - K], `hole_I`, `by_slot_Y`, `by_arrival_Y` and `extra_X`.
    """

    begin_N: Array
    num_tokens_N: Array
    num_holes_N: Array
    expert_NGS: Array
    split_NP: Array
    sent_NP: Array
    planned_NGS: Array
    received_NGS: Array
    home_slot_NE: Array
    num_topk: int


@kernel
def find_holes(expert_TK, extra_E, hole_T):
    """Writes the tokens with fewer than K known experts to `hole_T` and returns their number.

    All experts serve such a token. The kernel therefore adds one pair to `extra_E` for each expert that is not among the token's
    known experts.
    """
    T, K = expert_TK.shape
    num, E = 0, extra_E.size
    seen_E = np.full(E, -1, np.int64)
    for t in range(T):
        distinct = 0
        for k in range(K):
            e = expert_TK[t, k]
            if 0 <= e < E and seen_E[e] != t:
                seen_E[e] = t
                distinct += 1
        if distinct < K:
            hole_T[num] = t
            num += 1
            for e in range(E):
                extra_E[e] += seen_E[e] != t
    return num


@kernel
def route_holed_rows(low, high, rows, numbers_X, planned_N):
    """Writes each row's permutations after its experts. Sets `planned_N` to True for rows whose counts match the plan."""
    E, K = rows.home_slot_NE.shape[1], rows.num_topk
    for n in range(low, high):
        num, holes, served = rows.num_tokens_N[n] * K, rows.num_holes_N[n], rows.received_NGS[n].sum()
        sent, rest = num - holes * K + holes * E, holes * (E - K)
        numbers, at = numbers_X[rows.begin_N[n] : rows.begin_N[n + 1]], 0
        expert_TK, at = numbers[:num].reshape(-1, K), num
        token_Z, prob_Z, at = numbers[at : at + sent], numbers[at + sent : at + 2 * sent], at + 2 * sent
        by_token_TK, at = numbers[at : at + num].reshape(-1, K), at + num
        rest_Z, at = numbers[at : at + rest], at + rest
        hole_I, at = numbers[at : at + holes], at + holes
        planned_N[n] = _place_pairs(n, rows, expert_TK, token_Z, prob_Z, by_token_TK, rest_Z, hole_I)
        if planned_N[n]:
            orders = numbers[at : at + served], numbers[at + served : at + 2 * served], numbers[at + 2 * served :]
            _order_arrivals(rows.planned_NGS[n], rows.received_NGS[n], orders[0], orders[1], orders[2])


@kernel
def _place_pairs(n, rows, expert_TK, token_Z, prob_Z, by_token_TK, rest_Z, hole_I):
    """Assigns the next planned place of its expert to every known pair, in token order. All other pairs follow in each slot.

    Returns whether exactly the planned places are taken. The experts of holes are overwritten by arbitrary valid ones.
    """
    split_P, sent_P = rows.split_NP[n], rows.sent_NP[n]
    T, K = expert_TK.shape
    E = rows.home_slot_NE.shape[1]
    slot_E, next_P, seen_E = np.empty(E, np.int64), np.empty(split_P.size, np.int64), np.full(E, -1, np.int64)
    link_slots(rows.expert_NGS[n], split_P.reshape(rows.expert_NGS[n].shape), slot_E, next_P)
    place_P = np.cumsum(sent_P) - sent_P
    end_P = place_P + split_P
    extra_P, end_extra_P = end_P.copy(), place_P + sent_P
    i, num_placed = 0, 0
    for t in range(T):
        is_hole = i < hole_I.size and hole_I[i] == t
        for k in range(E if is_hole else K):
            e = k if is_hole else expert_TK[t, k]
            if e < 0 or e >= E:
                return False
            known = not is_hole
            if is_hole:
                if k == 0:
                    for place in range(K):
                        if 0 <= expert_TK[t, place] < E:
                            seen_E[expert_TK[t, place]] = t
                        expert_TK[t, place] = place
                known = seen_E[e] == t
            if known:
                p = slot_E[e]
                if p < 0:
                    return False
                z = place_P[p]
                place_P[p] += 1
                num_placed += 1
                if place_P[p] == end_P[p]:
                    slot_E[e] = next_P[p]
            else:
                p = rows.home_slot_NE[n, e]
                z = extra_P[p]
                extra_P[p] += 1
                if z >= end_extra_P[p]:
                    return False
            token_Z[z], prob_Z[z] = t, t * E + e
            if k < K:
                by_token_TK[t, k] = z
            else:
                rest_Z[i * (E - K) + k - K] = z
        i += is_hole
    return num_placed == split_P.sum()


@kernel
def _order_arrivals(planned_GS, received_GS, by_slot_Y, by_arrival_Y, extra_X):
    """Maps the order of arrival (by source, then slot, planned pairs first) to that of expert compute (by slot, then source)."""
    G, S = received_GS.shape
    arrival_GS, y = np.empty((G, S), np.int64), 0
    for g in range(G):
        for s in range(S):
            arrival_GS[g, s] = y
            y += received_GS[g, s]
    place, x = 0, 0
    for s in range(S):
        for g in range(G):
            first = arrival_GS[g, s]
            for y in range(first, first + received_GS[g, s]):
                by_slot_Y[place], by_arrival_Y[y] = y, place
                place += 1
                if y >= first + planned_GS[g, s]:
                    extra_X[x] = y
                    x += 1
