"""CupyPeer: what it says where it cannot run, its bookkeeping on a pretend GPU, and the whole suite where there is a real one."""

import sys
import threading
import time
from types import SimpleNamespace

import pretend_gpu
import pytest
import torch
from pretend_gpu import gpu, raw

from foremoe.base.errors import InputError, StaleWeights, TransferError
from foremoe.testing.ranks import run_threads
from foremoe.testing.transfer_tests import TransferTests
from foremoe.transfer import ipc
from foremoe.transfer.base import Copy, Entry
from foremoe.transfer.cupy_peer import CupyPeer

SIZES = (24, 0, 10)  # elements of the tensors of an expert
LAYERS = (0, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cupy_peer needs a GPU")
class TestCupyPeer(TransferTests):
    """Memory handles between processes that share a GPU."""

    backend = CupyPeer()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cupy_peer needs a GPU")
class TestCupyPeerInThreads(TransferTests):
    """Plain addresses."""

    backend = CupyPeer()
    in_process = True


# ---- what it says ----


def test_without_cupy_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(InputError, match=r"cupy_peer needs cupy \(.*\); pip install 'foremoe\[cupy-cuda1.\]'\."):
        run_threads(lambda group: CupyPeer().open(0, group, Experts(group.rank)), 1)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(InputError, match="needs a GPU that cupy and torch can use, and there is none; use pinned_host or"):
        run_threads(lambda group: CupyPeer().open(0, group, Experts(group.rank)), 1)


# ---- bookkeeping on a pretend GPU ----


class Experts:
    """Buffers without slots, whose home experts lie one behind the other in one allocation per rank, as torch has it."""

    num_buffers = 0

    def __init__(self, rank):
        self.rank, step = rank, 4 * sum(SIZES)
        self.block = gpu.allocate(torch.arange(4 * step * len(LAYERS), dtype=torch.float32) + 1000 * rank)

    def home(self, layer, expert):
        assert expert == self.rank
        parts = self.block[7 + layer * sum(SIZES) :].split([*SIZES, self.block.numel() - 7 - (layer + 1) * sum(SIZES)])
        return list(parts[:-1])


@pytest.fixture(params=["late", "early"])
def runtime(request, monkeypatch):
    return pretend_gpu.install(monkeypatch, request.param).runtime


@pytest.fixture(params=["threads", "processes"])
def processes(request, monkeypatch):
    """Whether ranks take each other for threads of one process or for processes of one host."""
    if request.param == "processes":
        monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", threading.get_ident(), ""))
    return request.param == "processes"


class PretendPeer(CupyPeer):
    requires = ()


@pytest.mark.usefixtures("runtime", "processes")
class TestPretendPeer(TransferTests):
    backend = PretendPeer()
    in_process = True
    device = "cpu"


@pytest.fixture(params=[("late", True), ("early", False)], ids=["late-processes", "early-threads"])
def staged(request, monkeypatch):
    """Each order of streams with one of both ways to take each other; without staging all four are tried."""
    order, processes = request.param
    pretend_gpu.install(monkeypatch, order)
    if processes:
        monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", threading.get_ident(), ""))


@pytest.mark.usefixtures("staged")
class TestPretendPeerStaged(TransferTests):
    backend = PretendPeer(staged=True)
    in_process = True
    device = "cpu"


def entries(num_ranks):
    """Expert e has its home on rank e; every other rank reads it."""
    return [Entry(x, h, h, d) for x in LAYERS for h in range(num_ranks) for d in range(num_ranks) if d != h]


def opened(group, buffers=None, staged=False):
    backend, buffers = CupyPeer(staged=staged), buffers or Experts(group.rank)
    backend.open(group.rank, group, buffers)
    return backend, buffers


def copy_to(rank, entry, key=0):
    return Copy(
        key, entry.layer, entry.expert, entry.home_rank, rank, None, [gpu.allocate(torch.full((n,), -1.0)) for n in SIZES]
    )


def require_arrived(copies, homes):
    torch.cuda.current_stream().synchronize()
    for copy in copies:
        home = homes[copy.src_rank].home(copy.layer, copy.expert)
        assert all(torch.equal(raw(a), raw(b)) for a, b in zip(copy.dst, home, strict=True))


def test_pulls_arrive_with_wait_and_not_before(runtime, processes):
    def rank(group):
        backend, buffers = opened(group)
        homes = group.gather(buffers)
        backend.publish(entries(3), 1)
        mine = [entry for entry in entries(3) if entry.dst_rank == group.rank]
        copies = [copy_to(group.rank, entry, key) for key, entry in enumerate(3 * mine)]
        handles = [backend.start(copies[:7]), backend.start([]), backend.start(copies[7:])]
        assert gpu.order == "early" or all((raw(tensor) == -1).all() for copy in copies for tensor in copy.dst)
        for handle in reversed(handles):
            backend.wait(handle, 1.0)
        require_arrived(copies, homes)
        group.barrier()
        backend.close()
        backend.close()

    run_threads(rank, 3)
    # Each of three ranks opens one allocation of two others, once.
    assert len(runtime.opened) == (6 if processes else 0)
    assert sorted(runtime.closed) == sorted(runtime.opened)


def test_versions_are_kept_apart(runtime, processes):
    def rank(group):
        backend, _ = opened(group)
        first, second = (entry for entry in entries(2) if entry.dst_rank == group.rank)
        with pytest.raises(TransferError, match="was never published"):
            backend.start([copy_to(group.rank, first)])
        backend.publish(entries(2), 1)
        handle = backend.start([copy_to(group.rank, first)])
        backend.publish([entry for entry in entries(2) if entry.layer == second.layer], 2)
        with pytest.raises(StaleWeights, match="started with version 1 of the weights, and version 2 has been published"):
            backend.wait(handle, 1.0)
        with pytest.raises(
            StaleWeights, match=r"expert . of layer 0 was last published with version 1, and version 2 is requested"
        ):
            backend.start([copy_to(group.rank, first)])
        backend.wait(backend.start([copy_to(group.rank, second)]), 1.0)
        with pytest.raises(InputError, match="rank 1 publishes other entries or another version than rank 0"):
            backend.publish(entries(2), 2 + group.rank)
        group.barrier()
        backend.close()

    run_threads(rank, 2)


def test_memory_that_cannot_be_shared_is_named_on_all_ranks(runtime, monkeypatch):
    monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", threading.get_ident(), ""))
    runtime.shareable = None

    def rank(group):
        backend, _ = opened(group)
        with pytest.raises(TransferError, match=r"rank 0 cannot publish.*cudaErrorInvalidValue.*a copy cannot be shared"):
            backend.publish(entries(2), 1)
        backend.close()

    run_threads(rank, 2)
    assert sorted(runtime.freed) == sorted(runtime.malloced)


def test_memory_that_cannot_be_shared_is_staged(runtime, monkeypatch):
    """As with expandable segments; experts of several tensors and layers lie behind each other."""
    monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", threading.get_ident(), ""))
    runtime.shareable = False

    def rank(group):
        backend, buffers = opened(group)
        homes = group.gather(buffers)
        backend.publish(entries(2), 1)
        copies = [copy_to(group.rank, entry, key) for key, entry in enumerate(entries(2)) if entry.dst_rank == group.rank]
        backend.wait(backend.start(copies), 1.0)
        require_arrived(copies, homes)
        group.barrier()
        backend.close()

    run_threads(rank, 2)
    assert set(runtime.opened) <= runtime.malloced.keys() and len(runtime.opened) == 2
    assert sorted(runtime.closed) == sorted(runtime.opened) and sorted(runtime.freed) == sorted(runtime.malloced)


def test_staged_weights_are_those_of_the_version_wherever_homes_go(runtime, processes):
    """Homes are written as soon as they are published; a version is published in two parts; the next one takes its room."""

    def rank(group):
        backend, buffers = opened(group, staged=True)
        theirs = [entry for entry in entries(2) if entry.dst_rank == group.rank]
        for version in (1, 2, 3):
            for layer in LAYERS:
                buffers.block.fill_(10.0 * version + layer + 100 * group.rank)
                backend.publish([entry for entry in entries(2) if entry.layer == layer], version)
                buffers.block.fill_(-7.0)
            copies = [copy_to(group.rank, entry, key) for key, entry in enumerate(theirs)]
            backend.wait(backend.start(copies), 1.0)
            torch.cuda.current_stream().synchronize()
            for copy, entry in zip(copies, theirs, strict=True):
                value = 10.0 * version + entry.layer + 100 * entry.home_rank
                assert all((raw(tensor) == value).all() for tensor in copy.dst)
            group.barrier()
        backend.close()

    run_threads(rank, 2)
    assert len(runtime.malloced) == len(runtime.freed) <= 4 * 2


def test_staged_memory_is_freed_once_nobody_has_it_open(runtime, monkeypatch):
    """One rank is slow to close what the next version does not use."""
    monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", threading.get_ident(), ""))
    detach = CupyPeer._detach

    def slowly(backend, where):
        time.sleep(0.05 * backend._rank)
        detach(backend, where)

    monkeypatch.setattr(CupyPeer, "_detach", slowly)

    def rank(group):
        backend, _ = opened(group, staged=True)
        for layer in LAYERS:
            backend.publish([entry for entry in entries(2) if entry.layer == layer], 1)
        group.barrier()
        backend.publish([entry for entry in entries(2) if entry.layer == LAYERS[0]], 2)
        group.barrier()
        assert runtime.freed and not runtime.freed_open
        group.barrier()  # closing frees what the other rank may still have open
        backend.close()

    run_threads(rank, 2)


def test_another_host_is_out_of_reach(runtime, monkeypatch):
    monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process(threading.current_thread().name, 1, ""))

    def rank(group):
        backend, _ = opened(group)
        backend.publish(entries(2), 1)
        with pytest.raises(TransferError, match=r"whose GPU memory is not open on rank .; publish it for this rank") as error:
            backend.start([copy_to(group.rank, next(e for e in entries(2) if e.dst_rank == group.rank))])
        assert error.value.ranks == (1 - group.rank,)
        backend.close()

    run_threads(rank, 2)


