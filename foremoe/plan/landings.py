"""Landings: what lies in the buffers of all ranks, from the start or by a copy."""

from typing import NamedTuple, Self

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.transfers import TransferList

# Letters: Z landings, D demands (an expert that a rank reads in a use), L layers, G ranks, S slots.


class Landings(NamedTuple):
    """Residents, then the copies of a plan in their order; all int64 [Z]."""

    rank_Z: Array  # whose buffer it is
    layer_Z: Array
    expert_Z: Array
    buffer_Z: Array
    need_Z: Array  # use that reads it first; -1 for residents
    after_Z: Array  # use that must be over before it lands; -1 for residents

    @classmethod
    def of(cls, t: TransferList, resident_LGS: Array | None, base: int, pool: int) -> Self:
        """The landings of copies, and of `resident_LGS` with `base` home slots and `pool` buffers for every layer."""
        columns = t.dst_C, t.layer_C, t.expert_C, t.buffer_C, t.need_C, t.after_C
        if resident_LGS is None:
            return cls(*(column_C.astype(np.int64) for column_C in columns))
        layer_X, rank_X, slot_X = np.nonzero(resident_LGS[:, :, base:] >= 0)
        start_X = np.full(len(layer_X), -1)
        residents = rank_X, layer_X, resident_LGS[layer_X, rank_X, base + slot_X], layer_X * pool + slot_X, start_X, start_X
        return cls(*(np.concatenate(pair).astype(np.int64) for pair in zip(residents, columns, strict=True)))

    def successions(self) -> tuple[Array, Array]:
        """Pairs of landings, as two indices: the second is the next to land on the buffer of the first."""
        order_Z = np.lexsort((self.need_Z, self.buffer_Z, self.rank_Z))
        this_Z, next_Z = order_Z[:-1], order_Z[1:]
        same = (self.rank_Z[this_Z] == self.rank_Z[next_Z]) & (self.buffer_Z[this_Z] == self.buffer_Z[next_Z])
        return this_Z[same], next_Z[same]

    def until_Z(self) -> Array:
        """int64 [Z]: The last use for which each is certain to stay."""
        this_Z, next_Z = self.successions()
        until_Z = np.full(len(self.rank_Z), np.iinfo(np.int64).max)
        until_Z[this_Z] = self.after_Z[next_Z]
        return until_Z

    def latest(self, rank_D: Array, layer_D: Array, expert_D: Array, use_D: Array) -> Array:
        """int64 [D]: The last landing of an expert on a rank for a use up to `use_D`; -1 where there is none."""
        num, span, wanted = len(self.rank_Z), 1, (rank_D, layer_D, expert_D, use_D)
        key_X: Array = np.zeros(num + len(rank_D), np.int64)
        for pair in zip((self.rank_Z, self.layer_Z, self.expert_Z, self.need_Z), wanted, strict=True):
            column_X = np.concatenate(pair).astype(np.int64) + 1
            span = int(column_X.max(initial=0)) + 1
            key_X = key_X * span + column_X
        if not num:
            return np.full(len(rank_D), -1)
        order_Z = np.argsort(key_X[:num], kind="stable")
        last_D = np.searchsorted(key_X[order_Z], key_X[num:], side="right") - 1
        landing_D = order_Z[last_D]
        found_D = (last_D >= 0) & (key_X[landing_D] // span == key_X[num:] // span)
        return np.where(found_D, landing_D, -1)
