"""frozen_array and ArrayValue: values kept exactly or refused in one sentence, read-only, compared byte by byte."""

import copy
import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from foremoe.base.arrays import Array, ArrayValue, Length, array, frozen_array, order_of, require_non_negative
from foremoe.base.errors import InputError
from foremoe.routing.checks import layer_positions
from foremoe.routing.readers.counting import count_pairs
from foremoe.routing.trace import RoutingTrace

INTEGERS = [np.int8, np.uint8, np.int16, np.int32, np.int64]


@given(
    hnp.arrays(st.sampled_from(INTEGERS), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=st.integers(0, 127)),
    st.sampled_from([*INTEGERS, np.float64]),
)
def test_values_are_kept_and_read_only(value: Array, dtype: Any) -> None:
    array = frozen_array(value, dtype, "a")
    assert array.dtype == dtype and array.shape == value.shape and (array == value).all()
    assert array.flags.c_contiguous and not array.flags.writeable
    assert value.flags.writeable or value.size == 0 or value.ndim == 0


@given(st.lists(st.integers(-(2**40), 2**40), min_size=1, max_size=5), st.sampled_from(INTEGERS))
def test_integers_fit_or_are_refused(values: list[int], dtype: Any) -> None:
    info = np.iinfo(dtype)
    if all(info.min <= v <= info.max for v in values):
        assert frozen_array(values, dtype, "a").tolist() == values
        assert frozen_array([float(v) for v in values], dtype, "a").tolist() == values
    else:
        with pytest.raises(InputError, match=rf"a holds values from {min(values)} to {max(values)}"):
            frozen_array(values, dtype, "a")


def test_no_copy_where_none_is_needed_and_a_contiguous_one_where_it_is() -> None:
    value = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert np.shares_memory(frozen_array(value, np.int32, "a"), value)
    turned = frozen_array(value.T, np.int32, "a")
    assert turned.flags.c_contiguous and (turned == value.T).all()
    assert frozen_array(np.int32(3), np.int32, "a").shape == ()


def stays_read_only(array: Array) -> bool:
    """True if nobody can make the array writable, by itself or by what it is a view of."""
    while isinstance(array, np.ndarray):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        array = array.base  # type: ignore[assignment]
    return memoryview(array).readonly


@pytest.mark.parametrize("value", [np.arange(6.0), np.arange(6, dtype=np.int32), np.zeros((0, 3)), np.float16(2), b"abc"])
def test_nobody_can_make_a_frozen_array_writable_again(value: Any) -> None:
    if isinstance(value, bytes):
        value = np.frombuffer(value, np.uint8)
    array = frozen_array(value, value.dtype, "a")
    assert stays_read_only(array) and stays_read_only(array[..., None][:1].view())
    assert frozen_array(array, value.dtype, "a") is array  # no chain of views grows