def test_misuse_ends_in_one_sentence(runtime):
    def rank(group):
        backend, buffers = opened(group)
        with pytest.raises(InputError, match="already open"):
            backend.open(0, group, buffers)
        backend.publish([Entry(0, 0, 0, 0)], 1)
        wrong = Copy(0, 0, 0, 0, 0, None, [gpu.allocate(torch.zeros(5))])
        with pytest.raises(TransferError, match=r"has tensors of \[96, 0, 40\] bytes on rank 0 and of \[20\] bytes on rank 0"):
            backend.start([wrong])
        backend.close()
        with pytest.raises(InputError, match="not open"):
            backend.start([])

        class OnCpu:
            num_buffers = 1

            def slot(self, buffer):
                return [torch.zeros(1)]

        with pytest.raises(InputError, match="copies between GPUs, and rank 0 has its slots on cpu"):
            CupyPeer().open(0, group, OnCpu())

    run_threads(rank, 1)


class Moving:
    """Expert e lies in a block that is freed and allocated anew, at any rank."""

    num_buffers = 0

    def __init__(self):
        self.block = None

    def load(self, value, *, anew=False):
        if anew or self.block is None:
            if self.block is not None:
                self.block.fill_(-7.0)  # somebody else writes to it now
            self.block = gpu.allocate(torch.zeros(4))
        self.block.fill_(value)

    def home(self, layer, expert):
        return [self.block]


