"""Schedule: the order in which one rank runs its forward and backward passes, and thus the order in which it uses weights."""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.base.errors import InputError
from foremoe.base.fields import flag, whole

# Letters: X passes, U uses (one layer of one pass), M micro-steps, L layers of the plan.

# A chunk has at least one layer, and plans store layers as int16.
_MAX_CHUNKS = int(np.iinfo(np.int16).max)


class Phase(enum.IntEnum):
    """The purpose for which a pass uses a layer's weights.

    Activation recomputation of a single layer is part of its BACKWARD use, because the weights are kept. If layers are recomputed
    in blocks, all layers of a block are recomputed before its backward pass begins, and these uses are REFORWARD.
    """

    FORWARD = 0
    BACKWARD = 1
    REFORWARD = 2


class Uses(NamedTuple):
    """All uses of layers' weights in execution order. `use_U` counts them from 0, and `pass_U` is the pass of each use."""

    use_U: Array
    micro_step_U: Array
    layer_U: Array
    phase_U: Array
    pass_U: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule(ArrayValue):
    """The sequence of passes on a rank.

    Every combination of micro-step and chunk has exactly one FORWARD pass and at most one BACKWARD pass after it.

    Attributes:
        micro_step_X: Micro-step of each pass, int32.
        phase_X: `Phase` of each pass, uint8.
        chunk_X: Chunk of each pass, int32. A chunk is one of `num_chunks` contiguous ranges of the plan's layers. Interleaved
            pipelines have several chunks on a rank.
        num_chunks: Number of chunks.
        reforward: Whether a backward pass first recomputes the forward pass.
        chunk_L: Chunk of every layer, int32, ascending. Required if chunks differ in their number of MoE layers. Defaults to
            equal chunks.
        block_L: Block of every layer, int32, ascending. With `reforward`, layers of a block are recomputed together. By default,
            each layer is recomputed alone.
    """

    micro_step_X: Array = array(np.int32)
    phase_X: Array = array(np.uint8)
    chunk_X: Array = array(np.int32)
    num_chunks: int = 1
    reforward: bool = False
    chunk_L: Array | None = array(np.int32, optional=True)
    block_L: Array | None = array(np.int32, optional=True)

    def __post_init__(self) -> None:
        self.freeze()
        whole(self.num_chunks, "num_chunks", 1, _MAX_CHUNKS)
        flag(self.reforward, "reforward")
        if not len(self.micro_step_X):
            raise InputError("a Schedule needs at least one pass; got none.")
        if self.chunk_X.min() < 0 or self.chunk_X.max() >= self.num_chunks:
            raise InputError(f"chunk_X must lie in [0, {self.num_chunks}); got {self.chunk_X.min()} to {self.chunk_X.max()}.")
        if self.phase_X.max() > Phase.BACKWARD or self.micro_step_X.min() < 0:
            raise InputError("a Schedule's phases are 0 (forward) or 1 (backward) and its micro-steps start at 0.")
        self._check_layers()
        self._check_passes()

    @property
    def M(self) -> int:
        """Number of micro-steps."""
        return int(self.micro_step_X.max()) + 1

    @property
    def trains(self) -> bool:
        """True if the schedule has a backward pass."""
        return bool((self.phase_X == Phase.BACKWARD).any())

    def _check_passes(self) -> None:
        key_X = self.micro_step_X.astype(np.int64) * self.num_chunks + self.chunk_X
        at_F, at_B = (np.flatnonzero(self.phase_X == phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
        num_keys = self.M * self.num_chunks
        if num_keys > len(key_X):
            passes = f"{self.M} micro-steps of {self.num_chunks} chunks"
            raise InputError(f"{passes} need one forward pass each; the Schedule has {len(key_X)} passes.")
        num_forward_K, num_backward_K = (np.bincount(key_X[at], minlength=num_keys) for at in (at_F, at_B))
        wrong_K = (num_forward_K != 1) | (num_backward_K > 1)
        if wrong_K.any():
            step, chunk = divmod(bad := int(np.argmax(wrong_K)), self.num_chunks)
            has = f"{num_forward_K[bad]} forward and {num_backward_K[bad]} backward passes"
            raise InputError(f"micro-step {step}, chunk {chunk} has {has}; give one forward and at most one backward.")
        forward_K = at_F[np.argsort(key_X[at_F])]
        early_B = at_B < forward_K[key_X[at_B]]
        if early_B.any():
            step = int(self.micro_step_X[at_B[early_B]].min())
            raise InputError(f"micro-step {step} runs backward before forward; reorder the passes.")

    def _check_layers(self) -> None:
        for name in ("chunk_L", "block_L"):
            if getattr(self, name) is not None and (np.diff(getattr(self, name)) < 0).any():
                raise InputError(f"{name} must be ascending; layers of a chunk or block are contiguous.")
        chunk_L, block_L = self.chunk_L, self.block_L
        if chunk_L is not None and chunk_L.size and (chunk_L[0] < 0 or chunk_L[-1] >= self.num_chunks):
            raise InputError(f"chunk_L must lie in [0, {self.num_chunks}); got {chunk_L[0]} to {chunk_L[-1]}.")
        if block_L is not None and not self.reforward:
            raise InputError("block_L says which layers are recomputed together; set reforward=True with it.")

    def chunks(self, num_layers: int) -> Array:
        """Returns the chunk of every layer, int32 [L].

        Raises:
            InputError: The schedule is for another number of layers, or its chunks do not divide `num_layers` evenly.
        """
        for layer_L in (self.chunk_L, self.block_L):
            if layer_L is not None and len(layer_L) != num_layers:
                has = f"the schedule is for {len(layer_L)} layers, the plan has {num_layers}"
                raise InputError(f"{has}; make it for these layers.")
        if self.chunk_L is not None:
            return self.chunk_L
        if num_layers % self.num_chunks:
            have = f"{num_layers} layers do not divide into {self.num_chunks} chunks"
            raise InputError(f"{have}; give chunk_L, the chunk of every layer.")
        return np.repeat(np.arange(self.num_chunks, dtype=np.int32), num_layers // self.num_chunks)

    def uses(self, num_layers: int) -> Uses:
        """Returns all uses of the plan's `num_layers` layers in order. Backward passes run their layers in reverse.

        Raises:
            InputError: `num_layers` does not fit the chunks (see `chunks`), or a recomputed block spans several chunks.
        """
        chunk_L = self.chunks(num_layers)
        block_L = np.arange(num_layers) if self.block_L is None else self.block_L
        sequence = {}
        for chunk in range(self.num_chunks):
            layer_P = np.flatnonzero(chunk_L == chunk)
            sequence[chunk, Phase.FORWARD] = layer_P, np.full(len(layer_P), Phase.FORWARD)
            sequence[chunk, Phase.BACKWARD] = _backward(layer_P, block_L)
            if np.isin(block_L[layer_P], block_L[chunk_L != chunk]).any():
                raise InputError(f"block_L joins layers of chunk {chunk} with those of another; a block lies in one chunk.")
        parts = [sequence[key] for key in zip(self.chunk_X.tolist(), self.phase_X.tolist(), strict=True)]
        pass_U = np.repeat(np.arange(len(parts)), [len(layers) for layers, _ in parts])
        layer_U, phase_U = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Uses(np.arange(len(pass_U)), self.micro_step_X[pass_U], layer_U, phase_U.astype(np.uint8), pass_U)

    def __getitem__(self, micro_steps: slice) -> Schedule:
        """Returns the passes of a range of micro-steps in the same order, with micro-steps numbered from 0."""
        start, stop, step = micro_steps.indices(self.M)
        if step != 1 or start >= stop:
            raise InputError(f"a Schedule of {self.M} micro-steps cannot be cut to {micro_steps}; give a non-empty range.")
        keep_X = (self.micro_step_X >= start) & (self.micro_step_X < stop)
        columns = self.cut_arrays(X=keep_X)
        return dataclasses.replace(self, **(columns | {"micro_step_X": columns["micro_step_X"] - start}))

    def without_backward(self) -> Schedule:
        """Returns the schedule of a forward-only stage in the same pipeline, with the same order of forward passes."""
        keep_X = self.phase_X == Phase.FORWARD
        return dataclasses.replace(self, **self.cut_arrays(X=keep_X), reforward=False, block_L=None)

    @staticmethod
    def forward_only(num_micro_steps: int) -> Schedule:
        """Returns the schedule of a recompute stage, which runs only the forward passes of all micro-steps, in order."""
        return _schedule([(m, Phase.FORWARD, 0) for m in range(whole(num_micro_steps, "num_micro_steps"))])

    @staticmethod
    def accumulate(num_micro_steps: int, reforward: bool = False) -> Schedule:
        """Returns the schedule of gradient accumulation without a pipeline. Each micro-step runs forward and then backward."""
        steps = range(whole(num_micro_steps, "num_micro_steps"))
        return _schedule([(m, phase, 0) for m in steps for phase in (Phase.FORWARD, Phase.BACKWARD)], reforward=reforward)

    @staticmethod
    def plain(stage: str, num_micro_steps: int, reforward: bool = False) -> Schedule:
        """Returns a stage's default schedule: `accumulate` for ``"update"``, else `forward_only`, which ignores `reforward`."""
        return Schedule.accumulate(num_micro_steps, reforward) if stage == "update" else Schedule.forward_only(num_micro_steps)

    @staticmethod
    def one_f_one_b(num_micro_steps: int, pp: int, pp_rank: int, reforward: bool = False) -> Schedule:
        """Returns the 1F1B schedule of pipeline rank `pp_rank` of `pp` (PipeDream-flush, arXiv 2104.04473)."""
        _require_rank(pp, pp_rank)
        order = [(m, 0) for m in range(whole(num_micro_steps, "num_micro_steps"))]
        return _interleave(order, order, min(pp - pp_rank - 1, len(order)), 1, reforward)

    @staticmethod
    def interleaved(num_micro_steps: int, pp: int, vpp: int, pp_rank: int, reforward: bool = False) -> Schedule:
        """Returns an interleaved 1F1B schedule with `vpp` model chunks per rank (arXiv 2104.04473), in Megatron-Core's order.

        Raises:
            InputError: The number of micro-steps is not a multiple of `pp`, as the schedule requires.
        """
        _require_rank(pp, pp_rank)
        whole(vpp, "vpp", 1, _MAX_CHUNKS)
        if whole(num_micro_steps, "num_micro_steps") % pp:
            raise InputError(f"an interleaved schedule needs micro-steps in multiples of {pp} ranks; got {num_micro_steps}.")
        order = [(group * pp + i, chunk) for group in range(num_micro_steps // pp) for chunk in range(vpp) for i in range(pp)]
        warmup = min((pp - pp_rank - 1) * 2 + (vpp - 1) * pp, len(order))
        return _interleave(order, [(m, vpp - 1 - c) for m, c in order], warmup, vpp, reforward)

    @staticmethod
    def parse(text: str, num_micro_steps: int) -> Schedule:
        """Parses a schedule as written on the command line.

        The text is ``forward``, ``accumulate``, ``1f1b:PP,RANK`` or ``interleaved:PP,VPP,RANK``. The suffix ``+reforward`` means
        that the backward pass runs the forward pass again.
        """
        form = r"(forward|accumulate|1f1b|interleaved)(?::(\d{1,9}(?:,\d{1,9})*))?(\+reforward)?"
        match = re.fullmatch(form, text.strip().lower(), re.ASCII)
        if match is not None:
            name, reforward = match[1], match[3] is not None
            args = [int(a) for a in (match[2] or "").split(",") if a]
            if (name, len(args), reforward) == ("forward", 0, False):
                return Schedule.forward_only(num_micro_steps)
            if (name, len(args)) == ("accumulate", 0):
                return Schedule.accumulate(num_micro_steps, reforward)
            if (name, len(args)) == ("1f1b", 2):
                return Schedule.one_f_one_b(num_micro_steps, args[0], args[1], reforward)
            if (name, len(args)) == ("interleaved", 3):
                return Schedule.interleaved(num_micro_steps, args[0], args[1], args[2], reforward)
        forms = "forward, accumulate, 1f1b:PP,RANK or interleaved:PP,VPP,RANK"
        cure = f"write {forms}, with +reforward after any of them but forward if activations are recomputed"
        raise InputError(f"{text!r} is not a valid schedule; {cure}.")


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


def _backward(layer_P: Array, block_L: Array) -> tuple[Array, Array]:
    """Returns the layers and phases of a backward pass, block by block from the last one."""
    layers: list[Array] = [layer_P[:0]]
    phases: list[Array] = [layer_P[:0]]
    for block in np.unique(block_L[layer_P])[::-1]:
        mine = layer_P[block_L[layer_P] == block]
        if len(mine) > 1:
            layers.append(mine)
            phases.append(np.full(len(mine), Phase.REFORWARD))
        layers.append(mine[::-1])
        phases.append(np.full(len(mine), Phase.BACKWARD))
    return np.concatenate(layers), np.concatenate(phases)


def _require_rank(pp: int, pp_rank: int) -> None:
    if pp < 1 or not 0 <= pp_rank < pp:
        raise InputError(f"pipeline rank {pp_rank} of {pp} does not exist; ranks count from 0.")
