"""Decodes one payload of a rollout engine, in any encoding, to an array of integers. Checks sizes before allocating memory."""

import binascii
import math
import string
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.stored import NPY, npy_array

# Letters: T rows (tokens), L layers of the payload, K top-k.

_NPY_BASE64 = "k05VTVBZ"
_BASE64 = frozenset(string.ascii_letters + string.digits + "+/=")
_BASE85 = frozenset(string.ascii_letters + string.digits + "!#$%&()*+-;<=>?@^_`{|}~")
_LOOK = 1024  # number of characters of a text that are checked first
# Plans store layers as int16, like experts.
_MAX_LAYERS = int(np.iinfo(np.int16).max)
# Integer types that engines send without naming them, the most frequent first.
_WIRE = tuple(np.dtype(name) for name in ("<i4", "u1", "<i2", "<i8"))


class Expected(NamedTuple):
    """Properties of a payload that are known before it is decoded. A property that is not known is None, empty or 0."""

    num_topk: int | None = None
    num_layers: tuple[int, ...] = ()  # numbers of layers that a row may have
    num_rows: tuple[int, ...] = ()  # numbers of rows that the payload may have
    dtype: np.dtype[Any] | None = None
    shape: tuple[int, ...] | None = None  # shape that the engine sent with the payload
    largest: int = 0  # number of the last expert


def decode(payload: Any, expected: Expected) -> Array:
    """Returns the payload as an array of integers [T, L, K]. A payload with a buffer is not copied.

    Accepts arrays and tensors of shape [T, L, K], or flat ones if the shape is known. Also accepts nested lists [T][L][K] with
    None for unknown experts, raw bytes, the bytes of an .npy file, and base64 text of such bytes.
    """
    if isinstance(payload, str):
        return _from_base64(payload, expected)
    if isinstance(payload, bytes | bytearray | memoryview):
        blob = memoryview(payload).cast("B") if memoryview(payload).c_contiguous else memoryview(bytes(payload))
        return _from_npy(blob, expected) if blob[:6] == NPY else _from_raw(blob, expected)
    if isinstance(payload, list | tuple):
        return _shaped(_from_lists(payload), expected)
    array = as_numpy(payload)
    if array is None:
        kinds = "an array, a tensor, base64 text, bytes, nested lists or a dict"
        raise InputError(f"routing must be {kinds}; got {type(payload).__name__}.")
    return _shaped(array, expected)


def as_numpy(value: Any) -> Array | None:
    """Converts an array or tensor of integers to numpy, without importing torch. Returns None for other objects."""
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "iu":
            cure = ", as pandas holds a column of lists; give pyarrow's column.to_pylist()" if value.dtype.kind == "O" else ""
            raise InputError(f"routing must be whole numbers; got {value.dtype} of shape {list(value.shape)}{cure}.")
        return value
    if type(value).__module__.partition(".")[0] != "torch" or not hasattr(value, "detach"):
        return None
    name = str(value.dtype).removeprefix("torch.")
    if name not in ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        raise InputError(f"routing must be whole numbers; got a tensor of {name} of shape {list(value.shape)}.")
    try:
        array: Array = value.detach().cpu().numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # raised for sparse, nested and meta tensors
        raise InputError(f"a tensor {list(value.shape)} on {value.device} has no plain values; give a dense one.") from None
    return array


def integer_dtype(value: Any) -> np.dtype[Any]:
    """Returns a numpy integer dtype, given a name such as "uint16" or a numpy or torch dtype. It is little-endian by default."""
    text = str(value).removeprefix("torch.") if not isinstance(value, type | np.dtype) else value
    try:
        dtype = np.dtype(text)
    except (TypeError, ValueError, SyntaxError, MemoryError):
        dtype = np.dtype(object)
    if dtype.kind not in "iu":
        raise InputError(f"dtype must name whole numbers, such as int32 or uint8; got {str(value)[:40]!r}.")
    return dtype


