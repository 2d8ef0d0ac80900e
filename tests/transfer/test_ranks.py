"""Harness of ranks: results by rank, the first error and not its echoes, nothing left behind."""

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import ThreadGroup, TorchGroup
from foremoe.testing.ranks import RankDied, RankPool, get_pool, run_processes, run_threads


def by_threads(fn, num_ranks, *args, **options):
    return run_threads(fn, num_ranks, *args, **options)


def by_processes(fn, num_ranks, *args, **options):
    return get_pool(3).run(fn, *args, num_ranks=num_ranks, **options)


both = pytest.mark.parametrize("run", [by_threads, by_processes])


def limits_of_files(_group):
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)


def test_processes_may_open_as_many_files_as_their_user():
    pytest.importorskip("resource", reason="this system has no limit of open files that a process may raise")
    assert all(soft == most for soft, most in get_pool(3).run(limits_of_files))


def weighted(group, weight):
    return group.rank, group.size, sum(group.gather(weight * group.rank))


@both
def test_results_come_by_rank(run):
    for num_ranks in (1, 3, 2, 3):
        total = 10 * sum(range(num_ranks))
        assert run(weighted, num_ranks, 10) == [(g, num_ranks, total) for g in range(num_ranks)]


def kind_of_group(group):
    return type(group), group.timeout_s


def test_every_kind_of_rank_has_its_group():
    assert run_threads(kind_of_group, 2, timeout_s=7.0) == [(ThreadGroup, 7.0)] * 2
    assert get_pool(3).run(kind_of_group, num_ranks=2, timeout_s=7.0) == [(TorchGroup, 7.0)] * 2


def raises(group, culprit):
    if group.rank == culprit:
        raise ZeroDivisionError("the cause")
    group.barrier()


@both
def test_the_cause_is_raised_and_not_its_echo(run):
    for culprit in (0, 2):
        with pytest.raises(ZeroDivisionError, match="the cause") as caught:
            run(raises, 3, culprit)
        assert f"on rank {culprit} of 3" in caught.value.__notes__


@both
def test_errors_can_be_results(run):
    results = run(raises, 3, 1, errors=True)
    assert isinstance(results[1], ZeroDivisionError)
    for g in (0, 2):
        assert isinstance(results[g], TransferError) and "the cause" in str(results[g])
    assert run(weighted, 3, 1) == [(g, 3, 3) for g in range(3)], "the next call has a group of its own"


def raises_in_a_process(group):
    raise Awkward("here", "there")


