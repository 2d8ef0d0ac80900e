"""Host stores are filled behind compute: in the order of need, one expert not waiting for the next, all failing as one."""

import contextlib
import os
import signal
import threading
import time

import pytest
from engine_util import ToyBuffers, a_plan, check_grads, run_plan, run_stage
from host_util import Experts, holds, pull
from test_faults import by_host

from foremoe.base.errors import TransferError
from foremoe.testing.ranks import get_pool, run_processes, run_threads
from foremoe.transfer.base import Entry
from foremoe.transfer.collective import Collective
from foremoe.transfer.engine import Engine
from foremoe.transfer.host_fill import FillError, missing
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost

# Letters: G ranks.

LAYERS = (0, 1, 2)


def filling():
    """True in the thread that fills."""
    return threading.current_thread().name.endswith("host store")


class Gated(Experts):
    """Experts of which those of a layer cannot be read by the filling before a gate opens, or not at all."""

    def __init__(self, layer, act):
        super().__init__()
        self.layer, self.act = layer, act

    def home(self, layer, expert):
        if layer == self.layer and filling():
            self.act()
        return super().home(layer, expert)


def in_need_of(num_ranks, layers=LAYERS):
    """Expert e has its home on rank e, every other rank reads it; layer x is needed first by use 10 * x."""
    return [Entry(x, h, h, d, 10 * x) for x in layers for h in range(num_ranks) for d in range(num_ranks) if d != h]


def gated(group, node_G, layer, act):
    backend, buffers = PinnedHost(node_G), Gated(layer, act)
    backend.open(group.rank, group, buffers)
    return backend


@pytest.mark.parametrize("node_G", [(0, 0, 0), (0, 0, 1), (0, 1, 2)])
def test_an_early_layer_is_pulled_before_a_later_one_is_filled(node_G):
    gate = threading.Event()

    def rank(group):
        backend = gated(group, node_G, 2, lambda: gate.wait(600))
        other = (group.rank + 1) % 3
        try:
            backend.publish(in_need_of(3), 1)
            found = [holds(pull(backend, x, other), x, other, 1) for x in (0, 1)]
            backend.advance(19)
            group.barrier()
            late = threading.Timer(0.2, gate.set) if group.rank == 0 else None
            assert not gate.is_set() and backend._filling.is_alive()
            group.barrier()
            if late is not None:
                late.start()
            found.append(holds(pull(backend, 2, other), 2, other, 1))
            backend.finish()
            return found
        finally:
            gate.set()
            group.barrier()
            backend.close()

    assert run_threads(rank, 3) == [[True] * 3] * 3


def test_a_use_waits_for_this_ranks_part_of_what_it_needs():
    gate = threading.Event()

    def rank(group):
        backend = gated(group, (0, 1), 1, lambda: gate.wait(600))
        backend.publish(in_need_of(2), 1)
        backend.advance(9)
        passed = []
        waiting = threading.Thread(target=lambda: (backend.advance(10), passed.append(gate.is_set())))
        waiting.start()
        group.barrier()
        gate.set()
        waiting.join()
        backend.close()
        return passed

    assert run_threads(rank, 2) == [[True]] * 2


def test_fills_come_in_the_order_of_need_on_all_ranks():
    entries = [Entry(layer, e, e % 2, 1 - e % 2, need) for need, (layer, e) in enumerate([(2, 3), (0, 1), (2, 0), (1, 2)])]
    fills = missing(entries, [0, 1], {}, 1)
    assert [(fill.layer, fill.expert, fill.need) for fill in fills] == [(2, 3, 0), (0, 1, 1), (2, 0, 2), (1, 2, 3)]
    again = missing([*entries, Entry(3, 3, 1, 0, 9)], [0, 1], {(fill.node, *fill.key): 1 for fill in fills}, 1)
    assert [fill.key for fill in again] == [(3, 3)]