def _from_base64(text: str, expected: Expected) -> Array:
    _require_base64(text[:_LOOK])
    if len(text) % 4:
        raise InputError(f"base64 of {len(text)} characters is truncated: not a multiple of 4; send the whole payload.")
    padding = len(text[-2:]) - len(text[-2:].rstrip("="))
    is_npy = text.startswith(_NPY_BASE64)
    if not is_npy:
        _raw_layout(len(text) // 4 * 3 - padding, expected)  # raises before anything is decoded
    try:
        blob = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        _require_base64(text)
        raise InputError(f"base64 of {len(text)} characters is damaged: = is not at its end alone.") from None
    return _from_npy(memoryview(blob), expected) if is_npy else _from_raw(memoryview(blob), expected)


def _require_base64(text: str) -> None:
    """Raises InputError if `text` has a character outside base64. The error recognises base85, which Python also writes."""
    if set(text) <= _BASE64:
        return
    cure = "decode it with base64.b85decode and give the bytes" if set(text) <= _BASE85 else "send it as the engine gave it"
    lack = "not base64, A-Z a-z 0-9 + / and = at the end" + (", but may be base85" if set(text) <= _BASE85 else "")
    raise InputError(f"text that begins with {text[:12]!r} is {lack}; {cure}.")


def _from_raw(blob: memoryview, expected: Expected) -> Array:
    dtype, shape = _raw_layout(len(blob), expected)
    array = np.frombuffer(blob, dtype)
    guessed = expected.dtype is None and expected.shape is None and dtype.itemsize < 4
    if guessed and array.size > 1 and not array[1 : 1 << 16 : 2].any():
        # The first half of an int32 payload has as many bytes as a whole int16 payload.
        layout = f"{dtype} of shape {list(shape)}, judging by their number, but look like wider numbers"
        raise InputError(f"{len(blob)} bytes would be {layout}; the payload is truncated, or give dtype.")
    return array.reshape(shape)


def _raw_layout(num_bytes: int, expected: Expected) -> tuple[np.dtype[Any], tuple[int, int, int]]:
    """Returns the only dtype and shape that fit the raw bytes. Without a dtype and row counts, assumes int32, as SGLang sends."""
    if expected.shape is not None:
        dtype, shape = expected.dtype or np.dtype("<i4"), checked_shape(expected.shape)
        _require_sizes(shape, expected)
        needed = math.prod(shape) * dtype.itemsize
        if needed != num_bytes:
            layout = f"{dtype} of shape {list(shape)}, which takes {needed}"
            raise InputError(f"{num_bytes} bytes cannot hold {layout}; the payload is truncated, or shape or dtype is wrong.")
        return dtype, shape
    if expected.num_topk is None or not expected.num_layers:
        raise InputError(f"{num_bytes} raw bytes have no shape; give model, or num_topk and num_layers.")
    wire = tuple(dtype for dtype in _WIRE if np.iinfo(dtype).max >= expected.largest)
    dtypes = (expected.dtype,) if expected.dtype else wire if expected.num_rows else wire[:1]
    fits = []
    for dtype in dtypes:
        for num_layers in expected.num_layers:
            rows, rest = divmod(num_bytes, num_layers * expected.num_topk * dtype.itemsize)
            if not rest and (not expected.num_rows or rows in expected.num_rows):
                fits.append((dtype, (rows, num_layers, expected.num_topk)))
    if len(fits) == 1 or (fits and not num_bytes):
        return fits[0]
    if fits:
        layouts = " and ".join(f"{dtype} {list(shape)}" for dtype, shape in fits)
        raise InputError(f"{num_bytes} bytes fit both {layouts}; give dtype, num_layers or lengths.")
    rows_text, layers, names = (" or ".join(map(str, some)) for some in (expected.num_rows, expected.num_layers, dtypes))
    wanted = f"{rows_text or 'whole'} rows of {layers} layers x top-{expected.num_topk} of {names}"
    cure = "the payload is truncated, or lengths, start, num_layers, num_topk or dtype is wrong"
    raise InputError(f"{num_bytes} bytes do not make {wanted}; {cure}.")


def checked_shape(value: Any) -> tuple[int, int, int]:
    """Returns the shape that an engine sent with a payload, as (rows, layers, top-k)."""
    shape = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()
    if len(shape) != 3 or any(isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 0 for n in shape):
        raise InputError(f"shape must be [rows, layers, top-k]; got {str(value)[:60]}.")
    return int(shape[0]), int(shape[1]), int(shape[2])


def _from_npy(blob: memoryview, expected: Expected) -> Array:
    """Returns the array of an .npy file in memory, without a copy."""
    array = npy_array(blob)
    if array.dtype.kind not in "iu":
        says = f"{array.dtype.str} of shape {list(array.shape)}"
        raise InputError(f"the .npy file must hold whole numbers; its header says {says}.")
    return _shaped(array, expected)


def _from_lists(tokens: Sequence[Any]) -> Array:
    """Converts nested lists to int32 [T, L, K]. None, whether for a token, a layer or an expert, becomes -1."""
    layers = _level(tokens, "tokens")
    rows = _level(layers, "layers")
    kinds = set(map(type, rows))
    if type(None) in kinds:
        rows = [-1 if e is None else e for e in rows]
        kinds.discard(type(None))
    wrong = [kind.__name__ for kind in kinds if kind is not int and not issubclass(kind, np.integer)]
    if wrong:
        raise InputError(f"nested lists of routing must hold whole numbers or None; got {' and '.join(sorted(wrong)[:3])}.")
    try:
        wide = np.fromiter(rows, np.int64, len(rows))
        flat = wide.astype(np.int32)  # numpy 1 would cut off the upper bits when converting the list directly
        beyond = not np.array_equal(flat, wide)
    except OverflowError:
        beyond = True
    if beyond:
        raise InputError("nested lists of routing hold numbers beyond 32 bits; these are not experts.")
    T = len(tokens)
    return flat.reshape(T, len(layers) // T, len(rows) // max(len(layers), 1))


def _level(lists: Sequence[Any], what: str) -> list[Any]:
    """Returns the elements of lists of equal length, one after the other. None among the lists counts as a list of None."""
    kinds = set(map(type, lists)) - {list, tuple, type(None)}
    lengths = set(map(len, (x for x in lists if x is not None))) if not kinds else set()
    if kinds or len(lengths) != 1 or 0 in lengths:
        found = " and ".join(sorted(kind.__name__ for kind in kinds)[:3])
        found = found or (f"lengths {sorted(lengths)[:4]}" if lengths else "nothing but None")
        raise InputError(f"nested lists must be [tokens][layers][top-k], each level of one length; among the {what} are {found}.")
    fill = (None,) * lengths.pop()
    return list(chain.from_iterable(fill if x is None else x for x in lists))


def _shaped(array: Array, expected: Expected) -> Array:
    """Returns `array` as [T, L, K]. One or two axes are split as expected."""
    if expected.shape is not None and array.shape != checked_shape(expected.shape):
        raise InputError(f"the payload has shape {list(array.shape)} but {list(expected.shape)} was sent with it; correct it.")
    one_layer = array.ndim == 2 and array.shape[1] == expected.num_topk and 1 not in expected.num_layers
    if array.ndim in (1, 2) and expected.num_topk is not None and expected.num_layers and not one_layer:
        num_rows = (len(array),) if array.ndim == 2 else expected.num_rows
        flat = expected._replace(num_rows=num_rows, dtype=array.dtype, shape=None)
        return array.reshape(_raw_layout(array.nbytes, flat)[1])
    if array.ndim != 3:
        cure = ": stack one array per layer on axis 1, numpy.stack(layers, axis=1)" if array.ndim == 2 else ""
        raise InputError(f"routing must have shape [tokens, layers, top-k]; got {list(array.shape)}{cure}.")
    _require_sizes(array.shape, expected)
    return array


def _require_sizes(shape: Sequence[int], expected: Expected) -> None:
    """Raises InputError unless the axes [layers, top-k] fit this model, or any model if it is not known."""
    _, num_layers, num_topk = shape
    if not 1 <= num_layers <= _MAX_LAYERS or not 1 <= num_topk <= _MAX_LAYERS:
        raise InputError(
            f"routing must have shape [tokens, layers, top-k] with 1 to {_MAX_LAYERS} of the last two; got {list(shape)}."
        )
    if expected.num_topk is not None and num_topk != expected.num_topk:
        raise InputError(f"routing of shape {list(shape)} is not top-{expected.num_topk}; correct model or num_topk.")
