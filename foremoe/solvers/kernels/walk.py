"""Kernels of `Transitions`: plan a layer's micro-steps one after the other, each with what those before left in the buffers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.solvers.kernels.chain import level_goal
from foremoe.solvers.kernels.keep import fill_row, held_of, level_row, may_serve, price_kept, put, use_buffers
from foremoe.solvers.kernels.price import COPY_PEER, REPLICA_RDMA, demand_row

# Letters: M micro-steps, N rows, G ranks, S slots per rank, R redundant slots, E experts, V nodes, P buffers of a rank, X hints,
# O options of a slot, K rates.


class Layer(NamedTuple):
    """A layer's rows and what they are priced with."""

    load_NE: Array  # int32, pairs of every row of the problem
    load_NGE: Array  # int32, the same by source rank; read if `located`
    located: bool  # whether source ranks are known
    node_G: Array  # node of every rank
    node_only: bool  # whether replicas stay inside their home's node
    num_base: int  # home slots per rank
    rate_NK: Array  # float64, rates of every row; see `price`
    weight_2: Array  # see `price_kept`
    hint_XNGR: Array  # int16, experts that may be worth a slot, -1 none


class Row(NamedTuple):
    """One row of a layer: loads, largest rank load to aim at, rates, homes, and busy home slots of every rank.

    `free_K` are the rates with copies, gradients and replicas for nothing.
    """

    load_E: Array
    load_GE: Array
    demand_VE: Array
    goal: int
    rate_K: Array
    free_K: Array
    home_E: Array
    busy_G: Array


class Slots(NamedTuple):
    """A row's placement: expert and quota of every slot, and load of every rank; int16, int32 and int64."""

    expert_GS: Array
    quota_GS: Array
    load_G: Array


class Buffers(NamedTuple):
    """Expert in every buffer, -1 none, and when each was used last; int64."""

    expert_GP: Array
    last_GP: Array


@kernel
def copy_slots(source, target):  # type: ignore[no-untyped-def]
    """Overwrites the `Slots` `target`."""
    target.expert_GS[:], target.quota_GS[:], target.load_G[:] = source.expert_GS, source.quota_GS, source.load_G


@kernel
def price(layer, row, buffers, slots):  # type: ignore[no-untyped-def]
    """Seconds of a placement where what the buffers hold is not sent."""
    return price_kept(
        row.load_GE, row.demand_VE, layer.node_G, layer.num_base, row.rate_K, row.free_K, layer.weight_2, row.home_E, row.busy_G,
        buffers.expert_GP, slots.expert_GS, slots.quota_GS, slots.load_G,
    )  # fmt: skip


@kernel
def row_of(layer, n, given, demand_VE, home_E):  # type: ignore[no-untyped-def]
    """Row n as a `Row`, over the scratch `demand_VE` and `home_E`; fills in the loads of the ranks of its `Slots` `given`."""
    load_E, load_GE, rate_K = layer.load_NE[n], np.empty((0, 0), np.int32), layer.rate_NK[n]
    (G, S), node_G = given.expert_GS.shape, layer.node_G
    free_K = rate_K.copy()
    free_K[COPY_PEER : REPLICA_RDMA + 1] = 0.0
    if layer.located:
        load_GE = layer.load_NGE[n]
        demand_row(load_GE, node_G, demand_VE)
    busy_G, home_load_G = np.zeros(G, np.int64), np.zeros(G, np.int64)
    for g in range(G):
        given.load_G[g] = given.quota_GS[g].sum()
        for b in range(layer.num_base):
            e = given.expert_GS[g, b]
            home_E[e] = g * S + b
            busy_G[g] += load_E[e] > 0
            home_load_G[g] += load_E[e]
    goal = level_goal(0.0, layer.node_only, node_G, home_load_G)
    return Row(load_E, load_GE, demand_VE, goal, rate_K, free_K, home_E, busy_G)


