"""Schedule: the order in which one rank runs its forward and backward passes, and so the order in which weights are used."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.arrays import Array, ArrayValue, frozen_array
from foremoe.errors import InputError

# Letters: X passes, U uses (one layer of one pass), M micro-steps, L layers of the plan.

# A chunk holds a layer at least, and plans number layers with int16.
_MAX_CHUNKS = int(np.iinfo(np.int16).max)


STAGES = ("recompute", "update")  # forward only with frozen weights; forward and backward


class Phase(enum.IntEnum):
    """What a pass does. A re-forward (activation recomputation) belongs to its BACKWARD."""

    FORWARD = 0
    BACKWARD = 1


class Uses(NamedTuple):
    """Every use of a layer's weights in execution order; `use_U` is ascending (pass * L + position in the pass)."""

    use_U: Array
    micro_step_U: Array
    layer_U: Array
    phase_U: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule(ArrayValue):
    """The sequence of passes on a rank.

    Attributes:
        micro_step_X: int32, position of the micro-step of each pass in the order of execution (``Plan.order_M`` says which
            micro-step of the workload that is).
        phase_X: uint8, `Phase`.
        chunk_X: int32, which of `num_chunks` equal, contiguous ranges of the plan's layers the pass covers (interleaved
            pipelines have several model chunks on a rank).
        num_chunks: number of layer ranges.
        reforward: backward passes run the forward again first.

    Law: every (micro-step, chunk) has exactly one FORWARD, at most one BACKWARD, and the BACKWARD comes later.
    """

    micro_step_X: Array
    phase_X: Array
    chunk_X: Array
    num_chunks: int = 1
    reforward: bool = False

    def __post_init__(self) -> None:
        num_passes = len(np.atleast_1d(self.micro_step_X))
        for name, dtype in (("micro_step_X", np.int32), ("phase_X", np.uint8), ("chunk_X", np.int32)):
            object.__setattr__(self, name, frozen_array(getattr(self, name), dtype, name, (num_passes,)))
        if num_passes == 0:
            raise InputError("a Schedule needs at least one pass; got none.")
        if self.num_chunks < 1 or self.chunk_X.min() < 0 or self.chunk_X.max() >= self.num_chunks:
            raise InputError(f"chunk_X must lie in [0, {self.num_chunks}); got {self.chunk_X.min()} to {self.chunk_X.max()}.")
        if self.phase_X.max() > Phase.BACKWARD or self.micro_step_X.min() < 0:
            raise InputError("a Schedule's phases are 0 (forward) or 1 (backward) and its micro-steps start at 0.")
        key_X = self.micro_step_X.astype(np.int64) * self.num_chunks + self.chunk_X
        num_keys = (int(self.micro_step_X.max()) + 1) * self.num_chunks
        position = np.arange(num_passes)
        first = {}
        for phase in Phase:
            count_K = np.bincount(key_X[self.phase_X == phase], minlength=num_keys)
            at_K = np.full(num_keys, -1)
            at_K[key_X[self.phase_X == phase]] = position[self.phase_X == phase]
            first[phase] = (count_K, at_K)
        (num_forward_K, forward_K), (num_backward_K, backward_K) = first[Phase.FORWARD], first[Phase.BACKWARD]
        if (num_forward_K != 1).any() or (num_backward_K > 1).any():
            bad = int(np.argmax((num_forward_K != 1) | (num_backward_K > 1)))
            raise InputError(
                f"micro-step {bad // self.num_chunks}, chunk {bad % self.num_chunks} has {num_forward_K[bad]} forward and "
                f"{num_backward_K[bad]} backward passes; a Schedule needs exactly one forward and at most one backward."
            )
        if ((backward_K >= 0) & (backward_K < forward_K)).any():
            bad = int(np.argmax((backward_K >= 0) & (backward_K < forward_K)))
            raise InputError(f"micro-step {bad // self.num_chunks} runs backward before forward; reorder the passes.")

    @property
    def M(self) -> int:
        """Number of micro-steps."""
        return int(self.micro_step_X.max()) + 1

    @property
    def trains(self) -> bool:
        """True if there is a backward pass."""
        return bool((self.phase_X == Phase.BACKWARD).any())

    def uses(self, num_layers: int) -> Uses:
        """All uses of the plan's `num_layers` layers in order; backward passes run their layers in reverse.

        Raises:
            InputError: `num_layers` does not divide into the schedule's chunks.
        """
        if num_layers % self.num_chunks:
            raise InputError(
                f"{num_layers} layers do not divide into {self.num_chunks} chunks; give a schedule made for these layers."
            )
        per_chunk = num_layers // self.num_chunks
        position_P = np.arange(per_chunk)
        low_X = self.chunk_X.astype(np.int64) * per_chunk
        backward_X = self.phase_X == Phase.BACKWARD
        layer_XP = low_X[:, None] + np.where(backward_X[:, None], position_P[::-1], position_P)
        use_XP = np.arange(len(low_X), dtype=np.int64)[:, None] * num_layers + position_P
        repeat = lambda a_X: np.repeat(a_X, per_chunk)  # noqa: E731
        return Uses(use_XP.ravel(), repeat(self.micro_step_X), layer_XP.ravel(), repeat(self.phase_X))

    def __getitem__(self, micro_steps: slice) -> Schedule:
        """The passes of a range of micro-steps, in the same order, numbered from 0."""
        start, stop, step = micro_steps.indices(self.M)
        if step != 1 or start >= stop:
            raise InputError(f"a Schedule of {self.M} micro-steps cannot be cut to {micro_steps}; give a non-empty range.")
        keep_X = (self.micro_step_X >= start) & (self.micro_step_X < stop)
        return Schedule(
            micro_step_X=self.micro_step_X[keep_X] - start,
            phase_X=self.phase_X[keep_X],
            chunk_X=self.chunk_X[keep_X],
            num_chunks=self.num_chunks,
            reforward=self.reforward,
        )

    @staticmethod
    def join(schedules: list[Schedule]) -> Schedule:
        """One schedule after the other, micro-steps numbered on."""
        offset_S = np.cumsum([0, *(s.M for s in schedules[:-1])])
        if len({(s.num_chunks, s.reforward) for s in schedules}) != 1:
            raise InputError("schedules with different chunks or re-forward cannot be joined; give the joined schedule itself.")
        return Schedule(
            micro_step_X=np.concatenate([s.micro_step_X + o for s, o in zip(schedules, offset_S, strict=True)]),
            phase_X=np.concatenate([s.phase_X for s in schedules]),
            chunk_X=np.concatenate([s.chunk_X for s in schedules]),
            num_chunks=schedules[0].num_chunks,
            reforward=schedules[0].reforward,
        )

    @staticmethod
    def forward_only(num_micro_steps: int) -> Schedule:
        """Recompute stage: every micro-step forward, in order."""
        return _schedule([(m, Phase.FORWARD, 0) for m in range(_at_least_one(num_micro_steps, "micro-steps"))])

    @staticmethod
    def accumulate(num_micro_steps: int, reforward: bool = False) -> Schedule:
        """Gradient accumulation without a pipeline: forward and backward of each micro-step in turn."""
        steps = range(_at_least_one(num_micro_steps, "micro-steps"))
        return _schedule([(m, phase, 0) for m in steps for phase in Phase], reforward=reforward)

    @staticmethod
    def one_f_one_b(num_micro_steps: int, pp: int, pp_rank: int, reforward: bool = False) -> Schedule:
        """1F1B of pipeline stage `pp_rank` of `pp` (PipeDream-flush, arXiv 2104.04473)."""
        _require_rank(pp, pp_rank)
        warmup = min(pp - pp_rank - 1, _at_least_one(num_micro_steps, "micro-steps"))
        return _interleave(
            [(m, 0) for m in range(num_micro_steps)], [(m, 0) for m in range(num_micro_steps)], warmup, 1, reforward
        )

    @staticmethod
    def interleaved(num_micro_steps: int, pp: int, vpp: int, pp_rank: int, reforward: bool = False) -> Schedule:
        """Interleaved 1F1B with `vpp` model chunks per rank (arXiv 2104.04473), in Megatron-Core's order.

        Raises:
            InputError: the number of micro-steps is no multiple of `pp` (the schedule is not defined then).
        """
        _require_rank(pp, pp_rank)
        if _at_least_one(vpp, "chunks") > _MAX_CHUNKS:
            raise InputError(f"{vpp} chunks are more than the {_MAX_CHUNKS} layers that plans can number; give fewer.")
        if _at_least_one(num_micro_steps, "micro-steps") % pp:
            raise InputError(f"an interleaved schedule needs micro-steps in multiples of {pp} stages; got {num_micro_steps}.")
        order = [(group * pp + i, chunk) for group in range(num_micro_steps // pp) for chunk in range(vpp) for i in range(pp)]
        warmup = min((pp - pp_rank - 1) * 2 + (vpp - 1) * pp, len(order))
        return _interleave(order, [(m, vpp - 1 - c) for m, c in order], warmup, vpp, reforward)

    @staticmethod
    def parse(text: str, num_micro_steps: int) -> Schedule:
        """Reads the command line's form: ``forward``, ``accumulate``, ``1f1b:PP,RANK`` or ``interleaved:PP,VPP,RANK``,
        each with ``+reforward`` behind it if backward runs the forward again."""
        match = re.fullmatch(
            r"(forward|accumulate|1f1b|interleaved)(?::(\d{1,9}(?:,\d{1,9})*))?(\+reforward)?", text.strip().lower(), re.ASCII
        )
        if match is not None:
            name, reforward = match[1], match[3] is not None
            args = [int(a) for a in (match[2] or "").split(",") if a]
            wanted = {"forward": 0, "accumulate": 0, "1f1b": 2, "interleaved": 3}[name]
            if len(args) == wanted and not (name == "forward" and reforward):
                if name == "forward":
                    return Schedule.forward_only(num_micro_steps)
                if name == "accumulate":
                    return Schedule.accumulate(num_micro_steps, reforward)
                if name == "1f1b":
                    return Schedule.one_f_one_b(num_micro_steps, args[0], args[1], reforward)
                return Schedule.interleaved(num_micro_steps, args[0], args[1], args[2], reforward)
        raise InputError(
            f"{text!r} is no schedule; write forward, accumulate, 1f1b:PP,RANK or interleaved:PP,VPP,RANK, "
            "with +reforward behind all but forward where activations are recomputed."
        )


def _schedule(passes: list[tuple[int, Phase, int]], num_chunks: int = 1, reforward: bool = False) -> Schedule:
    micro_step_X, phase_X, chunk_X = np.array(passes, np.int32).T
    return Schedule(micro_step_X=micro_step_X, phase_X=phase_X, chunk_X=chunk_X, num_chunks=num_chunks, reforward=reforward)


def _interleave(
    forward: list[tuple[int, int]], backward: list[tuple[int, int]], warmup: int, num_chunks: int, reforward: bool
) -> Schedule:
    passes = [(m, Phase.FORWARD, c) for m, c in forward[:warmup]]
    for (m, c), (back_m, back_c) in zip(forward[warmup:], backward, strict=False):
        passes += [(m, Phase.FORWARD, c), (back_m, Phase.BACKWARD, back_c)]
    passes += [(m, Phase.BACKWARD, c) for m, c in backward[len(forward) - warmup :]]
    return _schedule(passes, num_chunks, reforward)


def _at_least_one(value: int, what: str) -> int:
    if not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"a Schedule needs a whole number of {what}, at least one; got {value!r}.")
    return int(value)


def _require_rank(pp: int, pp_rank: int) -> None:
    if pp < 1 or not 0 <= pp_rank < pp:
        raise InputError(f"pipeline stage {pp_rank} of {pp} does not exist; stages count from 0.")
