"""Read-only arrays in frozen value types, and functions that declare, check, cut, join and compare such arrays."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from foremoe.base.errors import InputError, first_line

Array = npt.NDArray[Any]


def as_array(value: npt.ArrayLike, name: str) -> Array:
    """Returns `value` as an array of any dtype. If `value` already is an array, it is not copied.

    Raises:
        InputError: The value is ragged, or is a tensor that numpy cannot read. numpy cannot read tensors that are in bfloat16 or
            FP8, on a GPU, or require a gradient.
    """
    try:
        return np.asarray(value)
    except ValueError:
        raise InputError(f"{name} is ragged; every row needs the same length.") from None
    except (TypeError, RuntimeError) as error:
        cure = "give an array, or a tensor on the host of a dtype that numpy has (detach().float().cpu())"
        raise InputError(f"{name} cannot be read as an array ({first_line(error)}); {cure}.") from error


def frozen_array(value: npt.ArrayLike, dtype: npt.DTypeLike, name: str, shape: Sequence[int | None] | None = None) -> Array:
    """Returns `value` as a C-contiguous, read-only array of `dtype`. If it already has this dtype and order, it is not copied.

    The caller must not change the array afterwards, even through a writable reference. NaN is refused. If `dtype` is an integer
    type, all values must be whole numbers in its range. An axis whose length in `shape` is None may have any length.
    """
    want = np.dtype(dtype)
    array = as_array(value, name)
    if array.dtype == object or array.dtype.kind not in "biuf":
        raise InputError(f"{name} must hold numbers; got dtype {array.dtype}.")
    if array.dtype.kind == "f" and array.size and np.isnan(array).any():
        raise InputError(f"{name} holds {int(np.isnan(array).sum())} NaN values; remove or replace them.")
    if want.kind in "iu" and array.dtype != want and array.size:
        if array.dtype.kind == "f" and (not np.isfinite(array).all() or (array != np.trunc(array)).any()):
            raise InputError(f"{name} must hold whole numbers; it has infinities or fractions.")
        low, high, info = array.min().item(), array.max().item(), np.iinfo(want)
        if low < info.min or high > info.max:
            raise InputError(f"{name} holds values from {low} to {high}, which {want} ({info.min} to {info.max}) cannot hold.")
    if shape is not None and (
        array.ndim != len(shape) or any(w is not None and w != h for w, h in zip(shape, array.shape, strict=True))
    ):
        expected = "[" + ", ".join("any" if w is None else str(w) for w in shape) + "]"
        raise InputError(f"{name} must have shape {expected}; got {list(array.shape)}.")
    return sealed(np.asarray(array, want, order="C"))


def sealed(array: Array) -> Array:
    """Returns a view of a C-contiguous array that cannot be made writable, or the array itself if it already is such a view.

    numpy lets a view become writable if the base of the view is writable. A read-only memoryview as the base prevents this.
    """
    if isinstance(array.base, memoryview) and array.base.readonly:
        return array
    return np.asarray(array.data.toreadonly())


def order_of(*column_I: Array) -> Array:
    """Returns the order that sorts rows of integers by the first column, then the second, and so on. Equal rows keep their order.

    The result equals that of `numpy.lexsort` for the columns in reverse. One sort of combined keys is several times faster, and
    only rows whose keys would not fit into 62 bits are sorted by `lexsort`.
    """
    lows = [int(column.min(initial=0)) for column in column_I]
    spans = [int(column.max(initial=0)) - low + 1 for column, low in zip(column_I, lows, strict=True)]
    if math.prod(spans) >= 2**62:
        return np.lexsort(column_I[::-1])
    key_I: Array = np.zeros(len(column_I[0]), np.int64)
    for column, low, span in zip(column_I, lows, spans, strict=True):
        key_I *= span
        key_I += column.astype(np.int64, copy=False) - low
    return key_I.argsort(kind="stable")


def require_non_negative(array: Array, name: str) -> None:
    """Raises InputError if `array` has a value below zero."""
    if array.size and array.min() < 0:
        raise InputError(f"{name} holds {int((array < 0).sum())} negative values (smallest {array.min()}); counts are >= 0.")


class ArrayField(NamedTuple):
    """Properties of an array field of an `ArrayValue`. `axes` holds the letters after the last underscore of the field's name."""

    dtype: Any
    axes: str
    optional: bool
    negative: bool


def array(dtype: npt.DTypeLike, *, optional: bool = False, negative: bool = True) -> Any:
    """Declares an array field of an `ArrayValue` with a dtype. An `optional` field may be None and defaults to None.

    If `negative` is False, negative values are refused.
    """
    metadata = {"array": (np.dtype(dtype), negative)}
    return dataclasses.field(default=None, metadata=metadata) if optional else dataclasses.field(metadata=metadata)


