"""RoutingTrace: the experts that the router chose for every token, checked strictly."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from foremoe.arrays import Array, ArrayValue, frozen_array
from foremoe.errors import InputError
from foremoe.model import Model
from foremoe.tensor_file import digest

# Letters: T tokens, L MoE layers, K top-k, Q sequences, E experts.

_MAX_EXPERTS = int(np.iinfo(np.int16).max)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RoutingTrace(ArrayValue):
    """The routing of whole sequences, one after the other: token t of sequence q lies in rows ``cuts[q]:cuts[q+1]``.

    The strict form: no padding, no placeholder ids. Recordings with such rows go through the tolerant reader, which
    marks them in `known_T`.

    Attributes:
        topk_TLK: uint8 (num_experts <= 256) or int16, logical experts of each token, distinct within a token and layer.
        num_experts: experts of a layer.
        known_T: bool, False where a token's routing was not recorded: its ids are ignored and may be any number that the
            dtype holds. None means that all are known (all True becomes None).
        seq_len_Q: int64, tokens of each sequence, each >= 1; they sum to T.
        moe_layer_L: int32, the model's own layer numbers; by default those of the preset `model` where it has L layers,
            else 0 to L-1.
        weight_TLK: float16, router weights of the chosen experts, or None. Planning does not use them.
        model: name of the model, or None. Where it names a preset, experts and top-k must agree with it.
        source: free text: where the trace comes from.
        id: names the routing in plans and reports; empty: `content_hash` is filled in.

    Raises:
        InputError: wrong shapes, an id out of range or twice in one token, or lengths that do not sum to T.
    """

    topk_TLK: Array
    num_experts: int
    seq_len_Q: Array
    known_T: Array | None = None
    moe_layer_L: Array = None  # type: ignore[assignment]
    weight_TLK: Array | None = None
    model: str | None = None
    source: str = ""
    id: str = ""

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        put("num_experts", _num_experts(self.num_experts))
        for name, value in (("model", self.model or ""), ("source", self.source), ("id", self.id)):
            if not isinstance(value, str):
                raise InputError(f"{name} must be text; got {type(value).__name__}.")
        topk_TLK = np.asarray(self.topk_TLK)
        if topk_TLK.ndim != 3 or 0 in topk_TLK.shape or topk_TLK.dtype.kind not in "iu":
            raise InputError(
                f"topk_TLK must hold integers [tokens, layers, top-k], each axis at least 1 long; got {topk_TLK.dtype}"
                f" {list(topk_TLK.shape)}."
            )
        if self.K > self.num_experts:
            raise InputError(
                f"top-{self.K} of {self.num_experts} experts is impossible; a token's experts are distinct: check num_experts."
            )
        put("known_T", _known(self.known_T, self.T))
        put("topk_TLK", _checked_ids(topk_TLK, self.known_T, self.num_experts))
        put("seq_len_Q", _sequence_lengths(self.seq_len_Q, self.T))
        default_L = preset_layers(self.model, self.L, self.num_experts, self.K)
        put("moe_layer_L", layer_numbers(default_L if self.moe_layer_L is None else self.moe_layer_L, self.L))
        if self.weight_TLK is not None:
            put("weight_TLK", frozen_array(self.weight_TLK, np.float16, "weight_TLK", self.topk_TLK.shape))
        if not self.id:
            put("id", self.content_hash())

    @property
    def T(self) -> int:
        """Tokens."""
        return int(self.topk_TLK.shape[0])

    @property
    def L(self) -> int:
        """MoE layers."""
        return int(self.topk_TLK.shape[1])

    @property
    def K(self) -> int:
        """Experts per token and layer."""
        return int(self.topk_TLK.shape[2])

    @property
    def Q(self) -> int:
        """Sequences."""
        return len(self.seq_len_Q)

    @property
    def cuts(self) -> Array:
        """int64 [Q + 1]: first token of each sequence, and T."""
        return np.concatenate([[0], np.cumsum(self.seq_len_Q)])

    def content_hash(self) -> str:
        """32 hex digits over everything that decides loads: ids, known rows, sequence and layer numbers, num_experts."""
        arrays = {"topk": self.topk_TLK, "seq_len": self.seq_len_Q, "moe_layer": self.moe_layer_L}
        if self.known_T is not None:
            arrays["known"] = self.known_T
        return digest({"num_experts": self.num_experts}, arrays)

    def __repr__(self) -> str:
        unknown = 0 if self.known_T is None else self.T - int(self.known_T.sum())
        return (
            f"RoutingTrace({self.T} tokens in {self.Q} sequences, {self.L} layers, top-{self.K} of {self.num_experts} experts,"
            f" unknown={unknown}, model={self.model!r}, id={self.id!r})"
        )

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, num_experts: int | None = None, model: str | Model | None = None, weights: bool = True
    ) -> RoutingTrace:
        """Reads a trace from ``.npz`` or ``.safetensors``; never unpickles.

        Array names: those of this class, or ``topk_ids``, ``seq_len``, ``num_experts``, and ``topk_weights`` or
        ``topk_probs``; other arrays are left alone.

        Args:
            num_experts: needed where the file does not tell and `model` is no preset; the largest id plus one would be a guess.
            model: the model that was recorded: a `Model`, or a name.
            weights: False skips the router weights, the larger part of most files.

        Raises:
            InputError: no such file, not readable, arrays missing, or contents that this class refuses.
        """
        from foremoe.routing_io import load_trace

        return load_trace(path, num_experts=num_experts, model=model, weights=weights)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``.npz`` (uncompressed) or ``.safetensors``; `load` gives the same value back, byte for byte.

        Raises:
            InputError: another suffix, or a place that cannot be written.
        """
        from foremoe.routing_io import save_trace

        save_trace(self, path)

    @classmethod
    def synthetic(cls, model: str | Model, **options: Any) -> RoutingTrace:
        """Seeded artificial routing with the skew, drift and domains of real routing.

        Args:
            model: a `Model`, or the name of a preset.
            options: num_sequences, mean_length, regime, domains, num_layers, seed: see `foremoe.synthetic_trace`.
        """
        from foremoe.synthetic_trace import synthetic_trace

        return synthetic_trace(model, **options)

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """The sequences of several traces of one model, in order, under a new id.

        Weights are kept if every part has them, the model's name if all parts agree.

        Raises:
            InputError: no trace, or traces that differ in layers, top-k or experts.
        """
        parts = list(traces)
        if not parts:
            raise InputError("concat needs at least one trace; got none.")
        first = parts[0]
        for i, part in enumerate(parts):
            shape, want = (part.L, part.K, part.num_experts), (first.L, first.K, first.num_experts)
            if shape != want:
                raise InputError(
                    f"trace {i} has (layers, top-k, experts) {shape} but trace 0 has {want}; concatenate traces of one model."
                )
            if (part.moe_layer_L != first.moe_layer_L).any():
                raise InputError(f"trace {i} has other layer numbers than trace 0; concatenate traces of the same layers.")
        known = [np.ones(p.T, bool) if p.known_T is None else p.known_T for p in parts]
        weights = [p.weight_TLK for p in parts if p.weight_TLK is not None]
        return cls(
            topk_TLK=np.concatenate([p.topk_TLK for p in parts]),
            num_experts=first.num_experts,
            known_T=np.concatenate(known),
            seq_len_Q=np.concatenate([p.seq_len_Q for p in parts]),
            moe_layer_L=first.moe_layer_L,
            weight_TLK=np.concatenate(weights) if len(weights) == len(parts) else None,
            model=first.model if all(p.model == first.model for p in parts) else None,
            source=" + ".join(dict.fromkeys(p.source for p in parts if p.source)),
        )

    def sequences(self, indices: npt.ArrayLike) -> RoutingTrace:
        """Some sequences as a trace of their own, under a new id.

        Args:
            indices: sequence numbers in the wanted order (repeats allowed), or a bool mask [Q].

        Raises:
            InputError: none selected, numbers out of range, or a mask of another length.
        """
        index = np.asarray(indices)
        if index.dtype == bool and index.shape == (self.Q,):
            index = np.flatnonzero(index)
        if index.ndim != 1 or not index.size or index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= self.Q:
            raise InputError(f"sequences needs numbers from 0 to {self.Q - 1} in a list, or a bool mask of length {self.Q}.")
        cuts = self.cuts

        def pick(array: Array | None) -> Array | None:
            return None if array is None else np.concatenate([array[cuts[q] : cuts[q + 1]] for q in index])

        topk_TLK = pick(self.topk_TLK)
        assert topk_TLK is not None
        return RoutingTrace(
            topk_TLK=topk_TLK,
            num_experts=self.num_experts,
            known_T=pick(self.known_T),
            seq_len_Q=self.seq_len_Q[index],
            moe_layer_L=self.moe_layer_L,
            weight_TLK=pick(self.weight_TLK),
            model=self.model,
            source=self.source,
        )


