"""The order of exchanges, experts and copies on a GPU whose streams run as late, or as early, as events allow."""

import pretend_gpu
import pytest
import torch
from engine_util import ToyBuffers, a_plan, uses_of
from pretend_gpu import gpu, raw

from foremoe.plan.programme import Programme
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase
from foremoe.testing.ranks import run_threads
from foremoe.transfer.base import TransferBackend
from foremoe.transfer.engine import Engine

PREFETCH = 2


@pytest.fixture(params=["late", "early"], autouse=True)
def order(request, monkeypatch):
    pretend_gpu.install(monkeypatch, request.param)
    return request.param


class OnGpu(ToyBuffers):
    """Toy experts in device memory."""

    def __init__(self, plan, rank):
        super().__init__(plan, rank)
        for of in (self.homes, self.grads):
            of.update({key: list(map(gpu.allocate, tensors)) for key, tensors in of.items()})
        self.slots, self.slot_grads = (
            [list(map(gpu.allocate, tensors)) for tensors in of] for of in (self.slots, self.slot_grads)
        )


class Noted(TransferBackend):
    """Copies nothing, and notes when a GPU would: on the stream that is current."""

    links, one_sided = frozenset({Link.PEER, Link.RDMA}), False

    def __init__(self, seen):
        self.seen = seen

    def open(self, rank, group, buffers):
        pass

    def start(self, copies):
        note(self.seen, *(("start", copy.key) for copy in copies))
        return [copy.key for copy in copies]

    def wait(self, handle, timeout_s):
        note(self.seen, *(("arrived", key) for key in handle))

    def close(self):
        pass


def note(seen, *what):
    """A kernel on the current stream."""
    torch.cuda.current_stream().put(lambda: seen.extend(what))


def run(engine, plan, seen, reads):
    """All uses in the order of a layer's calls; experts find their gradient buffers zeroed, and write to them.

    Args:
        reads: Whether weights are asked for.
    """

    def products(u, grads):
        seen.append(("products", u))
        for grad in grads:
            assert not raw(grad).any()
            raw(grad).fill_(1.0)

    for u, use in enumerate(uses_of(plan)):
        engine.prepare(*use)
        note(seen, ("first exchange", u))
        found = engine.weights(*use).grads_S if reads else None
        grads = [grad for tensors in (found or ())[plan.B :] for grad in tensors or ()]
        torch.cuda.current_stream().put(lambda u=u, grads=grads: products(u, grads))
        if use[2] == Phase.BACKWARD:
            engine.gradients(*use[:2])
        engine.release(*use)
        note(seen, ("last exchange", u))
        engine.launch()


def stage(group, plan, reads=True):
    """What the GPU of a rank did, in order."""
    seen, buffers = [], OnGpu(plan, group.rank)
    engine = Engine(buffers, group=group, backends=(Noted(seen),), prefetch=PREFETCH)
    engine.begin(plan)
    run(engine, plan, seen, reads)
    engine.end()
    engine.close()
    torch.cuda.synchronize()
    return seen


def test_copies_leave_behind_the_last_exchange_and_are_waited_for_between_the_first_one_and_the_experts(order):
    plan = a_plan(ranks=2)
    for rank, seen in enumerate(run_threads(lambda group: stage(group, plan), 2)):
        at, programme, t = {what: i for i, what in enumerate(seen)}, Programme.of(plan, rank, PREFETCH), plan.transfers
        assert len(at) == len(seen)
        copies = [c for copies in programme.starts.values() for c in copies]
        assert copies and all(programme.start_C[c] < programme.need_C[c] for c in copies if programme.start_C[c])
        for c in copies:
            if programme.start_C[c]:
                assert at["start", c] > at["last exchange", programme.start_C[c] - 1]
            if t.dst_C[c] == rank:
                assert at["arrived", c] < at["products", programme.need_C[c]]
                # Late, a stream gets to a copy when the model's waits for it.
                assert at["arrived", c] > at["first exchange", programme.need_C[c]] or order == "early"
        returns = [(u, one) for u, returns in programme.returns.items() for one in returns]
        assert returns
        for u, one in returns:
            assert at["start", one.key] > at["last exchange", u]
            later = [at["start", c] for c in copies if programme.start_C[c] == u + 1]
            assert at["start", one.key] < min(later, default=len(seen))


def test_a_copy_that_nobody_reads_has_landed_before_the_next_one_starts():
    plan = a_plan(ranks=2, stage="recompute", slot_depth=1)
    for rank, seen in enumerate(run_threads(lambda group: stage(group, plan, reads=False), 2)):
        at, t = {what: i for i, what in enumerate(seen)}, plan.transfers
        mine = [c for c in range(len(t)) if t.dst_C[c] == rank]
        followed = [(c, d) for c in mine for d in mine if t.buffer_C[c] == t.buffer_C[d] and t.need_C[c] < t.need_C[d]]
        assert followed and all(at["arrived", c] < at["start", d] for c, d in followed)