def test_an_engine_asks_for_experts_in_the_order_of_its_uses():
    plan, seen = by_host(a_plan(ranks=3, micro_steps=4, stage="recompute")), []

    class Asked(PinnedHost):
        def publish(self, entries, version):
            seen.append(entries)
            super().publish(entries, version)

    run_threads(lambda group: run_stage(group, plan, (Asked(),)), 3)
    t = plan.transfers
    first = {}
    for c in sorted(range(len(t)), key=lambda c: t.need_C[c]):
        first.setdefault((int(t.layer_C[c]), int(t.expert_C[c]), int(t.dst_C[c])), int(t.need_C[c]))
    for entries in seen:
        assert {(e.layer, e.expert, e.dst_rank): e.need for e in entries} == first and len(entries) == len(first)
        assert [e.need for e in entries] == sorted(e.need for e in entries)


def test_no_use_begins_before_this_ranks_part_of_what_it_needs():
    plan = by_host(a_plan(ranks=3, micro_steps=3, stage="recompute"))

    class Slow(ToyBuffers):
        def home(self, layer, expert):
            time.sleep(0.01 * filling())
            return super().home(layer, expert)

    def rank(group):
        backend, due = PinnedHost((0, 0, 1)), []
        engine = Engine(Slow(plan, group.rank), group=group, backends=(backend,), prefetch=0)
        run_plan(engine, plan, group, on_use=lambda u: due.append(backend._filling._due))
        engine.close()
        return due

    for due in run_threads(rank, 3):
        assert all(step > use for use, step in enumerate(due))


@pytest.mark.parametrize("cause", [KeyError, SystemExit])  # the latter would end a thread without a word
@pytest.mark.parametrize("node_G", [(0, 0, 0), (0, 0, 1), (0, 1, 2)])
def test_a_filling_that_fails_halfway_fails_on_all_ranks_and_the_next_one_is_whole(node_G, cause):
    broken, gate = [True], threading.Event()

    def rank(group):
        def act():
            gate.wait(600)
            if broken and group.rank == 1:
                raise cause("gone")

        backend = gated(group, node_G, 1, act)
        backend.publish(in_need_of(3), 1)
        other = (group.rank + 1) % 3
        assert holds(pull(backend, 0, other), 0, other, 1)
        group.barrier()
        gate.set()
        with pytest.raises(FillError, match=r"rank 1 cannot fill its host store: '?gone'?") as error:
            backend.finish()
        if group.rank != 1:  # written by rank 1, or brought from it: nobody has it
            with pytest.raises(FillError, match=r"rank 1 cannot fill its host store: '?gone'?"):
                pull(backend, 2, 1)
        group.barrier()
        broken.clear()
        group.barrier()
        backend.publish(in_need_of(3), 1)
        right = [holds(pull(backend, x, other), x, other, 1) for x in LAYERS]
        backend.finish()
        backend.close()
        return error.value.ranks, right

    assert run_threads(rank, 3) == [((1,), [True] * 3)] * 3


class BreaksHalfway(ToyBuffers):
    """Homes of which rank 1 cannot read the last one that the filling asks for."""

    def __init__(self, plan, rank):
        super().__init__(plan, rank)
        self.asked = 0

    def home(self, layer, expert):
        if filling():
            self.asked += 1
            if self.rank == 1 and self.asked == 2:
                raise OSError("the link is down")
        return super().home(layer, expert)


@pytest.mark.parametrize("stage", ["recompute", "update"])
@pytest.mark.parametrize("node_G", [(0, 0, 0), (0, 1, 1), (0, 1, 2)])
def test_a_step_whose_filling_fails_ends_on_all_ranks_with_the_rank_named(stage, node_G):
    plan = by_host(a_plan(ranks=3, micro_steps=4, stage=stage))

    def rank(group):
        buffers = BreaksHalfway(plan, group.rank)
        run_stage(group, plan, (PinnedHost(node_G), Local()), timeout_s=5.0, debug=False, buffers=buffers)

    for error in run_threads(rank, 3, errors=True):
        assert isinstance(error, TransferError) and "rank 1 cannot fill its host store: the link is down" in str(error)