def preset_layers(model: str | None, num_layers: int, num_experts: int, num_topk: int) -> Array:
    """int32 [L]: layer numbers of the preset `model` if it has L layers, else 0 to L-1.

    Raises:
        InputError: the preset has other experts or another top-k.
    """
    if model is not None and model.strip().lower() in Model.preset_names():
        preset = Model.preset(model)
        if (preset.num_experts, preset.num_topk) != (num_experts, num_topk):
            raise InputError(
                f"model {model!r} routes top-{preset.num_topk} of {preset.num_experts} experts but the data is top-{num_topk} of"
                f" {num_experts}; name the model that was recorded."
            )
        if preset.num_layers == num_layers:
            return preset.moe_layer_L
    return np.arange(num_layers, dtype=np.int32)


def layer_numbers(value: npt.ArrayLike, num_layers: int) -> Array:
    """`value` as int32 [L] of distinct numbers >= 0.

    Raises:
        InputError: another length, negative numbers, or a number twice.
    """
    moe_layer_L = frozen_array(value, np.int32, "moe_layer_L", (num_layers,))
    if moe_layer_L.min() < 0 or len(np.unique(moe_layer_L)) != num_layers:
        raise InputError(f"moe_layer_L must hold {num_layers} distinct layer numbers from 0; got {moe_layer_L.tolist()}.")
    return moe_layer_L


