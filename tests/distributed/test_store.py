"""Ranks end, and name the culprit, where their store is stopped, killed or cut off; and they meet whatever came before."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore

from bench.drill_worlds import end_after, hosted_by_rank_0, under_launcher
from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import TorchGroup, make_on_all
from foremoe.distributed.roll import Roll
from foremoe.distributed.store import client_of
from foremoe.testing.ranks import RankDied, get_pool, run_processes

LIMIT_S = 2.0  # what the drills give a rank; all others are generous, for busy machines


def waits_for_host(group: TorchGroup, place: str, fault: str, folder: Path) -> str:
    """Rank 0, which hosts the store, is stopped, killed or cut off where the others wait for it."""
    process_group, cut = hosted_by_rank_0(group, timeout_s=600.0)
    own = TorchGroup(process_group, timeout_s=120.0)
    own.barrier()
    own.timeout_s = LIMIT_S
    if group.rank == 0:
        end_after(folder, group.size - 1)
        if fault == "cut off":
            cut()
            time.sleep(600.0)
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stopped" else signal.SIGKILL)
    with pytest.raises(TransferError) as caught:
        if place == "set-up":
            TorchGroup(process_group, timeout_s=LIMIT_S)
        elif place == "message":
            own.gather("here")
        else:
            own.all_to_all(torch.zeros(own.size), torch.ones(own.size), [1] * own.size, [1] * own.size)
    own.report("nobody waits for this either")
    (folder / str(group.rank)).touch()
    assert caught.value.ranks == (0,)
    return str(caught.value)


@pytest.mark.parametrize(
    ("place", "fault", "says"),
    [
        ("set-up", "stopped", "does not answer"),
        ("message", "stopped", "does not answer"),
        ("tokens", "stopped", "does not answer"),
        ("set-up", "cut off", "does not answer"),
        ("message", "cut off", "does not answer"),
        ("set-up", "killed", "is gone"),
        ("message", "killed", "is gone"),
    ],
)
def test_the_host_of_the_store_is_named(tmp_path: Path, place: str, fault: str, says: str) -> None:
    died, *others = run_processes(waits_for_host, 3, place, fault, tmp_path, errors=True, timeout_s=120.0, limit_s=280.0)
    assert isinstance(died, RankDied)
    for text in others:
        assert isinstance(text, str), text
        assert text.startswith("rank 0, which hosts the store that links the ranks,") and says in text, text
        assert "\n" not in text


def test_under_torchrun_the_launcher_is_named(tmp_path: Path) -> None:
    """Killed, it ends its ranks; stopped, it holds nobody."""
    for found in under_launcher(tmp_path, LIMIT_S):
        words = r"TransferError: the launcher's store at \S+:\d+, which links the ranks, does not answer"
        assert re.match(words, found["error"]), found


def one_does_not_come(group: TorchGroup, absent: int, times: int) -> list[int]:
    """One rank fails before it comes to a group, the others give up; the next group of all is made."""
    for _ in range(times):
        if group.rank != absent:
            with pytest.raises(TransferError, match=rf"\b{absent}\b.* did not come to set up the group within"):
                TorchGroup(group.process_group, timeout_s=1.0)
    group.barrier()
    own = TorchGroup(group.process_group, timeout_s=60.0)
    found = own.gather(own.rank)
    own.close()
    return found


@pytest.mark.parametrize("absent", [0, 1])
def test_a_group_that_one_rank_never_came_to_leaves_no_trace(absent: int) -> None:
    assert get_pool(3).run(one_does_not_come, absent, 2, num_ranks=3) == [[0, 1, 2]] * 3


def one_refuses(group: TorchGroup) -> list[str]:
    """One rank's own input is refused."""
    found = []
    for g in range(group.size):

        def make(g: int = g) -> str:
            if g == group.rank:
                raise InputError("no such planner")
            return "made"

        with pytest.raises(InputError) as caught:
            make_on_all(group, make)
        found.append(str(caught.value))
    return [*found, make_on_all(group, lambda: "made")]


