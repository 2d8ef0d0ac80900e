"""Numbers of messages in node dispatch, counted from individual tokens if the routing of every token is known."""

import functools
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.plan.plan import Plan
from foremoe.plan.split import split_over_sources
from foremoe.problem.pricing import problem_rows
from foremoe.problem.problem import Problem

# Letters: T tokens, L layers, K top-k, N rows, G ranks, V nodes, E experts, P physical slots, X cells.


def counted_messages(problem: Problem, plan: Plan) -> tuple[Array, Array]:
    """Counts the messages that every rank sends and receives in one dispatch of a row, over peer links and over RDMA.

    Both arrays are int32 [N, 2, G]. As in `foremoe.runtime.remap`, the tokens of a source that chose an expert are sent to the
    expert's slots in order.

    Raises:
        InputError: The tokens do not match the problem's load.
    """
    routed, node_G = problem.routed, problem.cluster.node_of_rank_G
    forward_VG = problem_rows(problem).ranks.forward_VG
    if routed is None or problem.load_NGE is None:
        raise InputError("counting messages needs the problem's routed tokens and its counts by source rank; give both.")
    column_L = np.searchsorted(routed.moe_layer_L, problem.moe_layer_L)
    if (routed.moe_layer_L[column_L.clip(max=len(routed.moe_layer_L) - 1)] != problem.moe_layer_L).any():
        raise InputError("the routed tokens lack some of the problem's layers; give those of the trace that was counted.")
    order_T, first_X = routed.cells(problem.M, problem.G)
    # Empty slots come after those of all experts.
    expert_NP = np.where(plan.expert_NGS < 0, problem.E, plan.expert_NGS).reshape(problem.N, -1)
    slot_NP = np.argsort(expert_NP, axis=1, kind="stable")
    sorted_NP = np.take_along_axis(expert_NP, slot_NP, axis=1)
    bounds_NX = np.stack([np.searchsorted(expert_P, np.arange(problem.E + 1)) for expert_P in sorted_NP])
    peer_N2G, rdma_N2G = np.zeros((2, problem.N, 2, problem.G), np.int32)
    missed_N = np.zeros(problem.N, np.int64)
    for source in range(problem.G):
        split_NP = split_over_sources(
            problem.load_NGE, plan.expert_NGS, plan.quota_NGS, node_G, source, problem.counts().demand_NVE
        )  # fmt: skip
        rows = _Rows(
            routed.topk_TLK, column_L, order_T, first_X, split_NP, slot_NP, bounds_NX, node_G, forward_VG,
            peer_N2G, rdma_N2G, missed_N,
        )  # fmt: skip
        for_rows(functools.partial(_count_rows, source, rows), problem.N, whole=True)
    if missed_N.any():
        raise InputError(f"load and routed tokens differ by {int(missed_N.sum())} pairs; give the tokens that were counted.")
    return peer_N2G, rdma_N2G


class _Rows(NamedTuple):
    """Input and output of `_count_rows`."""

    topk_TLK: Array
    column_L: Array
    order_T: Array
    first_X: Array
    split_NP: Array
    slot_NP: Array  # physical slots by expert
    bounds_NX: Array  # first index of each expert in `slot_NP`
    node_G: Array
    forward_VG: Array
    peer_N2G: Array
    rdma_N2G: Array
    missed_N: Array


@kernel
def _count_rows(source, rows, low, high):
    """Adds messages of the tokens of rank `source` to rows [low, high). `missed_N` counts pairs and places without a match."""
    L, G, E, K = rows.column_L.size, rows.node_G.size, rows.bounds_NX.shape[1] - 1, rows.topk_TLK.shape[2]
    at_E, left_E = np.empty(E, np.int64), np.empty(E, np.int64)
    rank_K, seen_G = np.empty(K, np.int64), np.full(G, -1, np.int64)
    num_slots = rows.split_NP.shape[1] // G
    stamp = 0
    for n in range(low, high):
        for e in range(E):
            at_E[e], left_E[e] = rows.bounds_NX[n, e] - 1, 0
        cell, layer = n // L * G + source, rows.column_L[n % L]
        placed = 0
        for i in range(rows.first_X[cell], rows.first_X[cell + 1]):
            t, num = rows.order_T[i], 0
            stamp += 1
            for k in range(K):
                e = np.int64(rows.topk_TLK[t, layer, k])
                while left_E[e] == 0 and at_E[e] + 1 < rows.bounds_NX[n, e + 1]:
                    at_E[e] += 1
                    left_E[e] = rows.split_NP[n, rows.slot_NP[n, at_E[e]]]
                if left_E[e] == 0:
                    rows.missed_N[n] += 1
                    continue
                left_E[e] -= 1
                placed += 1
                g = rows.slot_NP[n, at_E[e]] // num_slots
                if seen_G[g] != stamp:
                    seen_G[g] = stamp
                    rank_K[num] = g
                    num += 1
            _send(n, source, rank_K[:num], rows)
        rows.missed_N[n] += rows.split_NP[n].sum() - placed


@inner_kernel
def _send(n, source, rank_K, rows):
    """Adds the messages of a token to these ranks. In other nodes, the first rank that gets it forwards it."""
    here, peer_2G, rdma_2G = rows.node_G[source], rows.peer_N2G[n], rows.rdma_N2G[n]
    for k in range(rank_K.size):
        g, v = rank_K[k], rows.node_G[rank_K[k]]
        sender = rows.forward_VG[v, source]
        if v != here:
            first = True
            for j in range(k):
                first = first and rows.node_G[rank_K[j]] != v
            if first:
                rdma_2G[0, source] += 1
                rdma_2G[1, sender] += 1
        if g != sender:
            peer_2G[0, sender] += 1
            peer_2G[1, g] += 1