@pytest.mark.parametrize("closes", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("node_G", [(0, 0, 0), (0, 1, 2)])
def test_close_ends_a_filling_on_all_ranks(closes, node_G):
    """A rank that waits for the filling gets an error, and nothing is left: the same instance opens again."""
    gate = threading.Event()

    def rank(group):
        backend = gated(group, node_G, 2, lambda: gate.wait(600))
        backend.publish(in_need_of(3), 1)
        group.barrier()
        if group.rank == 0:
            gate.set()  # a thread cannot be killed: what it is at, it does to the end
        if group.rank in closes:
            backend.close()
        with contextlib.suppress(FillError):
            backend.finish()
        group.barrier()
        backend.close()
        assert backend._filling is None
        return sum(thread.name == f"rank {group.rank}, host store" for thread in threading.enumerate())

    assert run_threads(rank, 3) == [0] * 3


def test_an_early_end_waits_for_the_filling_so_that_weights_may_change():
    gate, plan = threading.Event(), by_host(a_plan(ranks=2, micro_steps=3))

    class Slow(ToyBuffers):
        def home(self, layer, expert):
            if filling() and layer == plan.L - 1:
                gate.wait(600)
            return super().home(layer, expert)

    def rank(group):
        buffers = Slow(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(PinnedHost((0, 1)), Local()), prefetch=0)
        engine.begin(plan)
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        engine.end(partial=True)
        assert gate.is_set()
        buffers.update(1)
        for grads in buffers.grads.values():
            for grad in grads:
                grad.zero_()
        run_plan(engine, plan, group, version=1)  # compares what slots hold
        engine.close()
        check_grads(plan, buffers)

    run_threads(rank, 2)


def test_weights_that_did_not_change_are_not_filled_again():
    """Recompute, then update of the same step."""
    first, second = (by_host(a_plan(ranks=2, stage=stage)) for stage in ("recompute", "update"))

    class Counting(ToyBuffers):
        read = 0

        def home(self, layer, expert):
            self.read += filling()
            return super().home(layer, expert)

    def rank(group):
        buffers = Counting(second, group.rank)
        engine = Engine(buffers, group=group, backends=(PinnedHost((0, 1)), Local()))
        reads = []
        for plan, same in ((first, False), (second, True), (second, False)):
            run_plan(engine, plan, group, same_weights=same)
            reads.append(buffers.read)
        engine.close()
        return reads[0] > 0, reads[1] - reads[0], reads[2] > reads[1]

    assert run_threads(rank, 2) == [(True, 0, True)] * 2


def stages_between_nodes(group, plan):
    """Fillings over a gloo group of their own, beside copies and gathers of the engine."""
    run_stage(group, plan, (PinnedHost(tuple(range(group.size))), Collective()), timeout_s=30.0, debug=False, stages=5)


def test_processes_on_nodes_of_their_own_fill_beside_the_engines_messages():
    get_pool(3).run(stages_between_nodes, by_host(a_plan(ranks=3, micro_steps=3)), num_ranks=3)


def dies_in_filling(group, plan):
    class Dies(ToyBuffers):
        def home(self, layer, expert):
            if filling() and group.rank == 1 and layer == plan.L - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().home(layer, expert)

    backends, buffers = (PinnedHost((0, 1, 2)), Collective()), Dies(plan, group.rank)
    run_stage(group, plan, backends, timeout_s=5.0, debug=False, buffers=buffers)


def test_a_rank_that_dies_while_it_fills_ends_the_others():
    results = run_processes(dies_in_filling, 3, by_host(a_plan(ranks=3, micro_steps=3)), errors=True, timeout_s=1200.0)
    for rank in (0, 2):
        assert isinstance(results[rank], TransferError), results[rank]
    assert any("rank 1" in str(results[rank]) for rank in (0, 2)), results