class Tensor:
    """A tensor that numpy cannot read: torch raises these for bfloat16 and FP8, for a GPU's, and for one with a gradient."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, *args: Any, **options: Any) -> Array:
        raise self.error


@pytest.mark.parametrize("error", [TypeError("Got unsupported ScalarType BFloat16"), RuntimeError("Can't call numpy()")])
def test_tensors_that_numpy_cannot_read_are_refused(error: Exception) -> None:
    topk_TLK, tensor, sentence = np.zeros((2, 2, 1), np.uint8), Tensor(error), re.escape(str(error))
    given: dict[str, Callable[[], Any]] = {
        "a": lambda: frozen_array(tensor, np.float32, "a"),
        "topk_TLK": lambda: RoutingTrace(topk_TLK=tensor, num_experts=8, seq_len_Q=[2]),
        "known_T": lambda: RoutingTrace(topk_TLK=topk_TLK, num_experts=8, seq_len_Q=[2], known_T=tensor),
        "indices": lambda: RoutingTrace(topk_TLK=topk_TLK, num_experts=8, seq_len_Q=[2]).sequences(tensor),
        "layers": lambda: layer_positions(tensor, 2),
        "routing": lambda: count_pairs(tensor, 8),
    }
    for name, give in given.items():
        with pytest.raises(InputError, match=f"{name} cannot be read as an array .{sentence}"):
            give()


@pytest.mark.parametrize(
    ("value", "dtype", "shape", "sentence"),
    [
        ([[1, 2], [3]], np.int32, None, "a is ragged; every row needs the same length."),
        (["x"], np.int32, None, "a must hold numbers; got dtype <U1."),
        ([None], np.int32, None, "a must hold numbers; got dtype object."),
        ([1 + 2j], np.float64, None, "a must hold numbers; got dtype complex128."),
        ([np.nan, 1.0], np.float64, None, "a holds 1 NaN values; remove or replace them."),
        ([np.nan], np.int32, None, "a holds 1 NaN values"),
        ([np.inf], np.int32, None, "infinities or fractions"),
        ([0.5], np.int32, None, "infinities or fractions"),
        ([300], np.uint8, None, "a holds values from 300 to 300, which uint8 (0 to 255) cannot hold."),
        ([-1], np.uint8, None, "cannot hold"),
        ([1, 2], np.int32, (3,), "a must have shape [3]; got [2]."),
        ([1, 2], np.int32, (None, 2), "a must have shape [any, 2]; got [2]."),
        (5, np.int32, (1,), "a must have shape [1]; got []."),
    ],
)
def test_bad_input_is_one_sentence(value: Any, dtype: Any, shape: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        frozen_array(value, dtype, "a", shape)


def test_infinity_is_a_float() -> None:
    assert frozen_array([-np.inf], np.float64, "a")[0] == -np.inf


def test_counts_are_not_negative() -> None:
    require_non_negative(np.zeros(0), "a")
    require_non_negative(np.arange(3), "a")
    with pytest.raises(InputError, match=r"a holds 2 negative values \(smallest -5\)"):
        require_non_negative(np.array([-1, 0, -5]), "a")


@dataclasses.dataclass(frozen=True, eq=False)
class Pair(ArrayValue):
    array: Array
    other: object = None


def test_same_as_compares_types_fields_dtypes_shapes_and_bytes() -> None:
    one = Pair(np.arange(4))
    assert one.same_as(Pair(np.arange(4))) and not one.same_as(Pair(np.arange(4)[::-1]))
    assert not one.same_as(Pair(np.arange(4, dtype=np.int32))) and not one.same_as(Pair(np.arange(4).reshape(2, 2)))
    assert not one.same_as(Pair(np.arange(4), "x")) and not one.same_as("x")
    assert Pair(np.arange(4), one).same_as(Pair(np.arange(4), Pair(np.arange(4))))
    assert not Pair(np.arange(4), one).same_as(Pair(np.arange(4), None)) and not Pair(np.arange(4), np.zeros(1)).same_as(one)
    assert Pair(np.array([0.0])).same_as(Pair(np.array([0.0]))) and not Pair(np.array([0.0])).same_as(Pair(np.array([-0.0])))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table(ArrayValue):
    name: str = ""
    load_ML: Array = array(np.int32, negative=False)
    home_L: Array = array(np.int16)
    seen_ML: Array | None = array(np.float64, optional=True)

    M = Length("load_ML")
    L = Length("home_L")


def table(M: int = 2, L: int = 3, **fields: Any) -> Table:
    return Table(**{"load_ML": np.arange(M * L).reshape(M, L), "home_L": np.arange(L), **fields})


def test_declared_arrays_are_frozen_and_their_axes_agree() -> None:
    value = table(seen_ML=np.ones((2, 3), int))
    assert [a.dtype for a in (value.load_ML, value.home_L, value.seen_ML)] == [np.int32, np.int16, np.float64]
    assert not value.load_ML.flags.writeable and (value.M, value.L) == (2, 3) and table().seen_ML is None
    assert list(Table.array_fields()) == ["load_ML", "home_L", "seen_ML"]


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value)), dataclasses.replace]
)
def test_copies_of_a_value_are_as_frozen(copied: Callable[[Table], Table]) -> None:
    value = table(name="a")
    again = copied(value)
    assert again.same_as(value) and again.seen_ML is None
    assert stays_read_only(again.load_ML) and stays_read_only(again.home_L)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"home_L": np.zeros(4)}, "home_L must have shape [3]; got [4]."),
        ({"load_ML": np.zeros(3)}, "load_ML must have shape [any, any]; got [3]."),
        ({"load_ML": -np.ones((2, 3), int)}, "load_ML holds 6 negative values (smallest -1); counts are >= 0."),
        ({"seen_ML": np.zeros((3, 2))}, "seen_ML must have shape [2, 3]; got [3, 2]."),
        ({"home_L": None}, "home_L must hold numbers; got dtype object."),
    ],
)
def test_arrays_that_do_not_fit_the_declaration_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=re.escape(sentence)):
        table(**fields)


@given(st.data())
def test_cutting_and_joining_are_inverse(data: st.DataObject) -> None:
    M, L = data.draw(st.integers(2, 5)), data.draw(st.integers(1, 3))
    value = table(M, L, seen_ML=np.random.default_rng(0).random((M, L)), name="a")
    at = data.draw(st.integers(1, M - 1))
    parts = [value.cut(M=slice(0, at)), value.cut(M=slice(at, M))]
    assert [part.M for part in parts] == [at, M - at] and all((part.home_L == value.home_L).all() for part in parts)
    assert dataclasses.replace(value, **Table.join_arrays(parts, "M")).same_as(value)
    layers = data.draw(st.permutations(range(L)))
    turned = value.cut(L=np.array(layers), M=[0])
    assert turned.home_L.tolist() == layers and turned.load_ML.tolist() == [value.load_ML[0, layers].tolist()]
    assert Table.join_arrays([value, table(M, L)], "M")["seen_ML"] is None


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [np.float16, np.uint64])
def test_limits_are_compared_exactly_whatever_the_dtype(dtype):
    assert frozen_array(np.array([1, 60000], dtype), np.int32, "a").tolist() == [1, 60000]
    with pytest.raises(InputError, match="values from 1"):
        frozen_array(np.array([1, 60000], dtype), np.int16, "a")


@given(st.data(), st.integers(0, 40), st.sampled_from([3, 1000, 2**40]))
def test_rows_are_ordered_as_by_lexsort(data: Any, num: int, span: int) -> None:
    """Keys of wide columns do not fit into 62 bits."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    columns = [rng.integers(-span, span, num).astype(dtype) for dtype in (np.int64, np.int16, np.int64, np.uint8)]
    assert np.array_equal(order_of(*columns), np.lexsort(columns[::-1]))