def _num_experts(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= _MAX_EXPERTS:
        raise InputError(f"num_experts must be a whole number from 1 to {_MAX_EXPERTS}; got {value!r}.")
    return int(value)


def _known(value: Array | None, num_tokens: int) -> Array | None:
    if value is None:
        return None
    known_T = np.asarray(value)
    if known_T.dtype != bool:
        raise InputError(f"known_T must be bool, True where a token's routing is known; got {known_T.dtype}.")
    known_T = frozen_array(known_T, np.bool_, "known_T", (num_tokens,))
    return None if known_T.all() else known_T


def _sequence_lengths(value: npt.ArrayLike, num_tokens: int) -> Array:
    seq_len_Q = frozen_array(value, np.int64, "seq_len_Q", (None,))
    if not seq_len_Q.size or seq_len_Q.min() < 1:
        q = int(np.argmax(seq_len_Q < 1)) if seq_len_Q.size else 0
        what = f"sequence {q} has {seq_len_Q[q]}" if seq_len_Q.size else "there is none"
        raise InputError(f"every trace needs a sequence, and every sequence a token, but {what}; leave empty ones out.")
    # The total of huge lengths may wrap round in int64.
    if seq_len_Q.max() > num_tokens or seq_len_Q.sum() != num_tokens:
        total = sum(seq_len_Q.tolist())
        raise InputError(f"the {len(seq_len_Q)} sequence lengths sum to {total} but there are {num_tokens} tokens; correct seq_len_Q.")
    return seq_len_Q


def _checked_ids(topk_TLK: Array, known_T: Array | None, num_experts: int) -> Array:
    dtype = np.dtype(np.uint8 if num_experts <= 256 else np.int16)
    info = np.iinfo(dtype)
    if topk_TLK.dtype != dtype and (topk_TLK.min() < info.min or topk_TLK.max() > info.max):
        wrong_TLK = (topk_TLK < info.min) | (topk_TLK > info.max)
        in_known_TLK = wrong_TLK if known_T is None else wrong_TLK & known_T[:, None, None]
        if not in_known_TLK.any():
            raise InputError(
                f"rows marked unknown hold ids from {topk_TLK.min()} to {topk_TLK.max()}, which {dtype} cannot hold; write 0 there."
            )
        t, layer, k = (int(i) for i in np.unravel_index(int(in_known_TLK.argmax()), topk_TLK.shape))
        # An earlier fault may lie inside the dtype's range: look at what comes before.
        if t > 0:
            before_T = None if known_T is None else known_T[:t]
            keep_TLK = np.where(wrong_TLK[:t], 0, topk_TLK[:t]) if before_T is not None else topk_TLK[:t]
            _raise_first_fault(np.ascontiguousarray(keep_TLK, dtype), before_T, num_experts)
        raise _range_fault(topk_TLK, t, layer, k, num_experts)
    out = frozen_array(topk_TLK, dtype, "topk_TLK")
    _raise_first_fault(out, known_T, num_experts)
    return out


def _raise_first_fault(topk_TLK: Array, known_T: Array | None, num_experts: int) -> None:
    known = np.empty(0, np.bool_) if known_T is None else known_T
    known.flags.writeable = False
    frozen = topk_TLK.view()
    frozen.flags.writeable = False
    t, layer, k = first_fault(frozen, known, num_experts)
    if t < 0:
        return
    if not 0 <= topk_TLK[t, layer, k] < num_experts:
        raise _range_fault(topk_TLK, t, layer, k, num_experts)
    raise InputError(
        f"token {t}, layer {layer} lists expert {int(topk_TLK[t, layer, k])} twice ({topk_TLK[t, layer].tolist()}); mark such rows"
        " unknown in known_T or read them with foremoe.integrations.from_routed_experts."
    )


def _range_fault(topk_TLK: Array, t: int, layer: int, k: int, num_experts: int) -> InputError:
    return InputError(
        f"token {t}, layer {layer} lists expert {int(topk_TLK[t, layer, k])}, outside [0, {num_experts}); correct num_experts, or mark"
        " the token unknown in known_T."
    )


@numba.njit(nogil=True, cache=True)
def first_fault(topk_TLK, known_T, num_experts):  # type: ignore[no-untyped-def]
    """(token, layer, position) of the first id out of range or repeated in its token; (-1, -1, -1) if there is none.

    An empty `known_T` means that all tokens are known.
    """
    num_tokens, num_layers, num_topk = topk_TLK.shape
    seen_in_row_E = np.full(num_experts, -1, np.int64)
    for t in range(num_tokens):
        if known_T.size and not known_T[t]:
            continue
        for layer in range(num_layers):
            row = t * num_layers + layer
            for k in range(num_topk):
                e = np.int64(topk_TLK[t, layer, k])
                if e < 0 or e >= num_experts or seen_in_row_E[e] == row:
                    return t, layer, k
                seen_in_row_E[e] = row
    return -1, -1, -1
