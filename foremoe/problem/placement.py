"""Placement: the result of a solver, with one entry per row (micro-step, layer)."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.base.errors import InputError

# Letters: N rows (micro-step major), G ranks, S = B + R slots per rank.


class Stop(enum.IntEnum):
    """The reason why a row's search stopped."""

    DONE = 0  # a heuristic ran to its end
    OPTIMAL = 1  # optimality is proven
    LIMIT = 2  # a node or time limit was reached; the row holds the best placement found
    CANCELLED = 3  # the caller cancelled; the row holds the placement from which it started
    FELL_BACK = 4  # the solver failed or was worse; the row holds the placement of an earlier level


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement(ArrayValue):
    """The logical expert in every physical slot, and the number of pairs that the slot serves.

    Attributes:
        expert_NGS: Logical expert in each slot, int16, or -1 for an empty slot. Slots [0, B) are base slots, which hold the homes
            unless the solver moves homes. Slots [B, S) are redundant.
        quota_NGS: Number of (token, expert) pairs that each slot serves, int32. If None, the split level chooses the quotas.
        bound_N: Lower bound of the objective of each row that the solver has proven, float64, or None.
        stop_N: `Stop` of each row, uint8. None means that all rows are DONE.

    In canonical form, a rank holds an expert at most once, and no replica is on its own home rank. A redundant slot is empty if
    and only if its quota is 0. Base slots may have quota 0. An expert's quotas sum to its load.
    """

    expert_NGS: Array = array(np.int16)
    quota_NGS: Array | None = array(np.int32, optional=True)
    bound_N: Array | None = array(np.float64, optional=True)
    stop_N: Array | None = array(np.uint8, optional=True)

    @property
    def quotas_NGS(self) -> Array:
        """The array `quota_NGS`. Raises InputError if the split level has not filled it yet."""
        if self.quota_NGS is None:
            raise InputError("this placement has no quotas yet; run a split solver on it first.")
        return self.quota_NGS

    def load_NG(self) -> Array:
        """Returns the number of pairs that each rank serves, int64 [N, G]."""
        return np.einsum("ngs->ng", self.quotas_NGS, dtype=np.int64)  # sum(axis=2) takes three times as long

    def where(self, mask_N: Array, other: Placement) -> Placement:
        """Returns the rows of `self` where `mask_N` is true, and the rows of `other` elsewhere."""

        def pick(a: Array, b: Array) -> Array:
            return np.where(mask_N.reshape(-1, *[1] * (a.ndim - 1)), a, b)

        return Placement(
            expert_NGS=pick(self.expert_NGS, other.expert_NGS),
            quota_NGS=pick(self.quotas_NGS, other.quotas_NGS),
            bound_N=pick(_or(self.bound_N, mask_N, -np.inf), _or(other.bound_N, mask_N, -np.inf)),
            stop_N=pick(_or(self.stop_N, mask_N, Stop.DONE), _or(other.stop_N, mask_N, Stop.DONE)),
        )


def _or(array: Array | None, mask_N: Array, fill: float) -> Array:
    return np.full(mask_N.shape, fill) if array is None else array


def repeated(expert_GS: Array) -> Array:
    """Returns True for ranks that hold an expert more than once. The last axis has a rank's slots, and -1 marks empty ones."""
    sorted_GS = np.sort(expert_GS, axis=-1)
    return ((sorted_GS[..., 1:] == sorted_GS[..., :-1]) & (sorted_GS[..., 1:] >= 0)).any(axis=-1)