def test_what_one_rank_refuses_ends_all() -> None:
    first, second = get_pool(2).run(one_refuses, num_ranks=2)
    assert first == ["no such planner", "rank 1: no such planner", "made"]
    assert second == ["rank 0: no such planner", "no such planner", "made"]


NEW_RANK = """
import sys, torch.distributed as dist
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
from foremoe.distributed.group import TorchGroup
store = PrefixStore("second", TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
dist.init_process_group("gloo", store=store, rank=1, world_size=3, timeout=timedelta(seconds=120))
own = TorchGroup(timeout_s=120.0)
print(own.gather("new"), flush=True)
own.barrier()
"""


def replaced(group: TorchGroup, port: int) -> list[str] | str:
    """Rank 1 is lost and a new process takes its place; the others, which have made groups before, make their process group
    again."""
    for _ in range(3):
        TorchGroup(group.process_group, timeout_s=60.0).close()
    if group.rank == 1:
        new = subprocess.run([sys.executable, "-c", NEW_RANK, str(port)], capture_output=True, text=True, timeout=280)
        return new.stdout.strip() or new.stderr
    dist.destroy_process_group()
    store = PrefixStore("second", TCPStore("127.0.0.1", port, is_master=False))
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=3)
    own = TorchGroup(timeout_s=120.0)
    found = own.gather("old")
    own.barrier()
    own.close()
    return found


def test_a_new_process_meets_those_that_live_on() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, new, last = run_processes(replaced, 3, store.port, timeout_s=120.0, limit_s=300.0)
    assert first == last == ["old", "new", "old"]
    assert new == str(first)


def threads_of(group: TorchGroup) -> list[int]:
    """Threads of this process while groups come and go."""
    found = []
    for _ in range(4):
        own = TorchGroup(group.process_group, timeout_s=60.0)
        with own.watched():
            own.barrier()
        own.close()
        del own
        until = time.monotonic() + 30.0  # a watcher ends within a look
        while any(thread.name == "watcher" for thread in own_threads()) and time.monotonic() < until:
            time.sleep(0.05)
        found.append(len(own_threads()))
        group.barrier()
    return found


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name in ("store", "watcher", "connect")]


def test_groups_leave_no_threads_behind() -> None:
    for found in get_pool(2).run(threads_of, num_ranks=2):
        assert found[0] >= 1 and found == found[:1] * 4  # one asks the store, for all groups of the process


def test_a_rank_that_waited_in_vain_is_not_blamed() -> None:
    """It leaves when its limit is over, perhaps just before another rank looks who is missing."""
    client = client_of(HashStore())
    first, _, last = (Roll(client, "a group", rank, (0, 1, 2)) for rank in range(3))
    for roll in (first, last):
        roll.come()
    assert first.missing() == [1]
    last.leave()
    assert first.missing() == [1]
    Roll(client, "a group", 1, (0, 1, 2)).come()  # too late for rank 2
    assert first.missing() == [2] and not first.all_came()


def test_no_rank_leaves_a_communicator_that_another_still_links_up_with() -> None:
    """Closed at once, it would break off the connections of the rank that is behind."""
    client, linked = client_of(HashStore()), threading.Event()
    first, last = (Roll(client, "a group", rank, (0, 1)) for rank in range(2))

    def link_slowly(_: object) -> None:
        time.sleep(0.5)
        linked.set()

    with ThreadPoolExecutor() as pool:
        behind = pool.submit(last.connect, link_slowly, 60.0)
        first.connect(lambda _: None, 60.0)
        assert linked.is_set()
        behind.result()


def test_a_rank_that_fails_to_link_up_ends_the_others() -> None:
    client = client_of(HashStore())
    first, last = (Roll(client, "a group", rank, (0, 1)) for rank in range(2))

    def fail(_: object) -> None:
        raise RuntimeError("no route")

    with ThreadPoolExecutor() as pool:
        behind = pool.submit(last.connect, fail, 60.0)
        with pytest.raises(TransferError, match=r"ended by another rank \(rank 1: .*no route"):
            first.connect(lambda _: None, 60.0)
        with pytest.raises(TransferError, match="no route"):
            behind.result()
