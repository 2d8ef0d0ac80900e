"""Reads the routing that rollout engines return into a `RoutingTrace`, or counts it without a trace. Routing may have gaps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, frozen_array, require_non_negative
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError, naming
from foremoe.base.fields import whole
from foremoe.machine.model import Model
from foremoe.routing.readers.counting import BLANK, MARKED, REPEATED, UNKNOWN, count_ranges, narrow_into
from foremoe.routing.readers.reading import Reader
from foremoe.routing.readers.sequences import payload_bytes, unpack
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.dealing import require_counts
from foremoe.workload.workload import Workload

# Letters: Q sequences, T tokens, L MoE layers, K top-k, E experts, M micro-steps, G ranks, X ranges.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSummary:
    """Numbers of the tokens, gaps and repeats that were found when payloads were read.

    Attributes:
        num_sequences: Number of sequences.
        num_tokens: Number of tokens.
        num_unknown_tokens: Number of tokens with unknown routing in at least one layer: missing tokens, blank tokens, and tokens
            with a -1.
        num_missing_tokens: Number of tokens without an entry in a payload. These are tokens before a start offset, the last token
            of a sequence, and all tokens of a sequence whose payload is None.
        num_blank_tokens: Number of tokens whose experts are all 0, which means padding. At top-1, padding is not recognised.
        num_marked: Number of (token, layer) combinations with a -1 or None among their experts.
        num_repeated_pairs: Number of pairs that repeat an expert of their token and layer.
        num_padding_rows: Number of payload entries that were cut off because they are beyond the end of a sequence.
    """

    num_sequences: int = 0
    num_tokens: int = 0
    num_unknown_tokens: int = 0
    num_missing_tokens: int = 0
    num_blank_tokens: int = 0
    num_marked: int = 0
    num_repeated_pairs: int = 0
    num_padding_rows: int = 0


def from_routed_experts(
    payloads: Any, *, model: str | Model | None = None, num_experts: int | None = None, num_topk: int | None = None,
    num_layers: int | None = None, moe_layer_L: npt.ArrayLike | None = None, lengths: int | Sequence[int] | None = None,
    start: int | Sequence[int] | None = None, mask: Any = None, dtype: Any = None, source: str = "",
) -> tuple[RoutingTrace, ReadSummary]:  # fmt: skip
    """Reads the routing that rollout engines return, in any of their encodings (see docs/rollout-routing.md).

    A token is known if the routing of all its layers is known and lists no expert twice.

    Args:
        payloads: One payload, a list with one payload per sequence, or an array [sequences, tokens, layers, top-k]. A payload is
            a numpy array or torch tensor, base64 text, bytes, nested lists, a dict as engines send it, a ``Routed``, or None.
        model: A `Model` or the name of a preset, which gives experts, top-k and MoE layers. Any other name is only a label.
        num_experts: Number of experts in a layer. Required if there is no model.
        num_topk: Number of experts per token (top-k). Required if neither the model nor the payloads give it.
        num_layers: Number of layers in a payload, which has either all layers or only the MoE layers. Required if neither the
            payload's shape nor the model gives it.
        moe_layer_L: Numbers of the MoE layers in the model, counted from 0. They are selected from payloads that have all layers.
            Defaults to the MoE layers of the model or, without a model, to every layer of the payload.
        lengths: Number of tokens of each sequence. A payload may lack the last token of its sequence. Entries beyond the length
            are padding. Defaults to the number of entries.
        start: Token to which the first entry of each payload belongs. Defaults to 0.
        mask: Mask of the tokens that are not padding, [sequences, tokens], as bool or as 0 and 1. The tokens of a sequence must
            be contiguous. Allowed only for payloads with four axes.
        dtype: Data type of raw bytes.
        source: Origin of the trace, as text.

    Raises:
        InputError: A payload does not contain valid routing. The message names the sequence.

    Example:
        >>> routed_experts = np.array([[[0, 3]], [[1, 3]], [[0, 2]]])  # tokens, layers, top-k of one sequence
        >>> found, read = foremoe.from_routed_experts([routed_experts], num_experts=4)
        >>> found.topk_TLK.shape
        (3, 1, 2)
    """
    reader = Reader(model, num_experts, num_topk, num_layers, moe_layer_L, dtype)
    tally, num_missing, num_padding = np.zeros(4, np.int64), 0, 0
    topk: list[Array | None] = []
    known: list[Array] = []
    items, num_tokens = unpack(payloads, lengths, start, mask), 0
    source_bytes = payload_bytes(items)
    for q, item in enumerate(items):
        with naming(f"sequence {q}"):
            read = reader.read(item)
            num_tokens += read.num_tokens
            reader.require_tokens(num_tokens, source_bytes)
            known_T = np.zeros(read.num_tokens, bool)
            topk_TLK = reader.empty(read.num_tokens) if read.pieces else None
            for first, layer_L, rows_TLK in read.pieces:
                assert topk_TLK is not None
                end = first + len(rows_TLK)
                known_T[first:end] = True
                narrow_into(topk_TLK[first:end], known_T[first:end], rows_TLK, layer_L, reader.num_experts, tally)
            topk.append(topk_TLK)
            known.append(known_T)
            num_missing += read.num_tokens - sum(len(rows_TLK) for _, _, rows_TLK in read.pieces)
            num_padding += read.num_padding
    reader.require_tokens(num_tokens, source_bytes)  # layers and top-k are known by now
    seq_len_Q = np.array([len(known_T) for known_T in known])
    trace = RoutingTrace(
        topk_TLK=_joined([reader.empty(len(k)) if t is None else t for t, k in zip(topk, known, strict=True)]),
        num_experts=reader.num_experts, known_T=_joined(known), seq_len_Q=seq_len_Q, moe_layer_L=reader.moe_layer_L,
        model=reader.model, source=source,
    )  # fmt: skip
    return trace, _report(len(known), trace.T, num_missing, num_padding, tally)


def count_workload(
    payloads: Any, *, num_ranks: int, micro_step_Q: npt.ArrayLike | None = None, rank_Q: npt.ArrayLike | None = None,
    range_X5: npt.ArrayLike | None = None, num_micro_steps: int | None = None, stage: str = "update", **options: Any,
) -> tuple[Workload, ReadSummary]:  # fmt: skip
    """Counts the routing that rollout engines return, one payload at a time, without building a trace.

    A (token, layer) with an unknown expert is counted in `unknown_ML` and adds no pairs to the load. An expert that is listed
    twice counts as one pair. If unknown tokens are unknown in all layers and no token lists an expert twice, the counts equal
    those of ``Workload.from_trace`` on the trace of `from_routed_experts`.

    Args:
        payloads: Payloads of the sequences, as in `from_routed_experts`.
        num_ranks: Number of source ranks.
        micro_step_Q: Micro-step of each whole sequence. Sequences with -1 are left out and are not decoded.
        rank_Q: Source rank of each whole sequence.
        range_X5: Ranges of tokens, given instead of `micro_step_Q` and `rank_Q` if sequences are split over ranks. The columns
            are sequence, first token, end token, micro-step and source rank, as integers [X, 5]. Ranges of a sequence must not
            overlap. Tokens outside all ranges are not counted.
        num_micro_steps: Number of micro-steps. Defaults to the largest micro-step plus one.
        stage: Stage of the workload, ``"recompute"`` or ``"update"``.
        options: Arguments of `from_routed_experts`, namely `model`, `num_experts`, `num_topk`, `num_layers`, `moe_layer_L`,
            `lengths`, `start`, `mask` and `dtype`.

    Raises:
        InputError: For the reasons given in `from_routed_experts`, or because a micro-step or rank does not exist.

    Example:
        >>> routed_experts = np.array([[[0, 3]], [[1, 3]], [[0, 2]]])  # tokens, layers, top-k of one sequence
        >>> counted, read = foremoe.count_workload([routed_experts], num_ranks=1, micro_step_Q=[0], rank_Q=[0], num_experts=4)
        >>> counted.load_MLE.tolist()
        [[[2, 1, 1, 2]]]
    """
    of_items = {name: options.pop(name, None) for name in ("lengths", "start", "mask")}
    reader = Reader(**options)
    items = unpack(payloads, **of_items)
    G = whole(num_ranks, "num_ranks")
    ranges_Q, M = _places(len(items), G, micro_step_Q, rank_Q, range_X5, num_micro_steps)
    require_budget(16 * M * G, f"{M} micro-steps x {G} ranks", "number micro-steps from 0 without gaps", payload_bytes(items))
    tokens_MG, attention_MG = np.zeros((M, G), np.int64), np.zeros((M, G))
    tally, num_sequences, num_missing, num_padding = np.zeros(4, np.int64), 0, 0, 0
    load_MLGE: Array | None = None
    missing_M = np.zeros(M, np.int64)
    for q, (item, range_X4) in enumerate(zip(items, ranges_Q, strict=True)):
        if not len(range_X4):
            continue
        with naming(f"sequence {q}"):
            read = reader.read(item)
            range_X4 = _within(range_X4, read.num_tokens)
            first_X, end_X, micro_step_X, rank_X = range_X4.T
            left_X = end_X - first_X
            np.add.at(tokens_MG, (micro_step_X, rank_X), left_X)
            np.add.at(attention_MG, (micro_step_X, rank_X), left_X * float(read.num_tokens))
            for first, layer_L, rows_TLK in read.pieces:
                if load_MLGE is None:
                    load_MLGE, unknown_ML = _no_counts(reader, M, G, payload_bytes(items))
                cut_X4 = range_X4.copy()
                cut_X4[:, :2] = np.clip(range_X4[:, :2] - first, 0, len(rows_TLK))
                left_X = left_X - (cut_X4[:, 1] - cut_X4[:, 0])
                count_ranges(rows_TLK, layer_L, cut_X4, load_MLGE, unknown_ML, tally)
            np.add.at(missing_M, micro_step_X, left_X)
            num_sequences += 1
            num_missing += int(left_X.sum())
            num_padding += read.num_padding
    if load_MLGE is None:
        load_MLGE, unknown_ML = _no_counts(reader, M, G, payload_bytes(items))
    places: dict[str, Any] = {}
    if range_X5 is None:
        places = {"micro_step_Q": micro_step_Q, "rank_Q": np.where(np.asarray(micro_step_Q) < 0, -1, np.asarray(rank_Q))}
    work = Workload(
        load_MLGE=load_MLGE, tokens_MG=tokens_MG, attention_MG=attention_MG, unknown_ML=unknown_ML + missing_M[:, None],
        num_topk=reader.topk(), stage=stage, model=reader.model, moe_layer_L=reader.moe_layer_L, **places,
    )  # fmt: skip
    return work, _report(num_sequences, int(tokens_MG.sum()), num_missing, num_padding, tally)


def _no_counts(reader: Reader, M: int, G: int, source_bytes: int) -> tuple[Array, Array]:
    """Returns load_MLGE and unknown_ML filled with zeros."""
    shape = M, len(reader.moe_layer_L), G, reader.num_experts
    require_counts(shape, source_bytes)
    return np.zeros(shape, np.int32), np.zeros(shape[:2], np.int64)


def _joined(parts: list[Array]) -> Array:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _report(num_sequences: int, num_tokens: int, num_missing: int, num_padding: int, tally: Array) -> ReadSummary:
    num = tally.tolist()
    return ReadSummary(
        num_sequences=num_sequences, num_tokens=num_tokens, num_unknown_tokens=num_missing + num[UNKNOWN],
        num_missing_tokens=num_missing, num_blank_tokens=num[BLANK], num_marked=num[MARKED], num_repeated_pairs=num[REPEATED],
        num_padding_rows=num_padding,
    )  # fmt: skip


def _places(
    Q: int, G: int, micro_step_Q: Any, rank_Q: Any, range_X5: Any, num_micro_steps: int | None
) -> tuple[list[Array], int]:
    """Returns int64 [X, 4] of each sequence (first token, end, micro-step, rank), and M. An end of -1 is the sequence's end."""
    if (range_X5 is None) != (micro_step_Q is not None and rank_Q is not None):
        raise InputError("the places of sequences are not clear; give either micro_step_Q and rank_Q, or range_X5.")
    if range_X5 is None:
        micro_step = frozen_array(micro_step_Q, np.int32, "micro_step_Q", (Q,))
        rank = frozen_array(rank_Q, np.int32, "rank_Q", (Q,))
        out = [np.array([[0, -1, m, g]], np.int64)[: int(m >= 0)] for m, g in zip(micro_step, rank, strict=True)]
        micro_step, rank = micro_step[micro_step >= 0], rank[micro_step >= 0]
    else:
        ranges = frozen_array(range_X5, np.int64, "range_X5", (None, 5))
        require_non_negative(ranges, "range_X5")
        ranges = ranges[np.lexsort((ranges[:, 1], ranges[:, 0]))]
        if len(ranges) and ranges[-1, 0] >= Q:
            raise InputError(f"range_X5 names sequence {ranges[-1, 0]}; there are {Q}, from 0.")
        same = ranges[1:, 0] == ranges[:-1, 0]
        if (ranges[:, 1] >= ranges[:, 2]).any() or (same & (ranges[1:, 1] < ranges[:-1, 2])).any():
            raise InputError("range_X5 has empty or overlapping ranges; each token is counted at most once.")
        cuts = np.searchsorted(ranges[:, 0], np.arange(Q + 1))
        out = [ranges[cuts[q] : cuts[q + 1], 1:] for q in range(Q)]
        micro_step, rank = ranges[:, 3], ranges[:, 4]
    if not len(micro_step):
        raise InputError("no sequence has a micro-step; give at least one.")
    M = int(micro_step.max()) + 1 if num_micro_steps is None else whole(num_micro_steps, "num_micro_steps")
    if micro_step.max() >= M or rank.min() < 0 or rank.max() >= G:
        places = f"micro-steps up to {micro_step.max()} and ranks {rank.min()} to {rank.max()}"
        raise InputError(f"sequences go to {places}; there are {M} micro-steps and {G} ranks, from 0.")
    return out, M


def _within(range_X4: Array, num_tokens: int) -> Array:
    if range_X4[0, 1] == -1:
        range_X4 = range_X4.copy()
        range_X4[0, 1] = num_tokens
    if range_X4[:, 1].max() > num_tokens:
        raise InputError(f"range_X5 reaches token {range_X4[:, 1].max()} of {num_tokens}; correct it.")
    return range_X4
