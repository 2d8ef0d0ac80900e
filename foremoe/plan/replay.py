"""Replay: the contents of every buffer when a use reads it. They are found by following a plan's copies in order."""

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.problem.schedule import Uses

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: C copies, U uses, N rows, L layers, E experts, G ranks, B base slots, R redundant slots.

MISSING, GONE = 1, 2


class Replay(NamedTuple):
    """The contents of buffers when they are read, and the faults of copies.

    Attributes:
        early_C: bool, True for a copy that is overwritten while the use that needs it may still read it.
        read_UGR: Code for what a redundant slot finds when it serves pairs, uint8. 0 means its expert, `MISSING` means nothing,
            and `GONE` means contents that may have been overwritten.
    """

    early_C: Array
    read_UGR: Array

    @classmethod
    def of(cls, plan: "Plan", uses: Uses) -> Self:
        """Replays the copies of a plan. The columns of the copies must be in range and in order."""
        t, B, (L, G, S) = plan.transfers, plan.B, plan.expert_MLGS.shape[1:]
        copies = _Copies(t.need_C, t.after_C, t.dst_C, t.layer_C, t.expert_C, t.buffer_C)
        row_U = uses.micro_step_U.astype(np.int64) * L + uses.layer_U
        needed_NGR = np.where(plan.quota_NGS[..., B:] > 0, plan.expert_NGS[..., B:], np.int16(-1))
        until_C, early_C = _overwritten(copies, G, plan.header.num_buffers)
        found = cls(early_C, np.zeros((len(row_U), G, S - B), np.uint8))
        _read(copies, row_U, needed_NGR, until_C, np.full((L, plan.E, G), -1, np.int32), found)
        return found


class _Copies(NamedTuple):
    need_C: Array
    after_C: Array
    dst_C: Array
    layer_C: Array
    expert_C: Array
    buffer_C: Array


@kernel
def _overwritten(copies, num_ranks, num_buffers):
    """Returns the last use for which each copy is certain to be in its buffer (int64 [C]), and `Replay.early_C`."""
    num = copies.need_C.size
    until_C, early_C = np.full(num, np.iinfo(np.int64).max), np.zeros(num, np.bool_)
    last_GB = np.full((num_ranks, num_buffers), -1, np.int64)
    for c in range(num):
        before = last_GB[copies.dst_C[c], copies.buffer_C[c]]
        if before >= 0:
            until_C[before] = copies.after_C[c]
            need = copies.need_C[before]
            early_C[before] |= copies.after_C[c] < need
            early_C[c] |= need == copies.need_C[c]
        last_GB[copies.dst_C[c], copies.buffer_C[c]] = c
    return until_C, early_C


@kernel
def _read(copies, row_U, needed_NGR, until_C, last_LEG, found):
    """Fills `found.read_UGR`. `last_LEG` is the last copy of an expert to a rank, or -1."""
    num, L = copies.need_C.size, last_LEG.shape[0]
    end = 0
    for u in range(row_U.size):
        while end < num and copies.need_C[end] == u:
            last_LEG[copies.layer_C[end], copies.expert_C[end], copies.dst_C[end]] = end
            end += 1
        layer = row_U[u] % L
        for g in range(needed_NGR.shape[1]):
            for r in range(needed_NGR.shape[2]):
                e = needed_NGR[row_U[u], g, r]
                if e >= 0:
                    found.read_UGR[u, g, r] = _state(last_LEG[layer, e, g], u, until_C, found)


@kernel
def _state(held, u, until_C, found):
    """Returns what the reader of copy `held` finds at use `u`. A copy overwritten too early is a fault there, not here."""
    if held < 0:
        return MISSING
    if until_C[held] >= u or found.early_C[held]:
        return 0
    return GONE
