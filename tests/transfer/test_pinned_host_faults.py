"""PinnedHost when something fails, a rank dies or all is over: an error on every rank, and nothing left behind."""

import errno
import gc
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
from host_util import Experts, entries, holds, opened, pull

from foremoe.base.errors import InputError, TransferError
from foremoe.testing.ranks import run_processes, run_threads
from foremoe.transfer import host_store
from foremoe.transfer.host_store import NodeFile


@pytest.fixture
def store_files(monkeypatch):
    """The files of stores that have a name right now, in a folder that no other process uses."""
    with tempfile.TemporaryDirectory(dir=host_store._directory()) as folder:
        monkeypatch.setattr(host_store, "_directory", lambda: folder)
        yield lambda: os.listdir(folder)


def open_files():
    gc.collect()  # what earlier tests left for the collector is not this test's
    return len(os.listdir("/proc/self/fd"))


def test_no_file_no_descriptor_and_no_map_is_left(store_files, monkeypatch):
    reserving = host_store._reserve

    def reserve(file, begin, size):
        assert os.fstat(file).st_nlink == 0  # a file with a name is empty: it could stay behind
        reserving(file, begin, size)

    monkeypatch.setattr(host_store, "_reserve", reserve)

    def counts():
        files = open_files()
        return files, sum("foremoe-" in line for line in Path("/proc/self/maps").read_text().splitlines())

    def rank(group):
        backend, _ = opened(group, (0, 0, 1))
        for plan in range(1, 4):
            backend.publish(entries(3, range(plan)), 1)
            assert not store_files()
        backend.publish(entries(3, (0,)), 2)
        handle = backend.start([])
        backend.wait(handle, 1.0)
        during = counts()
        group.barrier()
        backend.close()
        backend.close()
        with pytest.raises(InputError, match="not open"):
            backend.start([])
        backend.open(group.rank, group, Experts())  # an instance can be used again
        backend.close()
        return during

    before = counts()
    during = run_threads(rank, 3)
    assert during[0][0] > before[0] and during[0][1] > 0
    assert counts() == before
    assert not store_files()


@pytest.mark.parametrize("call", ["find", "reserve", "home"])
def test_a_publish_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(call, monkeypatch, store_files):
    def refuse(*_):
        if broken and threading.current_thread().name == "rank 1":
            raise {"find": FileNotFoundError(), "reserve": OSError(errno.ENOSPC, "No space left"), "home": KeyError("gone")}[call]

    broken, opening, reserving = [True], NodeFile.open, os.posix_fallocate
    if call == "find":
        monkeypatch.setattr(NodeFile, "open", lambda self, create=False: (refuse(), opening(self, create=create)))
    if call == "reserve":
        monkeypatch.setattr(os, "posix_fallocate", lambda *args: (refuse(), reserving(*args)))

    def rank(group):
        backend, buffers = opened(group)
        home = buffers.home
        if call == "home":
            buffers.home = lambda x, e: (refuse(), home(x, e))[1]
        with pytest.raises(TransferError, match="rank 1 cannot publish its weights: ") as error:
            backend.publish(entries(2), 1)
        assert error.value.ranks == (1,)
        with pytest.raises(TransferError, match="publish it"):
            pull(backend, 0, 1 - group.rank)
        buffers.home = home
        group.barrier()
        broken.clear()
        group.barrier()
        backend.publish(entries(2), 1)
        assert holds(pull(backend, 0, 1 - group.rank), 0, 1 - group.rank, 1)
        backend.close()
        return str(error.value)

    fds = open_files()
    told = run_threads(rank, 2)
    cure = {"find": "state with node_of_rank_G which", "reserve": r"enlarge it (containers: --shm-size)", "home": "gone"}[call]
    assert cure in told[0] == told[1]
    assert not store_files() and open_files() == fds


def die_in_publish(group, moment, folder):
    """Rank 0 creates the file of its node; it, or the one that opens it, dies at a moment of that."""
    host_store._directory = lambda: folder
    opening, reserving = NodeFile.open, host_store._reserve

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "after create" and group.rank == 0:
        NodeFile.open = lambda self, create=False: (opening(self, create=create), die())
    if moment == "before open" and group.rank == 1:
        NodeFile.open = die
    if moment == "in use" and group.rank == 1:
        host_store._reserve = lambda *args: (reserving(*args), die())
    backend, _ = opened(group)
    try:
        backend.publish(entries(2), 1)
    finally:
        backend.close()


@pytest.mark.parametrize("moment", ["after create", "before open", "in use"])
def test_a_killed_rank_leaves_no_file(moment, store_files):
    results = run_processes(die_in_publish, 2, moment, host_store._directory(), timeout_s=3.0, errors=True)
    died = 0 if moment == "after create" else 1
    assert "exit code -9" in str(results[died])
    assert isinstance(results[1 - died], TransferError)
    assert not store_files()
