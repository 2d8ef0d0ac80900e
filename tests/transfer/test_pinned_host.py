"""PinnedHost: right bytes of the right version or an error, on any nodes, and nothing written twice."""

import os
import threading

import pretend_gpu
import pytest
import torch
from host_util import SIZES, Experts, entries, holds, opened, pull, weights
from pretend_gpu import PretendEvent, on_gpu, raw

from foremoe.base.errors import InputError, StaleWeights, TransferError
from foremoe.testing.ranks import run_threads
from foremoe.testing.transfer_tests import TransferTests
from foremoe.transfer import host_store, pinned_host
from foremoe.transfer.base import HOST, Copy, Entry
from foremoe.transfer.host_store import HostStore
from foremoe.transfer.pinned_host import PinnedHost

# Letters: G ranks.


class TestPinnedHost(TransferTests):
    backend = PinnedHost()


class TestPinnedHostInThreads(TransferTests):
    backend = PinnedHost()
    in_process = True


class TestPinnedHostOnMixedNodes(TransferTests):
    """Stores that are filled by their own ranks and over the group."""

    backend = PinnedHost(node_of_rank_G=(0, 1, 1, 0))
    ranks = (4,)


def other_view(backend):
    """The store as another rank of the node sees it."""
    view = object.__new__(HostStore)
    view.__dict__.update(backend._store.__dict__)
    return view


@pytest.mark.parametrize("node_G", [None, (0, 0, 0, 0), (0, 0, 1, 1), (1, 0, 1, 0), (0, 1, 2, 3)])
@pytest.mark.parametrize("step_bytes", [1, 1 << 20])
def test_every_node_gets_every_expert_once(node_G, step_bytes, monkeypatch):
    monkeypatch.setattr(pinned_host, "_STEP_BYTES", step_bytes)
    written = []
    write = HostStore.write

    def writing(self, new, version):
        written.extend((key, threading.current_thread().name) for key in new)
        write(self, new, version)

    monkeypatch.setattr(HostStore, "write", writing)

    def rank(group):
        backend, _ = opened(group, node_G)
        backend.publish(entries(4), 1)
        right = all(holds(pull(backend, e.layer, e.expert), e.layer, e.expert, 1) for e in entries(4) if e.dst_rank == group.rank)
        group.barrier()
        backend.close()
        return right

    assert run_threads(rank, 4) == [True] * 4
    nodes = node_G or (0, 0, 0, 0)
    read = {(nodes[e.dst_rank], e.layer, e.expert) for e in entries(4)}
    assert len(written) == len(read)
    for node, layer, expert in read:
        if nodes[expert] == node:
            assert ((layer, expert), f"rank {expert}, host store") in written  # by its home, not by a detour


def test_what_has_this_version_is_not_written_again_and_stays_when_the_store_grows():
    def rank(group):
        backend, buffers = opened(group, (0, 0, 1))
        backend.publish(entries(3, (0,)), 1)
        rows = backend._store.num_places
        buffers.version, buffers.asked = 5, []  # not said to anyone: what is there already must not change
        backend.publish(entries(3, (0, 1)), 1)
        found = [holds(pull(backend, 0, e.expert), 0, e.expert, 1) for e in entries(3, (0,)) if e.dst_rank == group.rank]
        found += [holds(pull(backend, 1, e.expert), 1, e.expert, 5) for e in entries(3, (0,)) if e.dst_rank == group.rank]
        assert backend._store.num_places == 2 * rows
        assert not [key for key in buffers.asked if key[0] == 0]
        return found

    assert run_threads(rank, 3) == [[True] * 4] * 3


