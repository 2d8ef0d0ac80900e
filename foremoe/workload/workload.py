"""`Workload`, the number of (token, expert) pairs from every source rank to every expert, for each micro-step and layer."""

import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, ArrayValue, Length, array, frozen_array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.base.parallel import row_runner
from foremoe.base.tensor_file import naming_fields, read_tensors, write_tensors
from foremoe.routing.checks import layer_numbers, layer_positions, preset_layers
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.checks import check_balance, check_pairs, checked_load, require_below
from foremoe.workload.dealing import Dealt, count_tokens, deal, require_counts, sum_cells
from foremoe.workload.packing import AsGiven, PackSolver

STAGES = ("recompute", "update")  # forward only, with frozen weights; or forward and backward
FORMAT_VERSION = 1
_PLAIN = ("num_topk", "stage", "model", "trace_id")

# Letters: M micro-steps, L MoE layers, G ranks, E experts, K top-k, Q sequences, T tokens.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class Workload(ArrayValue):
    """Counts of one EP group in the part of a stage that runs with one version of the weights. This is an update mini-batch, or
    the whole recompute stage.

    Counts are numbers of (token, expert) pairs, with at most num_topk pairs per token and layer. Pairs may be missing if tokens
    are unknown (see `unknown_ML`), or if the number of tokens was derived from counts.

    Attributes:
        load_MLGE: Number of pairs by source rank and logical expert, int32.
        tokens_MG: Number of tokens on each source rank, int32.
        attention_MG: Sum of squared sequence lengths (tokens^2) over a rank's sequences, float64. If the sum is zero, the cost of
            attention depends only on the number of tokens.
        unknown_ML: Number of tokens whose routing in this layer is not known, int64. The load does not include these tokens.
        num_topk: Number of experts per token.
        stage: Stage that was counted, ``"recompute"`` or ``"update"``.
        model: Name of the model, or None.
        moe_layer_L: The model's own layer numbers, int32.
        trace_id: Id of the trace that was counted, or empty.
        micro_step_Q: Micro-step of each sequence of the trace, int32, or -1 for sequences outside this workload. None if the
            workload was not packed from whole sequences.
        rank_Q: Source rank of each sequence of the trace, int32, or -1 for sequences outside this workload. None if
            `micro_step_Q` is None.
        dealt: Record of how the sequences were packed, or None.
        load_MLE: Sum of load_MLGE over source ranks, int32. It is computed, not passed.

    Raises:
        InputError: Shapes do not match, numbers are negative, or a rank has more pairs than its tokens allow.
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
        put = functools.partial(object.__setattr__, self)
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
        sequences = 0 if self.micro_step_Q is None else len(self.micro_step_Q)
        if self.dealt is not None and max(self.dealt.over_budget, default=-1) >= sequences:
            raise InputError(
                f"dealt names sequence {max(self.dealt.over_budget)} over the budget; there are {sequences}, from 0."
            )

    M = Length("load_MLGE")
    """Number of micro-steps."""

    L = Length("load_MLGE")
    """Number of MoE layers in this workload."""

    G = Length("load_MLGE")
    """Number of source ranks, which are the ranks of the EP group."""

    E = Length("load_MLGE")
    """Number of logical experts."""

    def __repr__(self) -> str:
        return (
            f"Workload({self.M} micro-steps, {self.L} layers, {self.G} ranks, top-{self.num_topk} of {self.E} experts,"
            f" {int(self.tokens_MG.sum(dtype=np.int64))} tokens, stage={self.stage!r}, model={self.model!r},"
            f" dealt={self.dealt!r})"
        )

    @classmethod
    def from_counts(
        cls, load_MLGE: npt.ArrayLike, *, num_topk: int, tokens_MG: npt.ArrayLike | None = None,
        attention_MG: npt.ArrayLike | None = None, unknown_ML: npt.ArrayLike | None = None, stage: str = "update",
        model: str | None = None, moe_layer_L: npt.ArrayLike | None = None, trace_id: str = "",
    ) -> Self:  # fmt: skip
        """Creates a workload from existing counts.

        Args:
            load_MLGE: Number of pairs by micro-step, layer, source rank and expert, as integers >= 0.
            num_topk: Number of experts per token.
            tokens_MG: Number of tokens per source rank. If given, every micro-step and layer must have num_topk * (tokens -
                unknown) pairs. If None, the number is the smallest possible one, ceil(pairs / num_topk) for the layer with the
                most pairs. Pairs may then be missing in other layers.
            attention_MG: Sum of squared sequence lengths per source rank. Defaults to zeros, which mean that lengths are not
                known.
            unknown_ML: Number of tokens with unknown routing, which the counts do not include. Defaults to zero.
            stage: Stage that was counted, ``"recompute"`` or ``"update"``.
            model: Name of the model. If it is a preset, its experts and top-k must agree with the counts.
            moe_layer_L: The model's own layer numbers. Defaults to those of the preset `model` if it has L layers, else to 0 to
                L-1.
            trace_id: Id of the trace that was counted.

        Raises:
            InputError: For the reasons given in the class, or because the numbers of pairs and tokens do not agree.

        Example:
            >>> load_MLGE = np.array([[[[5, 1], [2, 4]]]])  # one micro-step and layer, two ranks, two experts
            >>> foremoe.Workload.from_counts(load_MLGE, num_topk=1).load_MLE.tolist()
            [[[7, 5]]]
        """
        load = checked_load(load_MLGE)
        M, L, G, E = load.shape
        num_topk = whole(num_topk, "num_topk")
        pairs_MLG = load.sum(axis=3, dtype=np.int64)
        unknown = frozen_array(np.zeros((M, L)) if unknown_ML is None else unknown_ML, np.int64, "unknown_ML", (M, L))
        if tokens_MG is None:
            tokens = -(-pairs_MLG.max(axis=1) // num_topk)
        else:
            tokens = frozen_array(tokens_MG, np.int32, "tokens_MG", (M, G))
            check_balance(pairs_MLG.sum(axis=2), tokens.sum(axis=1, dtype=np.int64), unknown, num_topk)
        attention: Any = np.zeros((M, G)) if attention_MG is None else attention_MG
        layers: Any = preset_layers(model, L, E, num_topk) if moe_layer_L is None else moe_layer_L
        return cls(
            load_MLGE=load, tokens_MG=tokens, attention_MG=attention, unknown_ML=unknown, num_topk=num_topk, stage=stage,
            model=model, moe_layer_L=layers, trace_id=trace_id,
        )  # fmt: skip

    @classmethod
    def from_trace(
        cls, trace: RoutingTrace, *, num_ranks: int, tokens_per_rank: int, packer: PackSolver | None = None, seed: int = 0,
        stage: str = "update", sample_group_Q: npt.ArrayLike | None = None, max_micro_steps: int | None = None,
        num_threads: int | None = None,
    ) -> Self:  # fmt: skip
        """Assigns every sequence of a trace to a micro-step and a source rank within a token budget, and counts the pairs.

        Args:
            num_ranks: Number of source ranks. If it exceeds the number of sequences, some ranks have no tokens.
            tokens_per_rank: Token budget per rank. A micro-step has at most num_ranks * tokens_per_rank tokens. A longer sequence
                is never cut or left out. It is a micro-step of its own and is listed in ``dealt.over_budget``.
            packer: A pack solver. Defaults to ``AsGiven()``.
            seed: Seed for packers that shuffle.
            sample_group_Q: Group of each sequence as non-decreasing integers. All sequences of a micro-step belong to one group.
            max_micro_steps: Number of micro-steps to keep, the first ones. ``dealt`` records the number that was left out.
                Defaults to all.
            num_threads: Number of threads, which does not change the result. Defaults to all cores.

        Raises:
            InputError: A number is out of range, or the result of the packer is not valid.

        Example:
            >>> foremoe.Workload.from_trace(trace, num_ranks=4, tokens_per_rank=1024).load_MLE.shape
            (53, 4, 32)
        """
        G = whole(num_ranks, "num_ranks")
        require_counts((1, trace.L, G, trace.num_experts), trace.num_bytes)  # before the packer takes time
        packer = AsGiven() if packer is None else packer
        with row_runner(num_threads):
            micro_step_Q, rank_Q, dealt = deal(trace, packer, G, tokens_per_rank, seed, sample_group_Q, max_micro_steps)
        micro_step_T, rank_T = np.repeat(micro_step_Q, trace.seq_len_Q), np.repeat(rank_Q, trace.seq_len_Q)
        attention_MG = sum_cells(micro_step_Q, rank_Q, G, trace.seq_len_Q**2)
        load_MLGE, unknown_ML = count_tokens(trace, micro_step_T, rank_T, G)
        return cls(
            load_MLGE=load_MLGE, tokens_MG=sum_cells(micro_step_T, rank_T, G), attention_MG=attention_MG, unknown_ML=unknown_ML,
            num_topk=trace.K, stage=stage, model=trace.model, moe_layer_L=trace.moe_layer_L, trace_id=trace.id,
            micro_step_Q=micro_step_Q, rank_Q=rank_Q, dealt=dealt,
        )  # fmt: skip

    def __getitem__(self, micro_steps: slice) -> Self:
        """Returns a range of micro-steps as a separate workload. Sequences outside the range get -1.

        If the range starts at 0, the micro-steps behind it are added to ``dealt.dropped_micro_steps``, as if they had been left
        out in packing. Any other range cannot be packed again from its trace alone, and keeps ``dealt`` of the whole workload.

        Raises:
            InputError: The index is not a slice, or selects no micro-step.
        """
        if not isinstance(micro_steps, slice):
            raise InputError(f"index a workload by a slice such as work[0:2]; got {micro_steps!r}.")
        kept = np.arange(self.M)[micro_steps]
        if not kept.size:
            raise InputError(f"the slice {micro_steps.start}:{micro_steps.stop} selects none of the {self.M} micro-steps.")
        cut, dealt = self.cut_arrays(M=micro_steps), self.dealt
        if self.micro_step_Q is not None and self.rank_Q is not None:
            renumbered = np.full(self.M + 1, -1, np.int32)  # the last entry is for the index -1
            renumbered[kept] = np.arange(kept.size)
            micro_step_Q = renumbered[self.micro_step_Q]
            cut |= {"micro_step_Q": micro_step_Q, "rank_Q": np.where(micro_step_Q < 0, np.int32(-1), self.rank_Q)}
            if dealt is not None and (kept == np.arange(kept.size)).all():
                over_budget = tuple(q for q in dealt.over_budget if micro_step_Q[q] >= 0)
                num_dropped = dealt.dropped_micro_steps + self.M - kept.size
                dealt = replace(dealt, over_budget=over_budget, dropped_micro_steps=num_dropped)
        return replace(self, dealt=dealt, **cut)

    def layers(self, indices: Sequence[int]) -> Self:
        """Returns a workload with only some layers, such as those of a pipeline rank. `indices` are positions, not layer numbers.

        Raises:
            InputError: `indices` is empty, or an index is out of range or repeated.
        """
        return self.cut(L=layer_positions(indices, self.L))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the workload as safetensors. Equal workloads give equal bytes."""
        held = {name: getattr(self, name) for name in self.array_fields()}
        tensors: dict[str, Array] = {name: array for name, array in held.items() if array is not None}
        # Most counts of one layer on one rank are small, so the narrowest type halves most files.
        tensors["load_MLGE"] = self.load_MLGE.astype(np.min_scalar_type(int(self.load_MLGE.max())))
        header = {name: getattr(self, name) for name in _PLAIN}
        header["dealt"] = None if self.dealt is None else asdict(self.dealt)
        write_tensors(path, "workload", FORMAT_VERSION, header, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads a file written by `save`. The workload equals the saved one, byte for byte.

        Raises:
            InputError: The file does not exist, is not a workload, has another format, or was truncated or changed.
        """
        header, tensors = read_tensors(path, "workload", FORMAT_VERSION)
        with naming_fields(path, header):
            dealt = header["dealt"]
            if dealt is not None:
                dealt = Dealt(**{**dealt, "over_budget": tuple(dealt["over_budget"])})
            arrays: dict[str, Any] = {n: tensors.get(n) if f.optional else tensors[n] for n, f in cls.array_fields().items()}
            return cls(**arrays, **{name: header[name] for name in _PLAIN}, dealt=dealt)
