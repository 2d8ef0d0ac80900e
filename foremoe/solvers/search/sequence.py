"""Rows of resident slots: each is searched with what the rows of its layer before it left in the slots, which costs no copy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import inner_kernel, kernel
from foremoe.problem.rows import mark_held
from foremoe.solvers.rows import Placed
from foremoe.solvers.search.descend import empty_memory, search_row

# Letters: M micro-steps, L layers, N rows, G ranks, S slots per rank, E experts, P buffers of a rank.


class Buffers(NamedTuple):
    """Buffers of every rank for one layer."""

    expert_GP: Array  # int64, the expert in each, -1 none
    last_GP: Array  # int64, the row that read it last, -1 none


@inner_kernel
def _place(e, buffer_P):
    """Which of a rank's buffers holds an expert; -1: none."""
    for p in range(buffer_P.size):
        if buffer_P[p] == e:
            return p
    return -1


@kernel
def use_buffers(time, num_base, expert_GS, quota_GS, buffers):
    """Puts the replicas with a quota of row number `time` of a sequence into the least recently used buffers; in place."""
    buffer_GP, last_GP = buffers
    G, S = expert_GS.shape
    for g in range(G):
        for s in range(num_base, S):
            p = _place(expert_GS[g, s], buffer_GP[g])
            if quota_GS[g, s] > 0 and p >= 0:
                last_GP[g, p] = time
        for s in range(num_base, S):
            if quota_GS[g, s] == 0 or _place(expert_GS[g, s], buffer_GP[g]) >= 0:
                continue
            victim = -1
            for p in range(buffer_GP.shape[1]):
                if last_GP[g, p] == time or (victim >= 0 and buffer_GP[g, victim] < 0):
                    continue
                if victim < 0 or buffer_GP[g, p] < 0 or last_GP[g, p] < last_GP[g, victim]:
                    victim = p
            buffer_GP[g, victim], last_GP[g, victim] = expert_GS[g, s], time


@kernel
def search_layers(low, high, rows, estimated, choice, start_LGP, expert_NGS, quota_NGS):
    """Starts and searches all rows of layers [low, high), in place, micro-step by micro-step.

    `start_LGP` are the experts in every rank's buffers before the first, -1 none.
    """
    G, S = expert_NGS.shape[1:]
    num_base, L = rows.num_base, start_LGP.shape[0]
    memory = empty_memory(rows, S - num_base)
    for layer in range(low, high):
        buffers = Buffers(start_LGP[layer].copy(), np.full(start_LGP[layer].shape, -1, np.int64))
        for m in range(expert_NGS.shape[0] // L):
            n = m * L + layer
            held_GP = buffers.expert_GP
            mark_held(True, held_GP, held_GP >= 0, memory.held_EG)
            best = Placed(expert_NGS[n], quota_NGS[n], np.empty(G, np.int64))
            search_row(n, rows, estimated, choice, memory, best)
            mark_held(False, held_GP, held_GP >= 0, memory.held_EG)
            use_buffers(m, num_base, best.expert_GS, best.quota_GS, buffers)
