"""HostStore and what fills it: a reader never takes mixed bytes for a version, and steps keep order, layers and limits."""

import contextlib
import itertools
import tempfile
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.transfer import host_store
from foremoe.transfer.host_fill import Fill, steps
from foremoe.transfer.host_store import HostStore


class Interrupted(dict):
    """Weights that let somebody in before each of their tensors is written."""

    def __init__(self, tensors, act):
        super().__init__({(0, 0): tensors})
        self.act = act

    def items(self):
        self.act()
        yield from super().items()
        self.act()


@contextlib.contextmanager
def two_views(num_elements):
    """Two ranks' views of one store with one entry of two tensors."""
    with tempfile.TemporaryFile() as file:
        views = [HostStore(file.fileno(), 1, 8 * num_elements) for _ in range(2)]
    for view in views:
        view.place({(0, 0): 8 * num_elements})
    yield views
    for view in views:
        view.close()


def halves(num_elements, version):
    return [torch.full((num_elements,), float(version)) for _ in range(2)]


@examples(100)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 2))
def test_a_reader_sees_a_writer_that_comes_in_between(read_at, check_at, asked):
    dst, moment, found, fresh = halves(100, 0), 0, None, None

    def act():
        nonlocal moment, found, fresh
        if moment == read_at:
            found = reader.read((0, 0), dst)
        if moment == max(read_at, check_at):
            try:
                reader.check((0, 0), found, asked)
                fresh = True
            except StaleWeights:
                fresh = False
        moment += 1

    with two_views(100) as (writer, reader):
        writer.write({(0, 0): halves(100, 1)}, 1)
        act()  # before, at two moments of the writing, after
        writer.write(Interrupted(halves(100, 2), act), 2)
        act()
    assert fresh == (read_at == check_at == 0 if asked == 1 else read_at == 3)
    assert not fresh or all((tensor == asked).all() for tensor in dst)


def test_bytes_and_checksum_are_fenced_off_from_the_stamp_that_says_done(monkeypatch):
    """What a processor reorders no test on this one sees; the fence is where it must be."""
    seen, fence = [], host_store._fence

    def watched():
        row = writer._stamp_N3[0]
        seen.append((int(row[0]), int(row[1]), int(row[2]) == writer._mark((0, 0))))
        fence()

    with two_views(10) as (writer, _):
        writer.write({(0, 0): halves(10, 1)}, 1)
        monkeypatch.setattr(host_store, "_fence", watched)
        writer.write({(0, 0): halves(10, 2)}, 2)
    assert seen == [(2, 1, True)]


@examples(50)
@given(st.integers(1, 6), st.data())
def test_an_entry_that_is_kept_keeps_its_place_and_bytes(num_places, data):
    keys = [(0, e) for e in range(num_places)]
    kept = data.draw(st.sets(st.sampled_from(keys)))
    with tempfile.TemporaryFile() as file:
        store = HostStore(file.fileno(), num_places, 80)
    store.place(dict.fromkeys(keys, 80))
    store.write({key: halves(10, 1 + key[1]) for key in keys}, 1)
    new = [(1, e) for e in range(num_places - len(kept))]
    store.place(dict.fromkeys(new, 80), kept)
    store.write({key: halves(10, 100 + key[1]) for key in new}, 2)
    for key in [*kept, *new]:
        dst = halves(10, 0)
        store.check(key, store.read(key, dst), 1 if key in kept else 2)
        assert all((tensor == (1 if key in kept else 100) + key[1]).all() for tensor in dst)
    store.close()


@given(st.integers(1, 3000), st.data())
def test_bytes_that_something_else_wrote_are_seen(num_elements, data):
    """All of a small entry; of a large one every stretch of a 256th of it."""
    num_bytes = 8 * num_elements
    length = data.draw(st.integers(max(num_bytes // 256, 1), num_bytes))
    begin = data.draw(st.integers(0, num_bytes - length))
    with two_views(num_elements) as (writer, reader):
        writer.write({(0, 0): halves(num_elements, 1)}, 1)
        dst = halves(num_elements, 0)
        reader.check((0, 0), reader.read((0, 0), dst), 1)
        writer._entry((0, 0))[begin : begin + length] ^= 0xFF
        with pytest.raises(TransferError, match="expert 0 of layer 0 was overwritten in the host store"):
            reader.check((0, 0), reader.read((0, 0), dst), 1)


def test_reader_and_writer_at_full_speed_never_mix_versions():
    last_version, seen, over = 300, 0, False
    with two_views(4000) as (writer, reader):
        writer.write({(0, 0): halves(4000, 1)}, 1)

        def write():
            for version in range(2, last_version + 1):
                writer.write({(0, 0): halves(4000, version)}, version)

        thread = threading.Thread(target=write)
        thread.start()
        while not over:
            over = not thread.is_alive()
            dst = halves(4000, 0)
            found = reader.read((0, 0), dst)
            try:
                reader.check((0, 0), found, found)
            except StaleWeights:
                continue
            seen += 1
            assert all((tensor == found).all() for tensor in dst)
        thread.join()
    assert seen and found == last_version


@given(st.data())
def test_steps_keep_order_layers_and_limits(data):
    num_ranks = data.draw(st.integers(2, 4))
    ends = st.tuples(st.integers(0, 2), st.integers(0, num_ranks - 1), st.integers(0, num_ranks - 1))
    fills = [Fill(0, layer, e, home, writer) for e, (layer, home, writer) in enumerate(data.draw(st.lists(ends, max_size=12)))]
    bytes_of = {fill.key: data.draw(st.integers(0, 9)) for fill in fills}
    parts = steps(fills, bytes_of, 10)
    assert [fill for part in parts for fill in part] == fills

    def most(part):
        crossing = [fill for fill in part if fill.home != fill.writer]
        sent = [sum(bytes_of[fill.key] for fill in crossing if fill.home == g) for g in range(num_ranks)]
        received = [sum(bytes_of[fill.key] for fill in crossing if fill.writer == g) for g in range(num_ranks)]
        return max(sent + received)

    assert all(most(part) <= 10 and len({fill.layer for fill in part}) == 1 for part in parts)
    assert all(most([*part, after[0]]) > 10 or after[0].layer != part[0].layer for part, after in itertools.pairwise(parts))
