"""Kernels that find the slots of all pairs in rows with known routing. They serve dispatchers that communicate on their own."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.plan.split import link_slots

# Letters: N rows, G ranks, E experts, S slots of a rank, P = G*S physical slots, T tokens and K top-k of this source.


class SlottedTables(NamedTuple):
    """Input (int32) and the start of each row's numbers (int64), which are experts [T, K], slots [T, K] and holes [T]."""

    begin_N: Array
    num_tokens_N: Array
    expert_NGS: Array
    split_NP: Array
    num_experts: int
    num_topk: int


@kernel
def slot_rows(low, high, rows, numbers_X, planned_N, num_known_N, num_holes_N):
    """Writes each row's slots and holes after its experts, counts both, and compares the pairs of each slot with the plan."""
    E, K = rows.num_experts, rows.num_topk
    slot_E, next_P, seen_E = np.empty(E, np.int64), np.empty(rows.split_NP.shape[1], np.int64), np.empty(E, np.int64)
    for n in range(low, high):
        T, left_P = rows.num_tokens_N[n], rows.split_NP[n].copy()
        numbers = numbers_X[rows.begin_N[n] : rows.begin_N[n + 1]]
        expert_TK, slot_TK = numbers[: T * K].reshape(T, K), numbers[T * K : 2 * T * K].reshape(T, K)
        hole_T = numbers[2 * T * K :]
        link_slots(rows.expert_NGS[n], left_P.reshape(rows.expert_NGS[n].shape), slot_E, next_P)
        seen_E[:] = -1
        num_holes, num_known, fits = 0, 0, True
        for t in range(T):
            known = True
            for k in range(K):
                known &= 0 <= expert_TK[t, k] < E
            if not known:
                hole_T[num_holes] = t
                num_holes += 1
            for k in range(K):
                e = expert_TK[t, k]
                slot_TK[t, k] = -1
                if not known:
                    expert_TK[t, k] = k
                elif seen_E[e] != t:  # an expert serves a token only once
                    seen_E[e] = t
                    p = slot_E[e]
                    fits &= p >= 0
                    if p >= 0:
                        slot_TK[t, k] = p
                        num_known += 1
                        left_P[p] -= 1
                        if left_P[p] == 0:
                            slot_E[e] = next_P[p]
        planned_N[n] = fits and num_known == rows.split_NP[n].sum()
        num_known_N[n], num_holes_N[n] = num_known, num_holes
