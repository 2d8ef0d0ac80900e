"""Assigns payloads to sequences and reads the envelopes of payloads, which are dicts with metadata."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, as_array
from foremoe.base.errors import InputError, naming
from foremoe.base.fields import whole
from foremoe.routing.readers.payloads import as_numpy

# Letters: B sequences of a batch, S tokens of its longest, Q sequences.

# Largest number of tokens that an envelope may state. It is longer than the context of any model.
MAX_TOKENS = 2**24
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """The routing of one sequence as an engine sent it, with its metadata. Metadata that is not known is None.

    Instead of `data`, `segments` may hold the payloads of several requests (turns, resumed rollouts) in order. A segment may be a
    payload of any kind and has its own `start`. If segments overlap, the last segment in which a token is known determines the
    routing of the token. Tokens outside all segments are unknown.
    """

    data: Any = None  # payload in any encoding, from token `start` on, or from the end of the prompt if `prompt` is given
    prompt: Any = None  # payload of the prompt's tokens, from token `start` on, if the engine sends it separately
    length: int | None = None  # number of tokens of the sequence
    prompt_length: int | None = None  # number of tokens of its prompt
    start: int = 0  # token to which the first row belongs
    num_last_missing: int | None = 0  # number of tokens after the last row if `length` is None; None: length is required
    dtype: Any = None  # type of `data`, if the engine sent it separately
    shape: Any = None  # shape of `data`, if the engine sent it separately
    segments: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if self.segments and (self.data is not None or self.prompt is not None or self.start):
            raise InputError("a sequence of several segments has no data, prompt or start of its own; give them in its segments.")
        for name, low in (("start", 0), ("num_last_missing", 0), ("length", 1), ("prompt_length", 0)):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, whole(value, name, low, MAX_TOKENS))
        if self.length is not None and max(self.start, self.prompt_length or 0) > self.length:
            extent = f"start {self.start} and {self.prompt_length or 0} prompt tokens"
            raise InputError(f"a sequence of {self.length} tokens cannot have {extent}; correct lengths or start.")


def unpack(payloads: Any, lengths: Any = None, start: Any = None, mask: Any = None) -> list[Routed]:
    """Returns one `Routed` per sequence. The arguments are those of `from_routed_experts`."""
    if mask is not None:
        return _cut_by_mask(payloads, mask, lengths, start)
    items = _separate(payloads)
    if not items:
        raise InputError("there are no payloads; give at least one.")
    lengths_Q, start_Q = _one_each(lengths, len(items), "lengths"), _one_each(start, len(items), "start")
    out = []
    for q, (item, length, first) in enumerate(zip(items, lengths_Q, start_Q, strict=True)):
        with naming(f"sequence {q}"):
            out.append(_with_length(parse_routed(item), length, first))
    return out


def parse_routed(item: Any, depth: int = 0) -> Routed:
    """Converts one payload with its envelope to `Routed`. `depth` is the number of envelopes around the payload."""
    if depth > _MAX_DEPTH:
        raise InputError(f"the payload lies in more than {_MAX_DEPTH} envelopes; send it in one.")
    if isinstance(item, Routed):
        if not isinstance(item.data, Mapping):
            return item
        inner = parse_routed(item.data, depth + 1)
        given = {name: getattr(inner, name) for name in ("data", "dtype", "shape", "prompt") if getattr(inner, name) is not None}
        return dataclasses.replace(item, **{"data": None, **given, "start": inner.start or item.start})
    if not isinstance(item, Mapping):
        return Routed(data=item)
    if "data" in item:
        if item.get("encoding", "base64") != "base64":
            raise InputError(f"the payload's encoding is {str(item['encoding'])[:40]!r}; only base64 is read.")
        return Routed(data=item["data"], dtype=item.get("dtype"), shape=item.get("shape"), start=item.get("start") or 0)
    if isinstance(item.get("meta_info"), Mapping):
        return parse_routed({**item, **item["meta_info"], "meta_info": None}, depth + 1)
    if not {"routed_experts", "prompt_routed_experts"} & set(item):
        keys = ", ".join(sorted(str(key)[:20] for key in list(item)[:8]))
        hint = "; read whole responses with routing.readers.vllm or .sglang" if {"choices", "outputs"} & set(item) else ""
        raise InputError(f"a dict of routing needs routed_experts, or data with shape and dtype; this one has {keys}{hint}.")
    prompt_tokens, tokens = num_ids(item.get("prompt_token_ids")), num_ids(item.get("token_ids"))
    counts = prompt_tokens, tokens
    if None in counts:
        counts = item.get("prompt_tokens"), item.get("completion_tokens")
    length = None if None in counts else sum(whole(n, "a count of tokens", 0) for n in counts)
    outer = Routed(
        data=item.get("routed_experts"), prompt=item.get("prompt_routed_experts"), length=length,
        prompt_length=prompt_tokens if "prompt_routed_experts" in item else None,
        start=item.get("routed_experts_start_len") or item.get("routed_experts_prompt_start") or item.get("start") or 0,
    )  # fmt: skip
    return parse_routed(outer, depth + 1)


def num_ids(ids: Any) -> int | None:
    """Returns the number of token ids, or None if they were not sent."""
    if ids is None or (hasattr(ids, "__len__") and not isinstance(ids, str)):
        return None if ids is None else len(ids)
    raise InputError(f"token ids must be a list; got {type(ids).__name__}.")


def payload_bytes(items: Sequence[Any], depth: int = 0) -> int:
    """Returns the size of payloads as received, in bytes, without envelopes. The size of nested lists is estimated."""
    if depth > _MAX_DEPTH:
        return 0  # an error is raised when it is read
    total, inner = 0, depth + 1
    for item in items:
        if isinstance(item, Routed):
            total += payload_bytes((item.data, item.prompt, *item.segments), inner)
        elif isinstance(item, Mapping):
            total += payload_bytes(list(item.values()), inner)
        elif isinstance(item, list | tuple):
            total += len(item) * max(payload_bytes([next((x for x in item if x is not None), 0)], inner), 8)
        else:
            total += getattr(item, "nbytes", len(item) if isinstance(item, str | bytes | bytearray) else 8)
    return total


def _with_length(item: Routed, length: Any, start: Any) -> Routed:
    """Returns `item` with the caller's length and start. Raises InputError if they contradict its own."""
    length = None if length is None else whole(length, "length", 1)
    if None not in (length, item.length) and length != item.length:
        raise InputError(f"lengths says {length} tokens but the payload {item.length}; correct lengths, or leave it out.")
    first = 0 if start is None else whole(start, "start", 0)
    if first and item.start and first != item.start:
        raise InputError(f"start says {first} but the payload {item.start}; correct start, or leave it out.")
    # An engine's rows end at the second-to-last token. If the caller gives the start, the position of all rows is known.
    is_told = start is not None and item.num_last_missing is None
    if length is None and not first and not is_told:
        return item
    length = item.length if length is None else length
    last = 1 if is_told else item.num_last_missing
    return dataclasses.replace(item, length=length, start=first or item.start, num_last_missing=last)


