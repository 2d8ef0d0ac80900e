"""Read-only arrays inside frozen value types: one way to take them in, one way to compare them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foremoe.base.errors import InputError

Array = npt.NDArray[Any]


def frozen_array(value: npt.ArrayLike, dtype: npt.DTypeLike, name: str, shape: Sequence[int | None] | None = None) -> Array:
    """Returns `value` as a C-contiguous, read-only array of `dtype`; without a copy where it already is one.

    The caller gives the array away: a writable array that it keeps must not be changed afterwards.

    Args:
        value: anything numpy reads as numbers.
        dtype: the wanted dtype. Integers must fit it exactly; NaN, infinity and fractions are refused for integer dtypes,
            NaN also for floating ones.
        name: what the error calls the array.
        shape: expected length per axis, None where any length will do.

    Raises:
        InputError: wrong number of axes, wrong length, or values that `dtype` cannot hold.
    """
    want = np.dtype(dtype)
    try:
        array = np.asarray(value)
    except ValueError:
        raise InputError(f"{name} is ragged; every row needs the same length.") from None
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise InputError(f"{name} must hold numbers; got dtype {array.dtype}.")
    if array.dtype.kind == "f" and array.size and np.isnan(array).any():
        raise InputError(f"{name} holds {int(np.isnan(array).sum())} NaN values; remove or replace them.")
    if want.kind in "iu" and array.dtype != want and array.size:
        if array.dtype.kind == "f" and (not np.isfinite(array).all() or (array != np.trunc(array)).any()):
            raise InputError(f"{name} must hold whole numbers; it has infinities or fractions.")
        low, high, info = array.min(), array.max(), np.iinfo(want)
        if low < info.min or high > info.max:
            raise InputError(f"{name} holds values from {low} to {high}, which {want} ({info.min} to {info.max}) cannot hold.")
    if shape is not None and (
        array.ndim != len(shape) or any(w is not None and w != h for w, h in zip(shape, array.shape, strict=True))
    ):
        expected = "[" + ", ".join("any" if w is None else str(w) for w in shape) + "]"
        raise InputError(f"{name} must have shape {expected}; got {list(array.shape)}.")
    out = np.ascontiguousarray(array, dtype=want).reshape(array.shape).view()
    out.flags.writeable = False
    return out


def require_non_negative(array: Array, name: str) -> None:
    """Raises InputError when `array` holds a value below zero."""
    if array.size and array.min() < 0:
        raise InputError(f"{name} holds {int((array < 0).sum())} negative values (smallest {array.min()}); counts are >= 0.")


class ArrayValue:
    """Mix-in for frozen dataclasses with array fields: `same_as` compares every field, arrays byte by byte."""

    __slots__ = ()

    def same_as(self, other: object) -> bool:
        """True if `other` is of the same type and every field is equal (arrays: dtype, shape and bytes)."""
        if type(self) is not type(other):
            return False
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields)


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, ArrayValue):
        return a.same_as(b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return False
    return bool(a == b)
