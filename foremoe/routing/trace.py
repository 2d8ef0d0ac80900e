"""`RoutingTrace`, which holds the experts that the router chose for every token and checks them strictly."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, ArrayValue, Length, array, as_array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.base.tensor_file import digest
from foremoe.machine.model import Model
from foremoe.routing.checks import MAX_EXPERTS, checked_ids, checked_known, checked_lengths, layer_numbers, preset_layers

# Letters: T tokens, L MoE layers, K top-k, Q sequences, E experts.

_BLOCK = 2**14  # number of tokens that are compared at once


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class RoutingTrace(ArrayValue):
    """Routing of whole sequences, stored one after the other. Sequence q has the tokens ``cuts[q]:cuts[q+1]``.

    A trace has no padding and no placeholder ids. If a recording has them, `from_routed_experts` marks their tokens in `known_T`.

    Attributes:
        topk_TLK: Logical experts of each token, distinct within a token and layer, as uint8 (num_experts <= 256) or int16.
        num_experts: Number of logical experts in a layer.
        seq_len_Q: Number of tokens in each sequence, int64. Each number is at least 1, and the numbers sum to T.
        known_T: Whether the routing of each token was recorded, bool. Ids of tokens without recorded routing are ignored. None
            means that the routing of all tokens was recorded.
        moe_layer_L: The model's own layer numbers, int32. Defaults to those of the preset `model` if it has L layers, else to 0
            to L-1.
        model: Name of the model, or None. If it names a preset, experts and top-k must agree with the preset.
        source: Origin of the trace, as free text.
        id: Name of the trace in plans and reports. Defaults to `content_hash`.

    Raises:
        InputError: A shape is wrong, an id is out of range or repeated in a token, or lengths do not sum to T.

    Example:
        >>> topk_TLK = np.array([[[0, 3]], [[1, 3]], [[0, 2]]])
        >>> foremoe.RoutingTrace(topk_TLK=topk_TLK, num_experts=4, seq_len_Q=np.array([2, 1])).sequences([1]).topk_TLK.tolist()
        [[[0, 2]]]
    """

    topk_TLK: Array = array(np.int16)  # uint8 for up to 256 experts
    num_experts: int
    seq_len_Q: Array = array(np.int64)
    known_T: Array | None = array(np.bool_, optional=True)
    moe_layer_L: Array = None  # type: ignore[assignment]
    model: str | None = None
    source: str = ""
    id: str = ""

    def __post_init__(self) -> None:
        put = functools.partial(object.__setattr__, self)
        put("num_experts", whole(self.num_experts, "num_experts", 1, MAX_EXPERTS))
        for name, value in (("model", self.model or ""), ("source", self.source), ("id", self.id)):
            if not isinstance(value, str):
                raise InputError(f"{name} must be text; got {type(value).__name__}.")
        topk_TLK = as_array(self.topk_TLK, "topk_TLK")
        if topk_TLK.ndim != 3 or 0 in topk_TLK.shape or topk_TLK.dtype.kind not in "iu":
            given = f"{topk_TLK.dtype} {list(topk_TLK.shape)}"
            raise InputError(f"topk_TLK must hold integers [tokens, layers, top-k], each axis at least 1 long; got {given}.")
        T, L, K = topk_TLK.shape
        if self.num_experts < K:
            raise InputError(f"top-{K} of {self.num_experts} experts is impossible; a token's are distinct: check num_experts.")
        put("known_T", checked_known(self.known_T, T))
        put("topk_TLK", checked_ids(topk_TLK, self.known_T, self.num_experts))
        put("seq_len_Q", checked_lengths(self.seq_len_Q, T))
        default_L = preset_layers(self.model, L, self.num_experts, K)
        put("moe_layer_L", layer_numbers(default_L if self.moe_layer_L is None else self.moe_layer_L, L))
        put("model", self.model or None)
        if not self.id:
            put("id", self.content_hash())

    T = Length("topk_TLK")
    """Number of tokens."""

    L = Length("topk_TLK")
    """Number of MoE layers."""

    K = Length("topk_TLK")
    """Number of experts per token and layer."""

    Q = Length("seq_len_Q")
    """Number of sequences."""

    @property
    def cuts(self) -> Array:
        """First token of each sequence, followed by T, int64 [Q + 1]."""
        return np.concatenate([[0], np.cumsum(self.seq_len_Q)])

    def num_repeats(self) -> int:
        """Returns the number of known tokens with the same experts in all layers as the previous token.

        Real routing has few such tokens.
        """
        found = 0
        for low in range(1, self.T, _BLOCK):
            now_TLK, before_TLK = self.topk_TLK[low : low + _BLOCK], self.topk_TLK[low - 1 : low - 1 + _BLOCK]
            same_T = (now_TLK == before_TLK[: len(now_TLK)]).all(axis=(1, 2))
            if self.known_T is not None:
                same_T &= self.known_T[low : low + len(now_TLK)]
            first_Q = self.cuts[1:-1]
            same_T[first_Q[(first_Q >= low) & (first_Q < low + len(now_TLK))] - low] = False
            found += int(same_T.sum())
        return found

    def content_hash(self) -> str:
        """Returns 32 hex digits that hash everything that determines loads.

        The hash covers ids, known tokens, lengths, layer numbers and num_experts.
        """
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
        cls, path: str | os.PathLike[str], *, num_experts: int | None = None, model: str | Model | None = None,
        max_bytes: int | None = None,
    ) -> RoutingTrace:  # fmt: skip
        """Reads a trace from ``.npz`` or ``.safetensors``. Pickled data is never read.

        Arrays are named as in this class, or ``topk_ids`` and ``seq_len``. Arrays with other names, such as router weights, are
        not read.

        Args:
            path: The file.
            num_experts: Number of experts. Required if neither the file nor `model` gives it, because it cannot be derived from
                the largest id.
            model: Model whose routing was recorded, given as a `Model` or by name.
            max_bytes: Limit for decompressed arrays in memory. Defaults to 64 MiB, or to 16 times the file size if that is more.

        Raises:
            InputError: The file does not exist, cannot be read or lacks arrays, or this class does not accept its contents.
        """
        from foremoe.routing.files import load_trace

        return load_trace(path, num_experts=num_experts, model=model, max_bytes=max_bytes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an uncompressed ``.npz`` or a ``.safetensors`` file. `load` returns an equal trace, byte for byte.

        Raises:
            InputError: The suffix is not supported, or the file cannot be written.
        """
        from foremoe.routing.files import save_trace

        save_trace(self, path)

    @classmethod
    def concat(cls, traces: Sequence[RoutingTrace]) -> RoutingTrace:
        """Joins the sequences of several traces of one model, under a new id.

        The model's name is kept if it is the same in all traces.

        Raises:
            InputError: The list of traces is empty, or traces differ in layers, top-k or experts.
        """
        parts = list(traces)
        if not parts:
            raise InputError("concat needs at least one trace; got none.")
        first = parts[0]
        for i, part in enumerate(parts):
            shape, want = (part.L, part.K, part.num_experts), (first.L, first.K, first.num_experts)
            if shape != want:
                sizes = f"trace {i} has (layers, top-k, experts) {shape} but trace 0 has {want}"
                raise InputError(f"{sizes}; concatenate traces of one model.")
            if (part.moe_layer_L != first.moe_layer_L).any():
                raise InputError(f"trace {i} and trace 0 have different layer numbers; concatenate traces of the same layers.")
        known = [np.ones(p.T, bool) if p.known_T is None else p.known_T for p in parts]
        joined = cls.join_arrays(parts, "T") | cls.join_arrays(parts, "Q") | {"known_T": np.concatenate(known)}
        source = " + ".join(dict.fromkeys(p.source for p in parts if p.source))
        model = first.model if all(p.model == first.model for p in parts) else None
        return replace(first, **joined, model=model, source=source, id="")

    def sequences(self, indices: npt.ArrayLike) -> RoutingTrace:
        """Returns some sequences as a separate trace with a new id.

        Args:
            indices: Indices of the sequences in the desired order (repeats allowed), or a bool mask [Q].

        Raises:
            InputError: No sequence is selected, an index is out of range, or the mask does not have length Q.
        """
        index = as_array(indices, "indices")
        if index.dtype == bool and index.shape == (self.Q,):
            index = np.flatnonzero(index)
        if index.ndim != 1 or not index.size or index.dtype.kind not in "iu" or index.min() < 0 or index.max() >= self.Q:
            raise InputError(f"sequences needs numbers from 0 to {self.Q - 1} in a list, or a bool mask of length {self.Q}.")
        cuts = self.cuts
        token_T = np.concatenate([np.arange(cuts[q], cuts[q + 1]) for q in index])
        return replace(self, **self.cut_arrays(T=token_T, Q=index), id="")
