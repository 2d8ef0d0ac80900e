"""`Reader`, which aligns the payloads of a sequence with its tokens, for a given model."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foremoe.base.arrays import Array, frozen_array
from foremoe.base.budget import require_budget
from foremoe.base.errors import InputError, naming
from foremoe.base.fields import whole
from foremoe.machine.model import Model
from foremoe.routing.checks import MAX_EXPERTS, known_model, layer_numbers
from foremoe.routing.readers.counting import known_rows
from foremoe.routing.readers.payloads import Expected, decode, integer_dtype
from foremoe.routing.readers.sequences import Routed, parse_routed

# Letters: T tokens, L MoE layers, K top-k.


class Read(NamedTuple):
    """Decoded routing of one sequence."""

    num_tokens: int
    pieces: list[tuple[int, Array, Array]]  # first token, MoE layers among the payload's layers, rows [T, layers, K]
    num_padding: int = 0  # number of rows that were cut off


class Reader:
    """A decoder of the sequences of one model. Unknown properties of the model are taken from the first sequence.

    The arguments are those of `from_routed_experts`.
    """

    def __init__(
        self, model: str | Model | None = None, num_experts: int | None = None, num_topk: int | None = None,
        num_layers: int | None = None, moe_layer_L: npt.ArrayLike | None = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        preset = known_model(model)
        self.model = model.name if isinstance(model, Model) else model
        experts = _agree(preset, num_experts, "num_experts")
        if experts is None and isinstance(model, str):
            names = ", ".join(Model.preset_names())
            raise InputError(f"there is no model preset {model!r}; give num_experts, a Model, or one of {names}.")
        if experts is None:
            raise InputError("give model, or num_experts: the largest expert in a payload would be a guess.")
        self.num_experts = whole(experts, "num_experts", 1, MAX_EXPERTS)
        self._topk = _agree(preset, num_topk, "num_topk")
        self._moe: Array | None = preset.moe_layer_L if preset is not None else None
        if moe_layer_L is not None:
            numbers = frozen_array(moe_layer_L, np.int32, "moe_layer_L", (None,))
            if not len(numbers):
                raise InputError("moe_layer_L is empty; name at least one layer.")
            self._moe = layer_numbers(numbers, len(numbers))
        self._num_layers = None if num_layers is None else whole(num_layers, "num_layers")
        self._dtype = None if dtype is None else integer_dtype(dtype)
        if self._num_layers is not None and self._moe is not None:
            self._positions(self._num_layers)

    @property
    def moe_layer_L(self) -> Array:
        """Layers to read, with the model's own layer numbers, int32 [L]."""
        if self._moe is None:
            raise InputError("the payloads do not show the layers; give model or moe_layer_L.")
        return self._moe

    def topk(self) -> int:
        """Returns top-k. Raises InputError if top-k is not known."""
        if self._topk is None:
            raise InputError("the payloads do not show top-k; give model or num_topk.")
        return self._topk

    def empty(self, num_tokens: int) -> Array:
        """Returns an array of zeros for the experts of all tokens, uint8 or int16 [T, L, K]."""
        return np.zeros((num_tokens, len(self.moe_layer_L), self.topk()), np.uint8 if self.num_experts <= 256 else np.int16)

    def require_tokens(self, num_tokens: int, source_bytes: int) -> None:
        """Raises InputError if `source_bytes`, the size of the payloads, is too small for the routing of `num_tokens` tokens."""
        # If all payloads are None, the number of tokens comes from the lengths alone.
        layers = 1 if self._moe is None else len(self._moe)
        shape = num_tokens, layers, self._topk or 1
        num_bytes = math.prod(shape) * (1 if self.num_experts <= 256 else 2)
        require_budget(num_bytes, f"routing of shape {list(shape)}", "correct lengths or start", source_bytes)

    def read(self, item: Routed) -> Read:
        """Decodes the payloads of one sequence."""
        if item.segments:
            return self._join_segments(item)
        length, start, pieces = item.length, item.start, []
        if item.prompt is not None:
            prompt_length = item.prompt_length
            rows_TLK = self._decode(item.prompt, None, None, () if prompt_length is None else (prompt_length - start,))
            if prompt_length is not None and start + len(rows_TLK) != prompt_length:
                rows = f"{len(rows_TLK)} rows of prompt from token {start} on"
                raise InputError(f"{rows} do not make its {prompt_length} tokens; correct them.")
            pieces.append((start, self._positions(rows_TLK.shape[1]), rows_TLK))
            start += len(rows_TLK)
        if item.data is None or (isinstance(item.data, str | bytes | bytearray | list | tuple) and not item.data):
            return _without_rows(item, start, pieces)
        fitting = _num_rows(length, start)
        # The payload may be a response without its prompt, because engines that send both may send None for a cached prompt.
        after_prompt = _num_rows(length, item.prompt_length) if item.prompt is None else ()
        rows_TLK = self._decode(item.data, item.dtype, item.shape, (*fitting, *after_prompt))
        num_rows = len(rows_TLK)
        if not num_rows:
            return _without_rows(item, start, pieces)
        if num_rows in after_prompt and num_rows not in fitting:
            start = item.prompt_length or 0
        if length is None and item.num_last_missing is None:
            says = "neither token ids nor counts of tokens for each choice, so its rows may belong to any tokens"
            raise InputError(f"the answer has {says}; ask for token ids, or give lengths, or start (0 if none was requested).")
        if length is None:
            length = start + num_rows + (item.num_last_missing or 0)
        elif start > length or num_rows < length - start - 1:
            rows = f"{num_rows} rows from token {start} on"
            lack = f"do not reach the end of {length} tokens, the last of which alone may be missing"
            cure = (
                f"give start={length - 1 - num_rows} if the request left out that many" if length > num_rows else "correct start"
            )
            raise InputError(f"{rows} {lack}; {cure}, or correct lengths.")
        used = min(num_rows, length - start)
        if (rows_TLK[used:] != rows_TLK[used : used + 1]).any():
            # Padding repeats one row. A resumed request may send the rows of its first part again before the others.
            found = f"{num_rows} rows from token {start} on for {length} tokens, and those beyond are routing, not padding"
            cure = "for a resumed sequence, give the routing of each request as a segment, in a nested list"
            raise InputError(f"{found}; {cure}, or correct lengths.")
        pieces.append((start, self._positions(rows_TLK.shape[1]), rows_TLK[:used]))
        return Read(length, pieces, num_rows - used)

    def _join_segments(self, item: Routed) -> Read:
        """Joins the segments of one sequence, taking each token from one of them, as described in `Routed`."""
        reads = []
        for i, segment in enumerate(item.segments):
            with naming(f"segment {i}"):
                reads.append(self.read(parse_routed(segment)))
        num_tokens = max(read.num_tokens for read in reads)
        if item.length is not None and num_tokens > item.length:
            raise InputError(f"segments reach token {num_tokens} of a sequence of {item.length}; correct lengths or start.")
        pieces = [piece for read in reads for piece in read.pieces]
        owner_T, known_T = np.full(num_tokens, -1), np.zeros(num_tokens, bool)
        for i, (first, layer_L, rows_TLK) in enumerate(pieces):
            here = slice(first, first + len(rows_TLK))
            new_T = known_rows(rows_TLK, layer_L)
            takes_T = new_T | ~known_T[here]
            owner_T[here][takes_T] = i
            known_T[here] |= new_T
        found = []
        cuts = np.flatnonzero(np.diff(owner_T, prepend=-2, append=-2))
        for low, high in itertools.pairwise(cuts.tolist()):
            if owner_T[low] >= 0:
                first, layer_L, rows_TLK = pieces[owner_T[low]]
                found.append((low, layer_L, rows_TLK[low - first : high - first]))
        return Read(num_tokens if item.length is None else item.length, found, sum(read.num_padding for read in reads))

    def _decode(self, payload: Any, dtype: Any, shape: Any, num_rows: tuple[int, ...]) -> Array:
        dtype = self._dtype if dtype is None else integer_dtype(dtype)
        rows = tuple(dict.fromkeys(num_rows))
        rows_TLK = decode(payload, Expected(self._topk, self._layer_counts(), rows, dtype, shape, self.num_experts - 1))
        self._topk = rows_TLK.shape[2]
        if self._topk > self.num_experts:
            raise InputError(f"top-{self._topk} of {self.num_experts} experts is impossible; correct num_experts.")
        largest = np.iinfo(rows_TLK.dtype).max
        if largest < self.num_experts - 1:
            beyond = f"{rows_TLK.dtype} ends at {largest} but there are {self.num_experts} experts: larger ones were lost"
            raise InputError(f"{beyond} when routing was recorded; record a wider dtype, or correct num_experts or dtype.")
        return rows_TLK

    def _layer_counts(self) -> tuple[int, ...]:
        """Returns the numbers of layers that a row may have."""
        if self._num_layers is not None:
            return (self._num_layers,)
        if self._moe is None:
            return ()
        return tuple(dict.fromkeys((int(self._moe.max()) + 1, len(self._moe))))

    def _positions(self, num_layers: int) -> Array:
        """Returns the positions of the MoE layers among the layers of a row, int64. They may be all layers of the row."""
        if self._moe is None:
            self._moe = np.arange(num_layers, dtype=np.int32)
        counts = self._layer_counts()
        if num_layers == len(self._moe) and num_layers in counts:
            return np.arange(num_layers, dtype=np.int64)
        if num_layers in counts and num_layers > self._moe.max():
            return self._moe.astype(np.int64)
        shown = " or ".join(map(str, counts))
        given = f"routing of {num_layers} layers was given where {shown} fit, {len(self._moe)} of them MoE"
        raise InputError(f"{given}; correct model, moe_layer_L or num_layers.")


def _without_rows(item: Routed, start: int, pieces: list[tuple[int, Array, Array]]) -> Read:
    """Returns a sequence that was aborted or whose routing was lost, with the prompt's rows at most."""
    length = item.length
    if length is None:
        length = start + (0 if item.data is None else item.num_last_missing or 0)
        if not pieces and (item.data is None or not length):
            raise InputError("a payload that is None or empty needs the length of its sequence; give lengths, or leave it out.")
    return Read(length, pieces)


def _num_rows(length: int | None, start: int | None) -> tuple[int, ...]:
    """Returns the possible numbers of rows from token `start` on, which are all or all but the last. Empty if not known."""
    return () if length is None or start is None else tuple(n for n in (length - start, length - start - 1) if n >= 0)


def _agree(model: Model | None, given: int | None, name: str) -> int | None:
    """Returns the number called `name` from the model or the argument. Raises InputError if they differ."""
    if given is None:
        return getattr(model, name, None)
    value = whole(given, name)
    if model is not None and value != getattr(model, name):
        raise InputError(f"{name} {value} contradicts the model, which has {getattr(model, name)}; give one of them.")
    return value