def test_every_rank_of_a_node_takes_its_share_of_the_memory_first(monkeypatch):
    """So that it lies near all of them: memory comes from the NUMA node of whoever asks first."""
    taken, reserve = [], os.posix_fallocate

    def reserving(file, begin, size):
        taken.append((threading.current_thread().name, begin, size))
        reserve(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", reserving)

    def rank(group):
        backend, _ = opened(group)
        backend.publish(entries(3, (0, 1)), 1)
        group.barrier()
        backend.close()

    run_threads(rank, 3)
    shares, whole = taken[:6], taken[6:]
    assert sorted(shares) == [(f"rank {g}", 4096 * (1 + place), 4096) for g in range(3) for place in (g, g + 3)]
    assert sorted(whole) == [(f"rank {g}", 0, 7 * 4096) for g in range(3)]


def test_a_new_version_takes_the_places_of_the_old_one():
    def rank(group):
        backend, buffers = opened(group)
        backend.publish(entries(2, (0, 1)), 1)
        store = backend._store
        buffers.version = 2
        backend.publish(entries(2, (1, 2)), 2)
        assert backend._store is store
        assert all(holds(pull(backend, x, 1 - group.rank), x, 1 - group.rank, 2) for x in (1, 2))
        with pytest.raises(
            StaleWeights, match=r"expert . of layer 0 was last published with version 1, and version 2 is requested"
        ):
            pull(backend, 0, 1 - group.rank)
        with pytest.raises(TransferError, match="expert 0 of layer 7 is not in the host store of node 0; publish it"):
            pull(backend, 7, 0)

    run_threads(rank, 2)


def test_the_largest_expert_may_grow():
    class Uneven(Experts):
        def home(self, layer, expert):
            return [torch.full((3000 * (layer + 1),), float(layer))]

    def rank(group):
        backend = PinnedHost()
        backend.open(0, group, Uneven())
        for layer in range(3):
            backend.publish([Entry(layer, 0, 0, 0)], 1)
        for layer in range(3):
            dst = [torch.zeros(3000 * (layer + 1))]
            backend.wait(backend.start([Copy(0, layer, 0, HOST, 0, None, dst)]), 1.0)
            assert (dst[0] == layer).all()
        with pytest.raises(TransferError, match="has 12000 bytes in the host store and 36 bytes on this rank"):
            backend.start([Copy(0, 0, 0, HOST, 0, None, [torch.zeros(9)])])
        backend.close()

    run_threads(rank, 1)


def test_a_pull_that_meets_another_version_is_stale():
    def rank(group):
        backend, _ = opened(group)
        backend.publish([Entry(0, 0, 0, 0)], 3)
        view = other_view(backend)
        with pytest.raises(StaleWeights, match=r"is being overwritten \(version 3 by 4\)"):
            pull(backend, 0, 0, between=lambda: view.write({(0, 0): weights(0, 0, 4)}, 4))
        with pytest.raises(StaleWeights, match="expert 0 of layer 0 has version 4 in the host store, and version 3 is requested"):
            pull(backend, 0, 0)
        with pytest.raises(StaleWeights, match="version 3 is requested"):
            pull(backend, 0, 0, between=lambda: backend.publish([Entry(0, 0, 0, 0)], 4))
        backend.close()

    run_threads(rank, 1)


class ExpertsOnGpu(Experts):
    def home(self, layer, expert):
        return on_gpu(super().home(layer, expert))

    def slot(self, buffer):
        return on_gpu(super().slot(buffer))


class Blocker(PretendEvent):
    """Has not happened before it is recorded."""

    def query(self):
        return self.stream is not None


@pytest.fixture(params=["late", "early"])
def gpu(request, monkeypatch):
    return pretend_gpu.install(monkeypatch, request.param)


@pytest.mark.usefixtures("gpu")
class TestPinnedHostOnPretendGpu(TransferTests):
    backend = PinnedHost()
    in_process = True
    device = "cpu"


def test_on_a_gpu_stores_are_page_locked_and_copies_waited_for(gpu):
    cudart = gpu.cudart

    def rank(group):
        backend, buffers = PinnedHost(), ExpertsOnGpu()
        backend.open(0, group, buffers)
        for layer in range(3):
            backend.publish([Entry(layer, 0, 0, 0)], 1)
            assert list(cudart.locked.values()) == [(1 + layer + 1) * 4096]
        backend.finish()
        dst = on_gpu(torch.zeros(n) for n in SIZES)
        handles = [backend.start([Copy(0, layer, 0, HOST, 0, None, dst)]) for layer in range(3)]
        left, blocker = [], Blocker()
        backend._stream.put(lambda: left.append("drained"), blocker)
        for handle in handles:
            backend.wait(handle, 1.0)
        torch.cuda.current_stream().synchronize()
        assert holds([raw(tensor) for tensor in dst], 2, 0, 1) and not left
        blocker.record()
        backend.publish([Entry(0, 0, 0, 0)], 2)
        assert left == ["drained"]  # nobody writes while this rank still reads
        backend.finish()
        backend._stream.put(lambda: left.append("drained"))
        backend.close()
        assert left == ["drained"] * 2  # and the memory stays while it does
        assert not cudart.locked and cudart.num_locks == 3
        cudart.error = 2
        backend.open(0, group, buffers)
        with pytest.raises(TransferError, match=r"8192 bytes of the host store cannot be page-locked \(CUDA error 2\); raise"):
            backend.publish([Entry(0, 0, 0, 0)], 1)
        backend.close()
        assert not cudart.locked

    run_threads(rank, 1)


class Odd(ExpertsOnGpu):
    """Every byte is another one, and sizes are odd."""

    sizes = (97, 0, 41)

    def home(self, layer, expert):
        return on_gpu(torch.arange(n, dtype=torch.uint8) + n for n in self.sizes)


@pytest.mark.parametrize("most", [1, 8, 41, 97, 1 << 20])
def test_a_gpu_pulls_in_parts_between_which_other_streams_copy(gpu, most, monkeypatch):
    monkeypatch.setattr(host_store, "_COPY_BYTES", most)

    def rank(group):
        backend, buffers = PinnedHost(), Odd()
        backend.open(0, group, buffers)
        backend.publish([Entry(0, 0, 0, 0)], 1)
        backend.finish()
        gpu.copied_bytes.clear()
        dst = on_gpu(torch.zeros(n, dtype=torch.uint8) for n in Odd.sizes)
        backend.wait(backend.start([Copy(0, 0, 0, HOST, 0, None, dst)]), 1.0)
        torch.cuda.current_stream().synchronize()
        assert all(torch.equal(raw(mine), raw(home)) for mine, home in zip(dst, buffers.home(0, 0), strict=True))
        assert max(gpu.copied_bytes) <= most and sum(gpu.copied_bytes) == sum(Odd.sizes)
        backend.close()

    run_threads(rank, 1)


def test_misuse_ends_in_one_sentence():
    def rank(group):
        with pytest.raises(InputError, match="names 3 ranks, and the group has 2"):
            opened(group, (0, 0, 1))
        backend, buffers = opened(group)
        with pytest.raises(InputError, match="already open; close it first, and give every rank its own instance"):
            backend.open(group.rank, group, buffers)
        with pytest.raises(InputError, match="rank 1 publishes other entries or another version than rank 0"):
            backend.publish(entries(2), 1 + group.rank)
        backend.close()

    run_threads(rank, 2)


def test_is_configuration():
    assert repr(PinnedHost()) == "PinnedHost(node_of_rank_G=None)"
    assert repr(PinnedHost((0, 1))) == "PinnedHost(node_of_rank_G=(0, 1))"
