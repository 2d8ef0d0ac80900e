"""Laws of messages: what is encoded comes back the same, and whatever else arrives is refused in its sender's name."""

from __future__ import annotations

import contextlib
import io
import pickle
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from profiles import examples

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed import group as group_module
from foremoe.distributed import messages
from foremoe.distributed.group import TorchGroup
from foremoe.distributed.messages import MAX_BYTES, decode, encode
from foremoe.testing.ranks import get_pool

NUMBERS = (
    hnp.integer_dtypes(endianness="<")
    | hnp.unsigned_integer_dtypes(endianness="<")
    | hnp.floating_dtypes(endianness="<", sizes=(16, 32, 64))
)
ARRAYS = NUMBERS.flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)))
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=50) | st.binary(max_size=50) | ARRAYS
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal in types, too; arrays in dtype, shape and bytes, floats in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return repr(a) == repr(b)


@given(VALUES)
def test_values_come_back_the_same(value: Any) -> None:
    assert same(decode(encode(value), 0), value)


def test_arrays_come_back_as_copies_whatever_their_strides() -> None:
    array = np.arange(24, dtype=np.int16).reshape(2, 3, 4)[:, ::2, ::-1]
    found = decode(memoryview(encode({"dict": [array, np.float64(1.5)]})), 0)
    assert same(found, {"dict": [np.array(array), 1.5]})
    found["dict"][0][:] = 0  # it is the receiver's own


class Text(str):
    """A class of somebody else's."""


@pytest.mark.parametrize(
    "value",
    [{1, 2}, {1: 2}, Path("x"), Text("x"), 1j, np.int64(3), ValueError("x"), np.array(["x"]), np.array([None]), np.array([True])],
    ids=lambda value: type(value).__name__,
)
def test_other_values_are_refused_where_they_are_sent(value: Any) -> None:
    with pytest.raises(InputError, match="a message cannot hold a"):
        encode([value])


def test_a_message_has_a_largest_size() -> None:
    with patch.object(messages, "MAX_BYTES", 100), pytest.raises(InputError, match="is too large; the limit is 100"):
        encode(np.zeros(100, np.int8))


def message(text: str, *blobs: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode() + b"".join(blobs)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\1", message("", b"x"), message("nul"), message("[1"), message("1") + b"x", message('{"a": 1}'), message("{}"),
        message('{"tuple": 1}'), message('{"tuple": [], "dict": {}}'), message('{"dict": []}'),
        message('{"error": ["InputError", "x"]}'),
        message('{"array": ["<i4", [2]]}', b"1234567"), message('{"array": ["<i4", [-1]]}'),
        message('{"array": ["<i4", [true]]}', b"1234"),
        message('{"array": ["<i4", 1]}', b"1234"), message('{"array": ["|O", [1]]}', b"12345678"),
        message('{"array": [["<i4"], [1]]}'),
        message('{"array": ["<i4", [1099511627776, 1099511627776]]}'), message('{"array": ["<i4", [0, 1e999]]}'),
        message('{"array": ["<i4", [0, 99999999999999999999]]}'), message(f'{{"array": ["<i4", {[1] * 100}]}}', b"1234"),
        message('{"bytes": 4}', b"123"), message('{"bytes": -1}'), message('{"bytes": 1.0}', b"1"), message("9" * 5000),
        message("[" * 100_000), pickle.dumps([1, 2]), (2**32 - 1).to_bytes(4, "little"),
    ],
)  # fmt: skip
def test_what_is_no_message_is_refused_in_its_senders_name(data: bytes) -> None:
    with pytest.raises(TransferError, match="rank 3 sent data that is not a message of foremoe") as caught:
        decode(data, 3)
    assert caught.value.ranks == (3,) and len(str(caught.value)) < 400


@given(VALUES, st.data())
@examples(200)
def test_changed_messages_are_refused_or_read(value: Any, data: st.DataObject) -> None:
    """Bytes changed, cut off or added: nothing but a value or a `TransferError`."""
    sent = bytearray(encode(value))
    for at in data.draw(st.lists(st.integers(0, len(sent) - 1), max_size=4)):
        sent[at] = data.draw(st.integers(0, 255))
    sent = sent[: data.draw(st.integers(0, len(sent)))] if data.draw(st.booleans()) else sent + data.draw(st.binary(max_size=4))
    with contextlib.suppress(TransferError):
        decode(bytes(sent), 0)


class RunsCode:
    """What pickle would call a function for."""

    def __reduce__(self) -> Any:
        return io.open, ("/nowhere/at/all", "w")


def sends_another_kind(group: TorchGroup, num_bytes: int) -> Any:
    """Rank 1 answers with a pickle, of a length that fits into the first message or does not."""
    data = pickle.dumps((RunsCode(), b"x" * num_bytes))
    with patch.object(group_module, "encode", (lambda _: data) if group.rank == 1 else encode):
        return group.gather(0)


@pytest.mark.parametrize("num_bytes", [0, 5000])
def test_nothing_that_arrives_is_unpickled(num_bytes: int) -> None:
    for error in get_pool(3).run(sends_another_kind, num_bytes, num_ranks=3, errors=True):
        assert isinstance(error, TransferError) and "rank 1 sent data that is not a message" in str(error)


def announces_too_much(group: TorchGroup) -> Any:
    if group.rank == 1:
        with patch.object(group_module, "MAX_BYTES", 2**60), patch.object(group_module, "encode", Huge):
            return group.gather(0)
    return group.gather(0)


class Huge(bytes):
    """A message that says of itself to be larger than any memory."""

    def __new__(cls, _: Any) -> Huge:
        return super().__new__(cls, b"x" * 300)

    def __len__(self) -> int:
        return 2**50


def test_a_size_beyond_the_limit_is_refused_before_anything_is_allocated() -> None:
    first, _, last = get_pool(3).run(announces_too_much, num_ranks=3, errors=True)
    for error in (first, last):
        assert isinstance(
            error, TransferError
        ) and f"rank 1 announced a message of {2**50} bytes; the limit is {MAX_BYTES}" in str(error)


def cannot_send(group: TorchGroup) -> Any:
    own = TorchGroup(group.process_group, timeout_s=30.0)
    try:
        own.gather({1, 2} if group.rank == 1 else "fine")
    except (InputError, TransferError) as error:
        return type(error), str(error)
    finally:
        own.close()


def test_a_value_that_cannot_be_sent_ends_the_others_too() -> None:
    (first, text), (second, own) = get_pool(2).run(cannot_send, num_ranks=2)
    assert first is TransferError and "rank 1: a message cannot hold a set" in text
    assert second is InputError and "a message cannot hold a set" in own


def sums(group: TorchGroup) -> Any:
    return [x.tolist() for x in group.gather(np.full(3, group.rank, np.int8))], torch.get_num_threads()


def test_after_a_refused_message_a_new_group_works() -> None:
    assert get_pool(2).run(sums, num_ranks=2) == [([[0] * 3, [1] * 3], 1)] * 2