class Length:
    """Attribute that returns the length of an axis of an array field, as in ``M = Length("load_MLE")``.

    The name of the attribute is the letter of the axis.
    """

    def __init__(self, field: str) -> None:
        self.field = field

    def __set_name__(self, owner: type, name: str) -> None:
        self.axis = _axes(self.field).index(name)

    def __get__(self, value: Any, owner: type | None = None) -> int:
        return self if value is None else int(getattr(value, self.field).shape[self.axis])  # type: ignore[return-value]


class ArrayValue:
    """Mix-in for frozen dataclasses. Fields declared with `array` are checked and frozen. They can be cut and joined along an
    axis, which is given by its letter."""

    __slots__ = ()

    def __post_init__(self) -> None:
        self.freeze()

    @classmethod
    @functools.cache
    def array_fields(cls) -> Mapping[str, ArrayField]:
        """Returns the fields declared by `array`, in order."""
        declared = ((f, f.metadata["array"]) for f in dataclasses.fields(cls) if "array" in f.metadata)  # type: ignore[arg-type]
        return {f.name: ArrayField(dtype, _axes(f.name), f.default is None, negative) for f, (dtype, negative) in declared}

    @property
    def num_bytes(self) -> int:
        """Total size of the declared arrays in bytes."""
        arrays = (getattr(self, name) for name in self.array_fields())
        return sum(array.nbytes for array in arrays if array is not None)

    def freeze(self, *names: str, **lengths: int) -> None:
        """Checks and freezes the declared arrays, or only those in `names`.

        All axes with the same letter must have the same length, which `lengths` may specify.
        """
        for name, (dtype, axes, optional, negative) in self.array_fields().items():
            if (names and name not in names) or (optional and getattr(self, name) is None):
                continue
            frozen = frozen_array(getattr(self, name), dtype, name, [lengths.get(axis) for axis in axes])
            lengths |= dict(zip(axes, frozen.shape, strict=True))
            if not negative:
                require_non_negative(frozen, name)
            object.__setattr__(self, name, frozen)

    def _repr_html_(self) -> str:
        from foremoe.base.shown import fields

        return fields(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # IPython and hypothesis would print all fields.
        printer.text(repr(self))

    def __reduce__(self) -> Any:
        # Arrays from a pickle or a copy are writable.
        return _restored, (type(self), {field.name: getattr(self, field.name) for field in dataclasses.fields(self)})  # type: ignore[arg-type]

    def cut(self, **positions: Any) -> Self:
        """Returns a copy of the value in which all arrays with the given axes are cut, as in `cut_arrays`."""
        return dataclasses.replace(self, **self.cut_arrays(**positions))  # type: ignore[type-var]

    def cut_arrays(self, **positions: Any) -> dict[str, Any]:
        """Returns the arrays that have any of these axes, each cut to a slice, mask or index array, as in ``M=slice(0, 2)``."""
        cut = {}
        for name, field in self.array_fields().items():
            value = getattr(self, name)
            for axis, letter in enumerate(field.axes):
                if value is not None and letter in positions:
                    cut[name] = value = value[(slice(None),) * axis + (positions[letter],)]
        return cut

    @classmethod
    def join_arrays(cls, values: Sequence[Self], axis: str) -> dict[str, Any]:
        """Concatenates the values' arrays along this axis. If any value lacks an array, the joined array is None."""
        joined: dict[str, Any] = {}
        for name, field in cls.array_fields().items():
            if axis in field.axes:
                parts = [getattr(value, name) for value in values]
                some = any(part is None for part in parts)
                joined[name] = None if some else np.concatenate(parts, axis=field.axes.index(axis))
        return joined

    def same_as(self, other: object) -> bool:
        """Returns True if `other` has the same type and equal fields. Arrays are equal if dtype, shape and bytes are equal."""
        if type(self) is not type(other):
            return False
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return all(_same(getattr(self, f.name), getattr(other, f.name)) for f in fields)


def _restored(kind: type[ArrayValue], values: dict[str, Any]) -> ArrayValue:
    value = object.__new__(kind)
    for name, held in values.items():
        object.__setattr__(value, name, sealed(held) if isinstance(held, np.ndarray) else held)
    return value


def _axes(name: str) -> str:
    return name.rpartition("_")[2]


def _same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, ArrayValue):
        return a.same_as(b)
    return not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray) and bool(a == b)
