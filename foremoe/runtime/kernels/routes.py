"""Kernels that compute the permutations of rows with known routing, in one pass over pairs."""

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.plan.split import link_slots

# Letters: N rows, G ranks, E experts, S slots of a rank, P = G*S physical slots, Z pairs of this source, Y pairs that this rank
# serves, X all numbers of all rows.


class KnownRows(NamedTuple):
    """The plan's data of the rows (int32), and the position at which each row's numbers start (int64).

    The numbers of a row are the experts of this source's pairs, followed by the output of `route_rows`, named as in `Route`:
    `by_slot_Z`, `by_token_Z`, `by_slot_Y` and `by_arrival_Y`.
    """

    begin_N: Array
    num_pairs_N: Array
    expert_NGS: Array
    split_NP: Array
    received_NGS: Array
    num_experts: int


@kernel
def route_rows(low, high, rows, numbers_X, planned_N):
    """Writes each row's permutations after its experts. Sets `planned_N` to True for rows whose counts match the plan."""
    for n in range(low, high):
        num_pairs = rows.num_pairs_N[n]
        numbers = numbers_X[rows.begin_N[n] : rows.begin_N[n + 1]]
        own, served = numbers[: 3 * num_pairs].reshape(3, num_pairs), numbers[3 * num_pairs :]
        planned_N[n] = _place_pairs(n, rows, own[0], own[1], own[2])
        if planned_N[n]:
            _order_arrivals(rows.received_NGS[n], served[: served.size // 2], served[served.size // 2 :])


@kernel
def _place_pairs(n, rows, expert_Z, by_slot_Z, by_token_Z):
    """Assigns the next place of its expert to each pair, in token order. Returns whether exactly the planned places are taken."""
    split_P, expert_GS = rows.split_NP[n], rows.expert_NGS[n]
    if split_P.sum() != expert_Z.size:
        return False
    slot_E, next_P = np.empty(rows.num_experts, np.int64), np.empty(split_P.size, np.int64)
    link_slots(expert_GS, split_P.reshape(expert_GS.shape), slot_E, next_P)
    end_P = np.cumsum(split_P)
    place_P = end_P - split_P
    for z in range(expert_Z.size):
        e = expert_Z[z]
        if e < 0 or e >= rows.num_experts or slot_E[e] < 0:
            return False
        p = slot_E[e]
        by_token_Z[z], by_slot_Z[place_P[p]] = place_P[p], z
        place_P[p] += 1
        if place_P[p] == end_P[p]:
            slot_E[e] = next_P[p]
    return True


@kernel
def _order_arrivals(received_GS, by_slot_Y, by_arrival_Y):
    """Maps the order of arrival (by source, then slot) to that of expert compute (by slot, then source)."""
    G, S = received_GS.shape
    arrival_GS, y = np.empty((G, S), np.int64), 0
    for g in range(G):
        for s in range(S):
            arrival_GS[g, s] = y
            y += received_GS[g, s]
    place = 0
    for s in range(S):
        for g in range(G):
            for y in range(arrival_GS[g, s], arrival_GS[g, s] + received_GS[g, s]):
                by_slot_Y[place], by_arrival_Y[y] = y, place
                place += 1
