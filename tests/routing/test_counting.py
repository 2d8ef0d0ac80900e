"""Counts equal a slow reference: any integer dtype, any layout, unknown and repeated experts, ranges of tokens."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foremoe.base.errors import InputError
from foremoe.routing.readers import counting
from foremoe.routing.readers.counting import BLANK, MARKED, REPEATED, UNKNOWN, count_micro_steps, count_pairs, count_ranges

DTYPES = ("u1", "i1", "u2", "i2", "i4", "i8", ">i4", "u8")


@st.composite
def rows(draw):
    """[T, L, K] of any ids, with -1 where the dtype can hold it, and now and then a token of zeros."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    E = draw(st.integers(1, 100))
    T, L, K = draw(st.integers(0, 12)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 9999)))
    low = -1 if dtype.kind == "i" and draw(st.booleans()) else 0
    ids = rng.integers(low, E, (T, L, K))
    ids[rng.random(T) < 0.2] = 0
    ids = ids.astype(dtype)
    layout = draw(st.sampled_from("cfs"))
    if layout == "f":
        ids = np.asfortranarray(ids)
    elif layout == "s":
        ids = np.repeat(ids, 2, axis=1)[:, ::2]
    return ids, E


def reference(ids, E, layers, ranges, shape):
    load, unknown, tally = np.zeros(shape, np.int64), np.zeros(shape[:2], np.int64), np.zeros(4, np.int64)
    for first, end, m, g in ranges:
        for t in range(first, end):
            token = ids[t, layers].tolist()
            if ids.shape[2] > 1 and not np.any(ids[t, layers]):
                unknown[m] += 1
                tally[[BLANK, UNKNOWN]] += 1
                continue
            tally[UNKNOWN] += any(-1 in row for row in token)
            for i, row in enumerate(token):
                if -1 in row:
                    unknown[m, i] += 1
                    tally[MARKED] += 1
                else:
                    tally[REPEATED] += len(row) - len(set(row))
                    for e in set(row):
                        load[m, i, g, e] += 1
    return load, unknown, tally


@given(rows(), st.integers(1, 5), st.randoms(use_true_random=False))
def test_ranges_are_counted_like_the_reference(drawn, block, random):
    ids, E = drawn
    T, L, _ = ids.shape
    layers = sorted(random.sample(range(L), random.randint(1, L)))
    cuts = sorted(random.choices(range(T + 1), k=4))
    ranges = np.array([(a, b, random.randrange(2), random.randrange(3)) for a, b in pairwise(cuts)])
    shape = (2, len(layers), 3, E)
    load, unknown, tally = np.zeros(shape, np.int32), np.zeros(shape[:2], np.int64), np.zeros(4, np.int64)
    whole, counting._BLOCK_TOKENS = counting._BLOCK_TOKENS, block
    try:
        count_ranges(ids, np.array(layers), ranges, load, unknown, tally)
    finally:
        counting._BLOCK_TOKENS = whole
    want = reference(ids, E, layers, ranges, shape)
    for got, expected in zip((load, unknown, tally), want, strict=True):
        assert (got == expected).all()


@given(rows())
def test_count_pairs_counts_every_pair_once_but_minus_one(drawn):
    ids, E = drawn
    want = np.zeros((ids.shape[1], E), np.int64)
    for t, layer in np.ndindex(ids.shape[:2]):
        for e in set(ids[t, layer].tolist()) - {-1}:
            want[layer, e] += 1
    got = count_pairs(ids, E)
    assert got.dtype == np.int32 and (got == want).all()


def test_a_tensor_counts_as_its_array():
    torch = pytest.importorskip("torch", reason="tensors are torch's")
    ids = np.random.default_rng(0).integers(-1, 9, (12, 3, 4), np.int32)
    assert (count_pairs(torch.from_numpy(ids.copy()), 9) == count_pairs(ids, 9)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_id_that_is_no_expert_is_named(dtype):
    from foremoe.base.errors import InputError

    ids = np.ones((6, 2, 3), dtype)
    ids[4, 1, 2] = 5
    load, unknown = np.zeros((1, 2, 1, 5), np.int32), np.zeros((1, 2), np.int64)
    with pytest.raises(InputError, match="token 4, layer 1 of the payload lists expert 5"):
        count_ranges(ids, np.arange(2), np.array([[0, 6, 0, 0]]), load, unknown, np.zeros(4, np.int64))
    # Outside the ranges it is nobody's.
    count_ranges(ids, np.arange(2), np.array([[0, 4, 0, 0]]), load, unknown, np.zeros(4, np.int64))


def test_the_payload_is_read_in_place():
    ids = np.ones((50, 2, 3), np.uint8)
    ((first, view),) = counting.blocks(ids)
    assert first == 0 and np.shares_memory(view, ids) and not view.flags.writeable


@pytest.mark.parametrize("num_threads", [1, 3])
def test_micro_steps_are_counted_each_by_itself(num_threads):
    rng = np.random.default_rng(0)
    routing = [rng.integers(-1, 6, (T, 2, 3)).astype(np.int16) for T in (5, 0, 9, 1)]
    load_MLE = count_micro_steps(routing, 6, num_threads)
    assert load_MLE.dtype == np.int32
    np.testing.assert_array_equal(load_MLE, np.stack([count_pairs(topk_TLK, 6) for topk_TLK in routing]))
    with pytest.raises(InputError, match="different numbers of layers"):
        count_micro_steps([*routing, routing[0][:, :1]], 6, num_threads)