def _separate(payloads: Any) -> list[Any]:
    """Returns the payloads of a list, a batch or a nested tensor. A single payload becomes a list."""
    if getattr(payloads, "is_nested", False):
        return list(payloads.unbind())
    array = as_numpy(payloads) if not isinstance(payloads, list | tuple) else None
    if array is not None:
        if array.ndim > 4:
            raise InputError(f"routing must be [sequences, tokens, layers, top-k] or have fewer axes; got {list(array.shape)}.")
        return list(array) if array.ndim == 4 else [array]
    if not isinstance(payloads, list | tuple):
        return [payloads]
    if _is_pair(payloads) or any(map(_is_pair, payloads)):
        raise InputError("a pair of shape and bytes does not contain its dtype; give {'data': .., 'shape': .., 'dtype': ..}.")
    depth, leaf = _depth(payloads)
    if not isinstance(leaf, int | float | np.number) and depth > 1:
        kind = "empty" if leaf is None else type(leaf).__name__
        raise InputError(f"a list of payloads must hold one per sequence; got lists in lists, {depth} deep, of {kind}.")
    if depth not in (1, 3, 4) or (depth == 1 and isinstance(leaf, int | float | np.number)):
        raise InputError(f"nested lists of routing must be [tokens][layers][top-k], or a list of such; these are {depth} deep.")
    return [payloads] if depth == 3 else list(payloads)


def _is_pair(value: Any) -> bool:
    """Returns True for bytes or text together with three integers, a common way to serialize arrays."""
    if not isinstance(value, list | tuple) or not 2 <= len(value) <= 3:
        return False
    shapes = [x for x in value if isinstance(x, list | tuple) and len(x) == 3 and all(isinstance(n, int) for n in x)]
    return len(shapes) == 1 and any(isinstance(x, str | bytes | bytearray | memoryview) for x in value)


def _depth(value: Any, limit: int = 6) -> tuple[int, Any]:
    """Returns the depth of nested lists (up to a limit) at the first element that is neither a list nor None, and the element."""
    if not isinstance(value, list | tuple) or limit == 0:
        return 0, value
    found = (0, None)
    for x in value:
        found = _depth(x, limit - 1)
        if found[1] is not None:
            break
    return found[0] + 1, found[1]


def _one_each(value: Any, num: int, name: str) -> list[Any]:
    if value is None or isinstance(value, int | np.integer):
        if value is not None and num != 1 and name == "lengths":
            raise InputError(f"lengths is one number but there are {num} sequences; give one for each.")
        return [value] * num
    try:
        values = list(value)
    except TypeError:
        raise InputError(f"{name} must be whole numbers, one per sequence; got {type(value).__name__}.") from None
    if len(values) != num:
        raise InputError(f"{name} has {len(values)} numbers for {num} sequences; give one for each.")
    return [x.item() if hasattr(x, "item") else x for x in values]


def _cut_by_mask(payloads: Any, mask: Any, lengths: Any, start: Any) -> list[Routed]:
    """Returns the sequences of a padded batch, without the padding on either side."""
    array = as_numpy(payloads) if not isinstance(payloads, list | tuple) else None
    mask_BS: Array = as_array(mask.cpu() if hasattr(mask, "cpu") else mask, "mask")
    if array is None or array.ndim != 4 or mask_BS.shape != array.shape[:2] or lengths is not None or start is not None:
        shape = "a list" if array is None else list(array.shape)
        goes = "goes with one array [sequences, tokens, layers, top-k], and without lengths and start"
        raise InputError(f"mask [sequences, tokens] {goes}; got mask {list(mask_BS.shape)} and payloads {shape}.")
    if mask_BS.dtype.kind not in "biu" or (mask_BS.size and not ((mask_BS == 0) | (mask_BS == 1)).all()):
        raise InputError(f"mask must be bool, or 0 and 1; got {mask_BS.dtype}.")
    out = []
    for q, mask_S in enumerate(mask_BS.astype(bool)):
        at = np.flatnonzero(mask_S)
        if not at.size or at[-1] - at[0] + 1 != at.size:
            raise InputError(f"sequence {q}: its mask must be one run of at least one token; it has {at.size} in pieces or none.")
        out.append(Routed(data=array[q, at[0] : at[-1] + 1], length=at.size))
    return out
