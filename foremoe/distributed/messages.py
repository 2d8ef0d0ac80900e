"""Messages between ranks: plain values as JSON, followed by raw arrays and bytes. Their content is never executed.

A message consists of the size of its JSON (uint32, little-endian), the JSON, and the bytes of its arrays and byte strings. The
JSON lists the arrays and strings in the same order. None, booleans, integers, floats, strings and lists are written as in JSON.
All other values are written as objects with a single key: ``tuple``, ``dict``, ``array`` (with dtype and shape) or ``bytes``
(with their number).
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from foremoe.base.errors import InputError, TransferError

MAX_BYTES = 1 << 30  # limit of a message; the largest ones of foremoe are plans and counts of some megabytes

_DTYPES = {np.dtype(code).str: np.dtype(code) for code in "bhilqBHILQefd"}  # integers and floating-point numbers
_HEAD_BYTES = 4
_to_json = json.JSONEncoder(separators=(",", ":")).encode


def encode(value: Any) -> bytes:
    """Encodes a value as a message.

    Args:
        value: None, bool, int, float, str, bytes, or a numpy array of integers or floating-point numbers. It can also be a list,
            a tuple or a dict (with string keys) of such values.

    Raises:
        InputError: The value contains an object of another type or takes more than `MAX_BYTES`.
    """
    blobs: list[Any] = []
    text = _to_json(_marked(value, blobs)).encode()
    size = _HEAD_BYTES + len(text) + sum(map(len, blobs))
    if size > MAX_BYTES:
        raise InputError(f"a message of {size} bytes is too large; the limit is {MAX_BYTES}. Send tensors with all_to_all.")
    return b"".join([len(text).to_bytes(_HEAD_BYTES, "little"), text, *blobs])


def decode(data: memoryview | bytes, rank: int) -> Any:
    """Decodes a message. The returned arrays are copies.

    Raises:
        TransferError: The message was not written by `encode`. The error names `rank`, the sender.
    """
    try:
        return _Reader(data).value()
    except (ValueError, OverflowError, RecursionError) as error:
        sent = f"rank {rank} sent data that is not a message of foremoe ({str(error)[:200]})"
        raise TransferError(f"{sent}; run the same foremoe on all ranks.", (rank,)) from None


def _marked(value: Any, blobs: list[Any]) -> Any:
    """Returns the JSON form of a value, and appends arrays and bytes that follow the JSON to `blobs`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_marked(item, blobs) for item in value]
    if kind is tuple:
        return {"tuple": [_marked(item, blobs) for item in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _marked(item, blobs) for key, item in value.items()}}
    if kind is bytes:
        blobs.append(value)
        return {"bytes": len(value)}
    if isinstance(value, np.ndarray) and value.dtype.str in _DTYPES:
        blobs.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return {"array": [value.dtype.str, list(value.shape)]}
    if isinstance(value, np.float64):
        return float(value)
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {kind.__name__}"
    raise InputError(f"a message cannot hold {what}; send plain values, lists, tuples, dicts with string keys, or number arrays.")


class _Reader:
    """Parser of a message. Every fault is a ValueError, and no memory is allocated for bytes that are missing."""

    def __init__(self, data: memoryview | bytes) -> None:
        size = int.from_bytes(data[:_HEAD_BYTES], "little")
        self._data, self._at = memoryview(data), _HEAD_BYTES
        self._json = json.loads(str(self._take(size), "utf-8"))

    def value(self) -> Any:
        found = self._read(self._json)
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes too many")
        return found

    def _read(self, mark: Any) -> Any:
        if isinstance(mark, list):
            return [self._read(item) for item in mark]
        if not isinstance(mark, dict):
            return mark
        match mark:
            case {"tuple": list(items)} if len(mark) == 1:
                return tuple([self._read(item) for item in items])
            case {"dict": dict(items)} if len(mark) == 1:
                return {key: self._read(item) for key, item in items.items()}
            case {"array": [str(name), list(shape)]} if len(mark) == 1 and name in _DTYPES and all(map(_is_length, shape)):
                return np.frombuffer(self._take(math.prod(shape) * _DTYPES[name].itemsize), _DTYPES[name]).reshape(shape).copy()
            case {"bytes": size} if len(mark) == 1 and _is_length(size):
                return bytes(self._take(size))
        raise ValueError(f"unknown entry {str(mark)[:80]}")

    def _take(self, size: int) -> memoryview:
        begin, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError(f"{self._at - len(self._data)} bytes are missing")
        return self._data[begin : self._at]


def _is_length(value: Any) -> bool:
    return type(value) is int and value >= 0