@kernel
def start_from_held(layer, row, buffers, pick_GR, best_s, slots, tried):  # type: ignore[no-untyped-def]
    """The price after replacing `slots` by bare homes with the experts `pick_GR`, balanced, where that is below `best_s`."""
    none_VE = np.empty((0, row.load_E.size), np.int64)
    given_expert_GS = slots.expert_GS.copy()
    for nearer in range(2 if layer.located else 1):
        tried.expert_GS[:] = given_expert_GS
        wish_VE = row.demand_VE if nearer == 1 else none_VE
        fill_row(
            row.goal, row.load_E, wish_VE, layer.node_G, layer.num_base, row.home_E, pick_GR, tried.expert_GS, tried.quota_GS,
            tried.load_G,
        )  # fmt: skip
        this_s = price(layer, row, buffers, tried)
        if this_s < best_s:
            best_s = this_s
            copy_slots(tried, slots)
    return best_s


@kernel
def descend_row(layer, row, n, buffers, best_s, slots, tried):  # type: ignore[no-untyped-def]
    """Gives one redundant slot after the other what its rank holds or a hint names, or nothing, where that is cheaper; in place.

    Args:
        best_s: price of `slots`.
        tried: scratch.

    Returns:
        The price reached.
    """
    (G, S), hint_XGR = slots.expert_GS.shape, layer.hint_XNGR[:, n]
    num_base, P = layer.num_base, buffers.expert_GP.shape[1]
    R = S - num_base
    num_options = P + hint_XGR.shape[0] * R + 1
    tried_O = np.empty(num_options, np.int64)
    for g in range(G):
        for s in range(num_base, S):
            num = 0
            for o in range(num_options):
                e = np.int64(-1)
                if o < P:
                    e = np.int64(buffers.expert_GP[g, o])
                elif o < num_options - 1:
                    e = np.int64(hint_XGR[(o - P) // R, g, (o - P) % R])
                if (tried_O[:num] == e).any() or (slots.expert_GS[g, num_base:] == e).any():
                    continue
                if e >= 0 and not may_serve(g, e, row.load_E, layer.node_only, layer.node_G, S, row.home_E):
                    continue
                tried_O[num] = e
                num += 1
                copy_slots(slots, tried)
                put(g, s, e, row.demand_VE, layer.node_G, row.home_E, tried.expert_GS, tried.quota_GS, tried.load_G)
                level_row(row.goal, num_base, tried.expert_GS, tried.quota_GS, tried.load_G)
                this_s = price(layer, row, buffers, tried)
                if this_s < best_s:
                    best_s = this_s
                    copy_slots(tried, slots)
    return best_s


@kernel
def walk_layer(layer, row_M, invest, start_GP, given_NGS, found_NGS):  # type: ignore[no-untyped-def]
    """Plans the rows of one layer in their order.

    Each row takes the cheapest of its given placement, what the buffers hold, and what `descend_row` makes of the cheaper one.
    Where all rows so far cost more than as given, each with what the given ones before it leave, they are taken back.

    Args:
        layer: `Layer`.
        row_M: int64, the layer's rows in their order.
        invest: the first row takes the experts of the last hint whatever they cost, and nothing is taken back.
        start_GP: int64, the experts in a rank's buffers before the first row, -1 none.
        given_NGS: experts (int16) and quotas (int32) of the placement.
        found_NGS: the same, overwritten in these rows.
    """
    (G, S), E = given_NGS[0].shape[1:], layer.load_NE.shape[1]
    # What the given placements would leave in the buffers, and what those found leave.
    given_buffers = Buffers(start_GP.copy(), np.full(start_GP.shape, -1, np.int64))
    buffers = Buffers(start_GP.copy(), np.full(start_GP.shape, -1, np.int64))
    given_total_s, total_s = 0.0, 0.0
    home_E, pick_GR = np.empty(E, np.int64), np.empty((G, S - layer.num_base), np.int64)
    demand_VE = np.empty((layer.node_G.max() + 1 if layer.located else 0, E), np.int64)
    given_load_G, load_G = np.empty(G, np.int64), np.empty(G, np.int64)
    tried = Slots(np.empty((G, S), np.int16), np.empty((G, S), np.int32), np.empty(G, np.int64))
    for t in range(row_M.size):
        n = row_M[t]
        given, slots = Slots(given_NGS[0][n], given_NGS[1][n], given_load_G), Slots(found_NGS[0][n], found_NGS[1][n], load_G)
        row = row_of(layer, n, given, demand_VE, home_E)
        given_total_s += price(layer, row, given_buffers, given)
        best_s = price(layer, row, buffers, given)
        hint_GR = layer.hint_XNGR[-1, n]
        if invest and t == 0 and (hint_GR >= 0).any():
            best_s = np.inf
            pick_GR[:] = hint_GR
        else:
            held_of(row.load_E, layer.node_only, layer.node_G, S, home_E, buffers.expert_GP, pick_GR)
        copy_slots(given, slots)
        if (pick_GR >= 0).any():
            best_s = start_from_held(layer, row, buffers, pick_GR, best_s, slots, tried)
        total_s += descend_row(layer, row, n, buffers, best_s, slots, tried)
        use_buffers(t, layer.num_base, given.expert_GS, given.quota_GS, given_buffers.expert_GP, given_buffers.last_GP)
        use_buffers(t, layer.num_base, slots.expert_GS, slots.quota_GS, buffers.expert_GP, buffers.last_GP)
        if total_s > given_total_s and not invest:
            for i in range(t + 1):
                found_NGS[0][row_M[i]], found_NGS[1][row_M[i]] = given_NGS[0][row_M[i]], given_NGS[1][row_M[i]]
            total_s = given_total_s
            buffers.expert_GP[:], buffers.last_GP[:] = given_buffers.expert_GP, given_buffers.last_GP


@kernel
def distances(load_MLE, out_MM):  # type: ignore[no-untyped-def]
    """Fills `out_MM`: by how much the shares of experts differ between two micro-steps, summed over layers."""
    M, L, E = load_MLE.shape
    share_MLE = np.zeros((M, L, E))
    for m in range(M):
        for l in range(L):  # noqa: E741
            share_MLE[m, l] = load_MLE[m, l] / max(1, load_MLE[m, l].sum())
    for m in range(M):
        for k in range(m):
            total = 0.0
            for l in range(L):  # noqa: E741
                for e in range(E):
                    total += abs(share_MLE[m, l, e] - share_MLE[k, l, e])
            out_MM[m, k] = out_MM[k, m] = total


@kernel
def shortest_path(apart_MM):  # type: ignore[no-untyped-def]
    """int64 [M]: an order with little distance from each micro-step to the next: nearest neighbours from the best start, then
    stretches reversed while that helps (2-opt)."""
    M = apart_MM.shape[0]
    best_M, this_M, left_M = np.arange(M), np.arange(M), np.empty(M, np.bool_)
    least = np.inf
    for start in range(M):
        left_M[:] = True
        left_M[start], this_M[0], total = False, start, 0.0
        for t in range(1, M):
            nearest = -1
            for m in range(M):
                if left_M[m] and (nearest < 0 or apart_MM[this_M[t - 1], m] < apart_MM[this_M[t - 1], nearest]):
                    nearest = m
            total += apart_MM[this_M[t - 1], nearest]
            left_M[nearest], this_M[t] = False, nearest
        if total < least:
            least = total
            best_M[:] = this_M
    margin = 1e-9 * least
    improved = True
    while improved:
        improved = False
        for i in range(M):
            for j in range(i + 1, M):
                gain = 0.0
                if i > 0:
                    gain += apart_MM[best_M[i - 1], best_M[i]] - apart_MM[best_M[i - 1], best_M[j]]
                if j + 1 < M:
                    gain += apart_MM[best_M[j], best_M[j + 1]] - apart_MM[best_M[i], best_M[j + 1]]
                if gain > margin:
                    best_M[i : j + 1] = best_M[i : j + 1][::-1].copy()
                    improved = True
    return best_M
