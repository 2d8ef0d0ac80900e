"""Workload: how many (token, expert) pairs every source rank sends to every expert, per micro-step and layer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, ArrayValue, Length, array, frozen_array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.base.parallel import row_runner
from foremoe.routing.checks import layer_numbers, layer_positions, preset_layers
from foremoe.workload.checks import check_balance, check_pairs, checked_load, require_below
from foremoe.workload.packing import AsGiven, PackSolver

if TYPE_CHECKING:
    from foremoe.routing.trace import RoutingTrace

STAGES = ("recompute", "update")  # forward only with frozen weights; forward and backward

# Letters: M micro-steps, L MoE layers, G ranks, E experts, K top-k, Q sequences, T tokens.


@dataclass(frozen=True, slots=True, kw_only=True)
class Dealt:
    """How whole sequences were dealt to micro-steps and ranks.

    Attributes:
        tokens_per_rank: The budget of a micro-step is this times the number of ranks.
        packer: Repr of the pack solver.
        seed: Seed that it was given.
        over_budget: Numbers of the sequences longer than the whole budget; each is a micro-step of its own.
        dropped_micro_steps: Later micro-steps that ``max_micro_steps`` left out, their sequences with them.
    """

    tokens_per_rank: int
    packer: str
    seed: int
    over_budget: tuple[int, ...] = ()
    dropped_micro_steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Workload(ArrayValue):
    """Counts of one EP group, one stage and one weight version: an update mini-batch, or the whole recompute stage.

    A count is always (token, expert) pairs. Every rank holds at most num_topk pairs per token and layer; the pairs that are
    missing belong to unknown tokens (see `unknown_ML`), or to none where tokens were derived from counts.

    Attributes:
        load_MLGE: int32, pairs by source rank and logical expert.
        tokens_MG: int32, tokens on each source rank.
        attention_MG: float64, sum over a rank's sequences of length squared (tokens^2); zero prices attention by tokens alone.
        unknown_ML: int64, tokens whose routing in this layer is not known; they are in no load.
        num_topk: K.
        stage: ``"recompute"`` or ``"update"``.
        model: Name of the model, or None.
        moe_layer_L: int32, the model's own layer numbers.
        trace_id: Id of the trace that was counted, or empty.
        micro_step_Q: int32, micro-step of each sequence of the trace, -1 for sequences that are not in this workload; None where
            sequences were not dealt whole.
        rank_Q: int32, source rank of each sequence of the trace, likewise.
        dealt: How they were dealt, or None.
        load_MLE: int32, load_MLGE summed over source ranks; derived.

    Raises:
        InputError: Shapes that do not fit, negative numbers, or more pairs than the tokens of a rank can make.
    """

    load_MLGE: Array = array(np.int32)
    tokens_MG: Array = array(np.int32, negative=False)
    attention_MG: Array = array(np.float64, negative=False)
    unknown_ML: Array = array(np.int64, negative=False)
    num_topk: int
    stage: str = "update"
    model: str | None = None
    moe_layer_L: Array = array(np.int32)
    trace_id: str = ""
    micro_step_Q: Array | None = array(np.int32, optional=True)
    rank_Q: Array | None = array(np.int32, optional=True)
    dealt: Dealt | None = None
    load_MLE: Array = field(init=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("num_topk", whole(self.num_topk, "num_topk"))
        put("load_MLGE", checked_load(self.load_MLGE))
        if (self.micro_step_Q is None) != (self.rank_Q is None):
            raise InputError("micro_step_Q and rank_Q go together; give both or neither.")
        self.freeze()
        if self.num_topk > self.E:
            raise InputError(f"num_topk {self.num_topk} exceeds the {self.E} experts; a token's experts are distinct.")
        if self.stage not in STAGES:
            raise InputError(f"stage must be one of {', '.join(STAGES)}; got {self.stage!r}.")
        for name, value in (("model", self.model or ""), ("trace_id", self.trace_id)):
            if not isinstance(value, str):
                raise InputError(f"{name} must be text; got {type(value).__name__}.")
        put("moe_layer_L", layer_numbers(self.moe_layer_L, self.L))
        put("load_MLE", frozen_array(self.load_MLGE.sum(axis=2, dtype=np.int64), np.int32, "load_MLGE summed over ranks"))
        check_pairs(self)
        if self.micro_step_Q is not None and self.rank_Q is not None:
            require_below(self.micro_step_Q, self.M, "micro_step_Q")
            require_below(self.rank_Q, self.G, "rank_Q")

    M = Length("load_MLGE")
    """Micro-steps."""

    L = Length("load_MLGE")
    """MoE layers of this workload."""

    G = Length("load_MLGE")
    """Source ranks: the ranks of the EP group."""

    E = Length("load_MLGE")
    """Logical experts."""

    def __repr__(self) -> str:
        return (
            f"Workload({self.M} micro-steps, {self.L} layers, {self.G} ranks, top-{self.num_topk} of {self.E} experts,"
            f" {int(self.tokens_MG.sum(dtype=np.int64))} tokens, stage={self.stage!r}, model={self.model!r},"
            f" dealt={self.dealt!r})"
        )

    @classmethod
    def from_counts(
        cls,
        load_MLGE: npt.ArrayLike,
        *,
        num_topk: int,
        tokens_MG: npt.ArrayLike | None = None,
        attention_MG: npt.ArrayLike | None = None,
        unknown_ML: npt.ArrayLike | None = None,
        stage: str = "update",
        model: str | None = None,
        moe_layer_L: npt.ArrayLike | None = None,
        trace_id: str = "",
    ) -> Workload:
        """A workload of counts that were made elsewhere: the primary way in.

        Args:
            load_MLGE: Whole numbers >= 0, source rank major.
            num_topk: K.
            tokens_MG: Tokens per source rank. With them the counts must balance: per micro-step and layer, pairs =
                num_topk * (tokens - unknown). None: the fewest tokens that can hold the counts, ceil(pairs / num_topk) of
                the layer with most pairs; nothing is checked then, so counts with dropped pairs pass.
            attention_MG: Sum of squared sequence lengths per source rank; None, sequence lengths not known: zeros.
            unknown_ML: Tokens in no count; None: none.
            model: Name of the model; a preset's experts and top-k must agree with the counts.
            moe_layer_L: By default those of the preset `model` if it has L layers, else 0 to L-1.

        Raises:
            InputError: As the class, or counts that do not balance.
        """
        load = checked_load(load_MLGE)
        M, L, G, E = load.shape
        num_topk = whole(num_topk, "num_topk")
        if moe_layer_L is None:
            moe_layer_L = preset_layers(model, L, E, num_topk)
        pairs_MLG = load.sum(axis=3, dtype=np.int64)
        tokens = (
            -(-pairs_MLG.max(axis=1) // num_topk) if tokens_MG is None else frozen_array(tokens_MG, np.int32, "tokens_MG", (M, G))
        )
        unknown = frozen_array(np.zeros((M, L)) if unknown_ML is None else unknown_ML, np.int64, "unknown_ML", (M, L))
        if tokens_MG is not None:
            check_balance(pairs_MLG.sum(axis=2), tokens.sum(axis=1, dtype=np.int64), unknown, num_topk)
        return cls(
            load_MLGE=load,
            tokens_MG=tokens,
            attention_MG=np.zeros((M, G)) if attention_MG is None else attention_MG,  # type: ignore[arg-type]
            unknown_ML=unknown,
            num_topk=num_topk,
            stage=stage,
            model=model,
            moe_layer_L=moe_layer_L,  # type: ignore[arg-type]
            trace_id=trace_id,
        )

    @classmethod
    def from_trace(
        cls,
        trace: RoutingTrace,
        *,
        num_ranks: int,
        tokens_per_rank: int | None = None,
        packer: PackSolver | None = None,
        seed: int = 0,
        stage: str = "update",
        sample_group_Q: npt.ArrayLike | None = None,
        max_micro_steps: int | None = None,
        assign: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        num_threads: int | None = None,
    ) -> Workload:
        """Deals the tokens of a trace to micro-steps and source ranks, every token exactly once, and counts.

        Either whole sequences are dealt by `packer` within a budget, or `assign` says where every token goes.

        Args:
            num_ranks: G; may exceed the number of sequences: ranks without tokens are counted as such.
            tokens_per_rank: The budget of a micro-step is num_ranks * tokens_per_rank tokens. A longer sequence is a
                micro-step of its own, named in ``dealt.over_budget``; it is never cut or left out.
            packer: A pack solver; None is ``AsGiven()``.
            seed: For packers that shuffle.
            sample_group_Q: Integers, non-decreasing; a micro-step never mixes groups.
            max_micro_steps: Micro-steps to keep, the first ones; the rest is left out, which ``dealt`` records.
            assign: ``(micro_step_T, rank_T)`` for every token, where tensor, sequence or context parallelism spreads a
                sequence over ranks. Micro-steps are numbered from 0 without gaps. A token then adds the length of its
                sequence to `attention_MG`, so that a sequence of n tokens adds n^2 in all.
            num_threads: Default: every core; the result is the same.

        Raises:
            InputError: Numbers out of range, options that exclude each other, or a packer that breaks its law.
        """
        from foremoe.workload.dealing import deal

        with row_runner(num_threads):
            return deal(
                trace,
                num_ranks=num_ranks,
                tokens_per_rank=tokens_per_rank,
                packer=AsGiven() if packer is None else packer,
                seed=seed,
                stage=stage,
                sample_group_Q=sample_group_Q,
                max_micro_steps=max_micro_steps,
                assign=assign,
            )

    def __getitem__(self, micro_steps: slice) -> Workload:
        """A range of micro-steps as a workload of its own; sequences outside it get -1.

        What the first micro-steps leave out is added to ``dealt.dropped_micro_steps``, as if they had been dealt so. Another
        range cannot be dealt again from its trace alone: its ``dealt`` stays that of the whole.

        Raises:
            InputError: Not a slice, or none selected.
        """
        if not isinstance(micro_steps, slice):
            raise InputError(f"index a workload by a slice such as work[0:2]; got {micro_steps!r}.")
        kept = np.arange(self.M)[micro_steps]
        if not kept.size:
            raise InputError(f"the slice {micro_steps.start}:{micro_steps.stop} selects none of the {self.M} micro-steps.")
        cut, dealt = self.cut_arrays(M=micro_steps), self.dealt
        if self.micro_step_Q is not None and self.rank_Q is not None:
            renumbered = np.full(self.M + 1, -1, np.int32)  # the last entry is what -1 indexes
            renumbered[kept] = np.arange(kept.size)
            micro_step_Q = renumbered[self.micro_step_Q]
            cut |= {"micro_step_Q": micro_step_Q, "rank_Q": np.where(micro_step_Q < 0, np.int32(-1), self.rank_Q)}
            if dealt is not None and (kept == np.arange(kept.size)).all():
                dealt = replace(
                    dealt,
                    over_budget=tuple(q for q in dealt.over_budget if micro_step_Q[q] >= 0),
                    dropped_micro_steps=dealt.dropped_micro_steps + self.M - kept.size,
                )
        return replace(self, dealt=dealt, **cut)

    def layers(self, indices: Sequence[int]) -> Workload:
        """Some layers (positions from 0, not the model's numbers) as a workload of its own: a pipeline stage, say.

        Raises:
            InputError: No index, one out of range, or one twice.
        """
        return self.cut(L=layer_positions(indices, self.L))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the counts as safetensors; the bytes are a function of the workload alone.

        Raises:
            InputError: The place cannot be written.
        """
        from foremoe.workload.files import save_workload

        save_workload(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Workload:
        """Reads what `save` wrote; the same value comes back, byte for byte.

        Raises:
            InputError: No such file, no workload, of a newer format, truncated or changed.
        """
        from foremoe.workload.files import load_workload

        return load_workload(path)