def pulled(group, backend, home, version):
    """Publishes expert e at home on rank `home[e]` to the other of two ranks; pulls this rank's and returns it and its value."""
    backend.publish(sorted(Entry(0, e, home[e], 1 - home[e]) for e in (0, 1)), version)
    expert = home.index(1 - group.rank)
    dst = [gpu.allocate(torch.zeros(4))]
    backend.wait(backend.start([Copy(0, 0, expert, 1 - group.rank, group.rank, None, dst)]), 1.0)
    torch.cuda.current_stream().synchronize()
    group.barrier()
    return dst[0].tolist() == [100.0 * version + expert] * 4


def test_experts_are_read_where_they_are_at_home_now(runtime, processes):
    def rank(group):
        backend, buffers = opened(group, Moving())
        for version, home in enumerate(([0, 1], [1, 0], [0, 1]), 1):
            buffers.load(100.0 * version + home.index(group.rank))
            assert pulled(group, backend, home, version)
        backend.close()

    run_threads(rank, 2)
    assert len(runtime.opened) == (2 if processes else 0)


def test_memory_that_was_freed_is_read_no_more_and_closed(runtime, processes):
    def rank(group):
        backend, buffers = opened(group, Moving())
        for version, anew in ((1, True), (2, False), (3, True)):
            buffers.load(100.0 * version + group.rank, anew=anew)
            assert pulled(group, backend, [0, 1], version)
            assert len(runtime.opened) - len(runtime.closed) <= 2
        backend.close()

    run_threads(rank, 2)
    assert len(runtime.opened) == (4 if processes else 0)
    assert sorted(runtime.closed) == sorted(runtime.opened)


def test_what_stays_readable_is_read_where_it_lies_now(runtime, processes):
    """Weights that were offloaded and have come back between two plans with the same weights."""

    def rank(group):
        backend, buffers = opened(group, Moving())
        buffers.load(100.0 + group.rank)
        assert pulled(group, backend, [0, 1], 1)
        buffers.load(100.0 + group.rank, anew=True)
        backend.publish([], 1)
        dst = [gpu.allocate(torch.zeros(4))]
        backend.wait(backend.start([Copy(0, 0, 1 - group.rank, 1 - group.rank, group.rank, None, dst)]), 1.0)
        torch.cuda.current_stream().synchronize()
        assert dst[0].tolist() == [101.0 - group.rank] * 4
        group.barrier()
        backend.publish([], 2)
        assert not backend._base and not backend._handle
        backend.close()

    run_threads(rank, 2)
    assert sorted(runtime.closed) == sorted(runtime.opened) and len(runtime.opened) == (4 if processes else 0)


def test_an_address_that_was_given_out_again_is_opened_again(runtime, monkeypatch):
    """CUDA gives the new allocation a handle of its own."""
    monkeypatch.setattr(ipc, "this_process", lambda: ipc.Process("host", threading.get_ident(), ""))
    allocations = {}
    monkeypatch.setattr(
        runtime, "ipcGetMemHandle", lambda base: base.to_bytes(32, "little") + bytes([allocations.get(base, 0)]) * 32
    )
    monkeypatch.setattr(
        runtime, "ipcOpenMemHandle", lambda handle: runtime.opened.append(handle) or int.from_bytes(handle[:32], "little")
    )

    def rank(group):
        backend, buffers = opened(group, Moving())
        for version in (1, 2, 3):
            buffers.load(100.0 * version + group.rank)
            allocations[buffers.block.data_ptr()] = version // 2
            assert pulled(group, backend, [0, 1], version)
        backend.close()

    run_threads(rank, 2)
    assert len(set(runtime.opened)) == len(runtime.opened) == len(runtime.closed) == 4
