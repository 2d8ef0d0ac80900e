"""Copies and work of the model on a GPU whose streams all run late, or ahead: what only streams and events put in order."""

import pretend_gpu
import pytest
import torch
from engine_util import ToyBuffers, a_plan, uses_of, values
from pretend_gpu import gpu, raw
from test_faults import by_host, by_peer

from foremoe.testing.ranks import run_threads
from foremoe.transfer.base import Copy, Entry
from foremoe.transfer.cupy_peer import CupyPeer
from foremoe.transfer.engine import Engine
from foremoe.transfer.pinned_host import PinnedHost
from foremoe.transfer.timeline import Wait

BACKENDS = {"cupy_peer": (CupyPeer, by_peer), "pinned_host": (PinnedHost, by_host)}
NUM = 6  # tensors of an expert: more than there are streams


@pytest.fixture(params=["late", "early"], autouse=True)
def order(request, monkeypatch):
    pretend_gpu.install(monkeypatch, request.param)
    monkeypatch.setattr(CupyPeer, "requires", ())
    return request.param


@pytest.fixture(params=list(BACKENDS))
def backend(request):
    return BACKENDS[request.param][0]


class Experts:
    """Expert e at home on rank e, in `NUM` tensors."""

    num_buffers = 1

    def __init__(self, rank):
        self.homes = [gpu.allocate(torch.full((3,), float(rank))) for _ in range(NUM)]
        self.slots = [gpu.allocate(torch.full((3,), -1.0)) for _ in range(NUM)]

    def home(self, layer, expert):
        return self.homes

    def slot(self, buffer):
        return self.slots


def pull(backend, group, experts):
    copies = [Copy(e, 0, e, e, group.rank, None, experts.slot(0)) for e in range(group.size) if e != group.rank]
    return backend.start(copies)


def note(experts, seen):
    """A kernel that reads the slots."""
    torch.cuda.current_stream().put(lambda: seen.append([raw(slot)[-1].item() for slot in experts.slots]))


def opened(group, backend, version=1):
    experts, backend = Experts(group.rank), backend()
    backend.open(group.rank, group, experts)
    for home in experts.homes:
        home.add_(100.0)  # queued, as an optimizer's step is
    backend.publish([Entry(0, e, e, 1 - e) for e in (0, 1)], version)
    return experts, backend


def test_a_copy_lands_after_what_was_queued_before_and_is_there_for_what_is_queued_behind_its_wait(backend):
    def rank(group):
        experts, peer = opened(group, backend)
        peer.finish()
        seen = []
        note(experts, seen)
        handle = pull(peer, group, experts)
        peer.wait(handle, 5.0)
        note(experts, seen)
        torch.cuda.current_stream().synchronize()
        group.barrier()
        peer.close()
        return seen

    seen = run_threads(rank, 2)
    assert seen == [[[-1.0] * NUM, [100.0 + other] * NUM] for other in (1, 0)]


def test_copies_that_nobody_waits_for_are_over_when_a_backend_is_closed(backend):
    def rank(group):
        experts, peer = opened(group, backend)
        peer.finish()
        pull(peer, group, experts)
        group.barrier()
        peer.close()
        there = [raw(slot)[0].item() for slot in experts.slots]
        torch.cuda.synchronize()
        return there == [raw(slot)[0].item() for slot in experts.slots]

    assert run_threads(rank, 2) == [True] * 2


def test_a_start_that_fails_leaves_nothing_to_land_later(backend):
    def rank(group):
        experts, peer = opened(group, backend)
        peer.finish()
        group.barrier()
        if group.rank == 0:
            gpu.copies_left = 2
            with pytest.raises(RuntimeError, match="link is down"):
                pull(peer, group, experts)
            there = [raw(slot)[0].item() for slot in experts.slots]
            torch.cuda.synchronize()
            assert there == [raw(slot)[0].item() for slot in experts.slots]
        group.barrier()
        peer.close()

    run_threads(rank, 2)


class OnGpu(ToyBuffers):
    """Toy experts in device memory; an optimizer's step brings them to another place, and others write where they were."""

    def __init__(self, plan, rank):
        super().__init__(plan, rank)
        self.homes = {key: list(map(gpu.allocate, tensors)) for key, tensors in self.homes.items()}
        self.slots = [list(map(gpu.allocate, tensors)) for tensors in self.slots]

    def update(self, version):
        for (layer, e), tensors in self.homes.items():
            for old in tensors:
                raw(old).fill_(float("nan"))
            self.homes[layer, e] = list(map(gpu.allocate, values(layer, e, version, self.dtype)))


def stages(group, plan, backend, wrong):
    """Three stages, with kernels that read what slots hold; returns the last timeline."""
    buffers = OnGpu(plan, group.rank)
    engine = Engine(buffers, group=group, backends=(backend(),))

    def read(found, layer, version):
        for e, tensors in zip(found.expert_S, found.weights_S, strict=True):
            for have, want in zip(tensors or (), values(layer, e, version, buffers.dtype), strict=False):
                if not torch.equal(raw(have), want):
                    wrong.append((group.rank, version, layer, e))

    for version in range(3):
        engine.begin(plan)
        for use in uses_of(plan):
            found = engine.weights(*use)
            torch.cuda.current_stream().put(lambda args=(found, use[1], version): read(*args))
            engine.release(*use)
        timeline = engine.end()
        buffers.update(version + 1)
    engine.close()
    return timeline


def test_stages_read_right_weights_and_say_how_long_the_stream_stood_still(backend, order):
    plan, wrong = BACKENDS["cupy_peer" if backend is CupyPeer else "pinned_host"][1](a_plan(ranks=2, stage="recompute")), []
    timelines = run_threads(lambda group: stages(group, plan, backend, wrong), 2)
    assert not wrong
    for timeline in timelines:
        assert timeline.events and all(event.outcome == "done" for event in timeline.events)
        assert timeline.exposed_s == int(timeline.exposed_s)  # by the GPU's clock, not the host's
        assert timeline.exposed_s > 0 or order == "early"  # when copies may all be there in time


def test_a_wait_is_the_streams_on_a_gpu():
    stream = torch.cuda.current_stream()
    stream.put(gpu.copying(lambda: None))
    with Wait(torch.device("cuda")) as wait:
        for _ in range(3):
            stream.put(gpu.copying(lambda: None))
    stream.put(gpu.copying(lambda: None))
    assert wait.seconds == 3
