"""Replay: what lies in every buffer when a use reads it, copy by copy in the order of a plan."""

from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Uses

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: C copies, U uses, X residents, N rows, L layers, E experts, G ranks, B base slots, R redundant slots, Z landings
# (residents, then copies).

MISSING, GONE = 1, 2


class Replay(NamedTuple):
    """What replaying a plan's copies shows.

    Attributes:
        early_C: bool, copies that are overwritten while their own use may still read them.
        read_UGR: uint8, what a redundant slot that serves finds: 0 its expert, `MISSING` nothing, `GONE` what may be overwritten.
        relay_C: bool, copies from a rank that is not the home.
        sent_C: uint8, the same for the source of a relay; 0 for other copies.
        parent_C: int64, copy that brought a relay's expert to its source; below 0: a resident, or none.
    """

    early_C: Array
    read_UGR: Array
    relay_C: Array
    sent_C: Array
    parent_C: Array

    @classmethod
    def of(cls, plan: "Plan", uses: Uses) -> Self:
        """Replays the copies of a plan whose columns are in range and in order."""
        t, B, (L, G, S) = plan.transfers, plan.B, plan.expert_MLGS.shape[1:]
        relay_C = (t.link_C != Link.HOST) & (t.src_C != plan.home_LE[t.layer_C, t.expert_C] // B)
        resident_LGR = np.full((L, G, S - B), -1, np.int16) if plan.resident_LGS is None else plan.resident_LGS[..., B:]
        layer_X, rank_X, slot_X = np.nonzero(resident_LGR >= 0)
        pool = plan.header.slots.num_buffers(S - B, 1)
        start = _Start(layer_X, rank_X, resident_LGR[layer_X, rank_X, slot_X].astype(np.int64), layer_X * pool + slot_X)
        copies = _Copies(t.need_C, t.after_C, t.dst_C, t.src_C, t.layer_C, t.expert_C, t.buffer_C, relay_C)
        row_U = plan.order_M[uses.micro_step_U].astype(np.int64) * L + uses.layer_U
        needed_NGR = np.where(plan.quota_NGS[..., B:] > 0, plan.expert_NGS[..., B:], np.int16(-1))
        until_Z, early_C = _overwritten(start, copies, G, plan.header.slots.num_buffers(S - B, L))
        found = cls(early_C, np.zeros((len(row_U), G, S - B), np.uint8), relay_C, np.zeros(len(t), np.uint8), np.full(len(t), -1))
        _read(start, copies, row_U, needed_NGR, until_Z, np.full((L, plan.E, G), -1, np.int32), found)
        return found


class _Start(NamedTuple):
    """What resident slots hold at the start."""

    layer_X: Array
    rank_X: Array
    expert_X: Array
    buffer_X: Array


class _Copies(NamedTuple):
    need_C: Array
    after_C: Array
    dst_C: Array
    src_C: Array
    layer_C: Array
    expert_C: Array
    buffer_C: Array
    relay_C: Array


@kernel
def _overwritten(start, copies, num_ranks, num_buffers):
    """The last use for which each landing is certain to stay, int64 [Z], and `Replay.early_C`."""
    num_start, num = start.layer_X.size, copies.need_C.size
    until_Z, early_C = np.full(num_start + num, np.iinfo(np.int64).max), np.zeros(num, np.bool_)
    last_GB = np.full((num_ranks, num_buffers), -1, np.int64)
    for x in range(num_start):
        last_GB[start.rank_X[x], start.buffer_X[x]] = x
    for c in range(num):
        before = last_GB[copies.dst_C[c], copies.buffer_C[c]]
        if before >= 0:
            until_Z[before] = copies.after_C[c]
        if before >= num_start:
            need = copies.need_C[before - num_start]
            early_C[before - num_start] |= copies.after_C[c] < need
            early_C[c] |= need == copies.need_C[c]
        last_GB[copies.dst_C[c], copies.buffer_C[c]] = num_start + c
    return until_Z, early_C


@kernel
def _read(start, copies, row_U, needed_NGR, until_Z, last_LEG, found):
    """Fills all of `found` but `early_C`; `last_LEG` is the last landing of an expert on a rank, -1 none so far."""
    num_start, num, L = start.layer_X.size, copies.need_C.size, last_LEG.shape[0]
    for x in range(num_start):
        last_LEG[start.layer_X[x], start.expert_X[x], start.rank_X[x]] = x
    end = 0
    for u in range(row_U.size):
        begin = end
        while end < num and copies.need_C[end] == u:
            last_LEG[copies.layer_C[end], copies.expert_C[end], copies.dst_C[end]] = num_start + end
            end += 1
        layer = row_U[u] % L
        for g in range(needed_NGR.shape[1]):
            for r in range(needed_NGR.shape[2]):
                e = needed_NGR[row_U[u], g, r]
                if e >= 0:
                    found.read_UGR[u, g, r] = _state(last_LEG[layer, e, g], u, num_start, until_Z, found)
        for c in range(begin, end):
            if copies.relay_C[c]:
                held = last_LEG[copies.layer_C[c], copies.expert_C[c], copies.src_C[c]]
                found.sent_C[c], found.parent_C[c] = _state(held, u, num_start, until_Z, found), held - num_start


@kernel
def _state(held, u, num_start, until_Z, found):
    """What the reader of landing `held` finds at use `u`; one that is overwritten too early counts there, not here."""
    if held < 0:
        return MISSING
    if until_Z[held] >= u or (held >= num_start and found.early_C[held - num_start]):
        return 0
    return GONE