class Awkward(Exception):
    """Pickles, but cannot be made again."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def test_an_error_from_a_process_brings_its_traceback():
    with pytest.raises(RuntimeError, match="Awkward: here and there") as caught:
        get_pool(3).run(raises_in_a_process, num_ranks=2)
    assert any("in raises_in_a_process" in note for note in caught.value.__notes__)


def leaves_half_a_message(group):
    if group.rank == 0:
        dist.isend(torch.ones(3), 1)


def receives(group):
    got = torch.zeros(3)
    if group.rank == 0:
        dist.send(torch.full((3,), 2.0), 1)
    else:
        dist.recv(got, 0)
    return got.tolist()


def half_a_message_and_an_error(group):
    leaves_half_a_message(group)
    raise ZeroDivisionError


def test_what_a_failed_call_left_does_not_meet_the_next():
    with pytest.raises(ZeroDivisionError):
        get_pool(3).run(half_a_message_and_an_error, num_ranks=2)
    assert get_pool(3).run(receives, num_ranks=2)[1] == [2.0] * 3


def echo(group, *values):
    return values


def test_tensors_of_any_dtype_travel():
    sent = [torch.arange(4).to(dtype) for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.uint8, torch.float64)]
    for got in get_pool(3).run(echo, *sent, num_ranks=2):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(sent, got, strict=True))


def unpicklable(group):
    return threading.Lock()


def test_what_cannot_be_sent_is_an_error_and_the_pool_goes_on():
    with pytest.raises(InputError, match="use a function of a module"):
        get_pool(3).run(lambda group: 1)
    with pytest.raises(TypeError, match="pickle"):
        get_pool(3).run(unpicklable)
    assert get_pool(3).run(weighted, 1, num_ranks=1) == [(0, 1, 0)]


@pytest.mark.parametrize("num_ranks", [0, 4])
def test_more_ranks_than_there_are_is_an_error(num_ranks):
    pool = get_pool(3)
    num_ranks = num_ranks and pool.num_ranks + 1
    with pytest.raises(InputError, match="this pool has 1 to"):
        pool.run(weighted, 1, num_ranks=num_ranks)


def process_of(group):
    return os.getpid(), torch.get_num_threads(), list(sys.path)


def test_the_pool_is_shared_and_its_ranks_run_one_thread():
    first, second = get_pool(2).run(process_of, num_ranks=2), get_pool(3).run(process_of, num_ranks=2)
    assert first == second and len({pid for pid, _, _ in first} | {os.getpid()}) == 3
    assert {num for _, num, _ in first} == {1}
    assert all(path == sys.path for _, _, path in first), "what tests can import, ranks can"


def gone(pids):
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_close_ends_all_ranks():
    with RankPool(2) as pool:
        pids = [pid for pid, _, _ in pool.run(process_of)]
    assert gone(pids) and not [p for p in multiprocessing.active_children() if p.pid in pids]
    pool.close()
    with pytest.raises(RankDied, match="this pool is unusable: it was closed"):
        pool.run(process_of)


def is_killed(group, pids):
    pids.extend(pid for pid, _, _ in group.gather(process_of(group)))
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def stays_busy(group):
    if group.rank == 1:
        threading.Event().wait()


def test_a_killed_rank_is_named_with_its_exit_code():
    error, died, other = run_processes(is_killed, 3, [], errors=True)
    assert isinstance(died, RankDied) and str(died) == "rank 1 ended with exit code -9."
    for survivor in (error, other):
        assert isinstance(survivor, TransferError) and "rank 1" in str(survivor)


def test_a_pool_that_lost_a_rank_is_unusable_and_leaves_no_process():
    with RankPool(2) as pool:
        pids = [pid for pid, _, _ in pool.run(process_of)]
        with pytest.raises(RankDied, match="rank 1 ended with exit code -9") as caught:
            pool.run(is_killed, [])
        assert "on rank 1 of 2" in caught.value.__notes__
        assert gone(pids)
        with pytest.raises(RankDied, match="this pool is unusable: rank 1 ended"):
            pool.run(process_of)


def test_a_busy_rank_is_ended_after_the_limit():
    with RankPool(2) as pool:
        pids = [pid for pid, _, _ in pool.run(process_of)]
        with pytest.raises(RankDied, match=r"rank 1 did not answer within 0\.5 s and was ended"):
            pool.run(stays_busy, limit_s=0.5)
        assert gone(pids)


def test_a_busy_thread_is_named_after_the_limit():
    stop = threading.Event()
    with pytest.raises(RankDied, match=r"rank 1 did not end within 0\.2 s"):
        run_threads(lambda group: stop.wait() if group.rank == 1 else None, 2, limit_s=0.2)
    stop.set()


def test_ranks_end_with_a_parent_that_was_killed():
    """Even in the middle of a call."""
    here = os.path.dirname(__file__)
    code = (
        f"import sys; sys.path.insert(0, {here!r}); import test_ranks as t; pool = t.RankPool(2);"
        "print(*(p[0] for p in pool.run(t.process_of)), flush=True); pool.run(t.stays_busy)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        time.sleep(0.2)
        parent.kill()
    until = time.monotonic() + 10
    while not gone(pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(pids) == 2 and gone(pids)


def test_an_interrupted_call_does_not_leave_its_answers_to_the_next(monkeypatch):
    with RankPool(1) as pool:
        pids = [pid for pid, _, _ in pool.run(process_of)]

        def interrupt(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(pool, "_collect", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(process_of)
        assert gone(pids)
        with pytest.raises(RankDied, match="unusable: a call was interrupted"):
            pool.run(process_of)


def test_a_new_shared_pool_replaces_a_lost_one():
    lost = get_pool(2)
    lost.close()
    again = get_pool(2)
    assert again is not lost and again.run(weighted, 1, num_ranks=2) == [(0, 2, 1), (1, 2, 1)]


@pytest.mark.parametrize("errors", [False, True])
def test_what_failed_threads_held_goes_with_the_error(errors):
    """And not at some later garbage collection."""
    held = []

    class Thing:
        pass

    def fails(group):
        thing = Thing()
        held.append(weakref.ref(thing))
        raise ZeroDivisionError

    gc.disable()
    try:
        with contextlib.suppress(ZeroDivisionError):
            run_threads(fails, 2, errors=errors)
        assert len(held) == 2 and not any(thing() for thing in held)
    finally:
        gc.enable()


def test_threads_end_before_the_call_returns():
    before = threading.active_count()
    run_threads(lambda group: time.sleep(0.05 * group.rank), 3)
    with pytest.raises(ZeroDivisionError):
        run_threads(raises, 3, 0)
    assert threading.active_count() == before
