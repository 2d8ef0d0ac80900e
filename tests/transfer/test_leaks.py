"""Nothing is left behind: after 100 steps, and after steps that end in an error, a rank holds what it held before."""

import gc
import os
import threading
import time
from pathlib import Path as FilePath

import pytest
import torch
from engine_util import ToyBuffers, a_plan, run_plan, run_uses
from test_faults import by_host

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.testing.ranks import get_pool
from foremoe.transfer.collective import Collective
from foremoe.transfer.engine import Engine
from foremoe.transfer.pinned_host import PinnedHost

RANKS = 2


def holdings():
    """What a process holds: tensors, threads, open files, mapped shared memory, its children."""
    gc.collect()
    maps = FilePath("/proc/self/maps").read_text()
    shared = FilePath("/dev/shm")
    return {
        "tensors": sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
        "mapped": maps.count("foremoe"),
        "shared": sorted(x.name for x in shared.iterdir() if "foremoe" in x.name) if shared.exists() else [],
        "children": FilePath(f"/proc/self/task/{os.getpid()}/children").read_text(),
    }


def grown(before, after, seconds=30.0):
    """What there is more of; less is no leak: a socket of the group's making may have been closed in between."""
    more = {name: (before[name], after[name]) for name in before if name != "shared" and after[name] > before[name]}
    if lasting := [name for name in after["shared"] if name not in before["shared"] and lasts(name, seconds)]:
        more["shared"] = lasting
    return more


def lasts(name, seconds):
    """Whether a name stays in /dev/shm; tests beside this one show theirs for as long as the ranks of a node open a store."""
    until = time.monotonic() + seconds
    while (there := FilePath("/dev/shm", name).exists()) and time.monotonic() < until:
        time.sleep(0.05)
    return there


def backends(name):
    return {"collective": (Collective(),), "pinned_host": (PinnedHost(), Collective())}[name]


def many_steps(group, plan, name, steps):
    buffers = ToyBuffers(plan, group.rank)
    engine = Engine(buffers, group=group, backends=backends(name))
    seen = {}
    for step in range(steps):
        run_plan(engine, plan, group, version=step)
        buffers.update(step + 1)
        if step in (19, steps - 1):
            seen[step] = holdings()
    engine.close()
    return seen[19], seen[steps - 1]


def many_engines(group, plan, name, engines, fail):
    """Engines one after the other; with `fail`, each ends in the middle of a step."""
    buffers = ToyBuffers(plan, group.rank)
    seen = []
    for number in range(engines):
        # The engine makes and closes a group of its own: after an error, the old one may hold half a message.
        engine = Engine(buffers, group=group.process_group, backends=backends(name))
        buffers.update(0)
        engine.begin(plan)

        def spoil(use, engine=engine):
            if use == 3:
                engine.group.barrier()  # a rank that closes while another still sends would be the fault that it sees
                buffers.update(0)

        try:
            run_uses(engine, plan, engine.group, on_use=spoil if fail else None)
            engine.end()
            assert not fail
        except StaleWeights:
            assert fail
        finally:
            engine.close()
            del engine
        group.barrier()
        if number in (2, engines - 1):
            seen.append(holdings())
    return tuple(seen)


@pytest.mark.parametrize("name", ["collective", "pinned_host"])
def test_a_hundred_steps_leave_nothing(name):
    plan = by_host(a_plan(ranks=RANKS, micro_steps=2)) if name == "pinned_host" else a_plan(ranks=RANKS, micro_steps=2)
    for before, after in get_pool(RANKS).run(many_steps, plan, name, 100, num_ranks=RANKS):
        assert not grown(before, after)


@pytest.mark.parametrize("fail", [False, True], ids=["whole", "failed"])
@pytest.mark.parametrize("name", ["collective", "pinned_host"])
def test_engines_come_and_go(name, fail):
    plan = by_host(a_plan(ranks=RANKS, micro_steps=2)) if name == "pinned_host" else a_plan(ranks=RANKS, micro_steps=2)
    for before, after in get_pool(RANKS).run(many_engines, plan, name, 12, fail, num_ranks=RANKS):
        assert not grown(before, after)


def test_a_name_that_stays_is_seen():
    name = f"foremoe-{os.getpid()}-left"
    left = FilePath("/dev/shm", name)
    if not left.parent.exists():
        pytest.skip("this system has no /dev/shm")
    left.touch()
    try:
        assert grown({"shared": []}, {"shared": [name, "foremoe-gone"]}, seconds=0.2) == {"shared": [name]}
    finally:
        left.unlink()


def failing(group, plan):
    raise TransferError("a drill")


def test_the_pool_goes_on_after_an_error():
    with pytest.raises(TransferError, match="a drill"):
        get_pool(RANKS).run(failing, None, num_ranks=RANKS)
    assert get_pool(RANKS).run(many_steps, a_plan(ranks=RANKS, micro_steps=2), "collective", 20, num_ranks=RANKS)
