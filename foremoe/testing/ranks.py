"""Runs a function on every rank of a group. Ranks are threads, processes of a shared pool, or processes for a single call.

::

    def sums(group, value):
        return sum(group.gather(group.rank * value))

    run_threads(sums, 3, 10)                     # [30, 30, 30]: one ThreadGroup
    get_pool(2).run(sums, 10)                    # [10, 10]: one TorchGroup over gloo
    run_processes(sums, 2, 10)                   # the same on separate processes, which may be killed
"""

import atexit
import contextlib
import multiprocessing
import pickle
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import ThreadGroup
from foremoe.testing.rank_process import from_bytes, serve, to_bytes

START_S = 120.0  # importing torch on a busy machine takes long


class RankDied(RuntimeError):
    """Raised if a rank died, or had to be killed, before it returned a result."""


def run_threads(
    fn: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0, limit_s: float = 300.0, errors: bool = False
) -> list[Any]:
    """Calls ``fn(group, *args)`` on one thread per rank, with a `ThreadGroup`, and returns the results by rank.

    Args:
        timeout_s: Time in seconds that a rank waits for another rank (`Group.timeout_s`).
        limit_s: Timeout of the whole call in seconds, after which `RankDied` is raised. Threads of ranks that are still busy keep
            running.
        errors: Whether to return exceptions as results. If False, the first exception is raised, with a note that names the rank.
    """
    return _results(*_on_threads(fn, num_ranks, args, timeout_s, limit_s), errors)


def _on_threads(
    fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout_s: float, limit_s: float
) -> tuple[list[Any], list[tuple[float, int]]]:
    """Returns results by rank, and (time, rank) of each failure."""
    groups = ThreadGroup.of(num_ranks, timeout_s=timeout_s)
    found: dict[int, Any] = {g: RankDied(f"rank {g} did not end within {limit_s:g} s.") for g in range(num_ranks)}
    failed: list[tuple[float, int]] = []

    def serve(group: ThreadGroup) -> None:
        try:
            found[group.rank] = fn(group, *args)
        except BaseException as error:
            failed.append((time.monotonic(), group.rank))
            group.report(f"{type(error).__name__}: {error}")
            found[group.rank] = error

    threads = [threading.Thread(target=serve, args=(group,), name=f"rank {group.rank}", daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    until = time.monotonic() + limit_s
    for g, thread in enumerate(threads):
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            failed.append((until, g))
    results = [found[g] for g in range(num_ranks)]
    # An error's traceback references `found`. With the error in it, that cycle would keep the ranks' objects alive.
    found.clear()
    return results, failed


class RankPool:
    """Rank processes that serve many calls. Starting a process takes seconds, while a call takes milliseconds.

    Every call has its own gloo process group with the number of ranks of the call. During the call, it is also the default group
    of torch.distributed. Each rank runs torch on one thread. If a rank dies or takes too long, all ranks end and the pool becomes
    unusable.

    Args:
        num_ranks: Maximum number of ranks in a call.
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise InputError(f"num_ranks is {num_ranks}; a pool needs at least one rank.")
        self.num_ranks = self.asked_ranks = num_ranks
        self.unusable = ""  # the reason, in one sentence
        # The parent hosts the store, because it survives any rank, so that the others can still name the missing one.
        self._store: TCPStore | None = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._world, self._world_of = 0, (0, 0.0)
        self._connections: list[Connection] = []
        self._processes: list[Any] = []
        context = _context()
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, self._store.port, theirs), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self._collect(range(num_ranks), START_S, "start")
        if self.unusable:
            raise RankDied(self.unusable)

    def run(
        self, fn: Callable[..., Any], *args: Any,
        num_ranks: int | None = None, timeout_s: float = 60.0, limit_s: float = 300.0, errors: bool = False,
    ) -> list[Any]:  # fmt: skip
        """Calls ``fn(group, *args)`` on the first `num_ranks` ranks, with a `TorchGroup`, and returns the results by rank.

        Args:
            fn: Function to call. It must be a module-level function, because functions, arguments and results are pickled.
            num_ranks: Number of ranks. Defaults to all ranks or, in the shared pool, to the last number passed to `get_pool`.
            timeout_s: Time in seconds that a rank waits for another rank, also in the process group.
            limit_s: Timeout of the whole call in seconds.
            errors: Whether to return exceptions as results, as in `run_threads`. The result of a rank that died is a `RankDied`.

        Raises:
            RankDied: A rank ended or took longer than `limit_s`, in this call or in an earlier one.
        """
        num_ranks = self.asked_ranks if num_ranks is None else num_ranks
        if self.unusable:
            raise RankDied(f"this pool is unusable: {self.unusable}")
        if not 1 <= num_ranks <= self.num_ranks:
            raise InputError(f"num_ranks is {num_ranks}; this pool has 1 to {self.num_ranks} ranks.")
        # A group in which a rank failed may contain part of a message, so the next call gets a new group.
        if self._world_of != (num_ranks, timeout_s):
            self._world, self._world_of = self._world + 1, (num_ranks, timeout_s)
        try:
            call = to_bytes((fn, args))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(f"{fn!r} cannot be sent to a rank ({error}); use a function of a module.") from None
        task = to_bytes((list(sys.path), self._world, num_ranks, timeout_s, call))
        for connection in self._connections[:num_ranks]:
            with contextlib.suppress(OSError):  # the rank died since the last call; detected when its answer is collected
                connection.send_bytes(task)
        try:
            results, failed = self._collect(range(num_ranks), limit_s, "answer")
        except BaseException:
            self._end("a call was interrupted, and its answers would be taken for those of the next.")
            raise
        if failed:
            self._world_of = (0, 0.0)
        return _results(results, failed, errors)

    def close(self) -> None:
        """Ends all ranks and waits for them."""
        if not self.unusable:
            self._end("it was closed.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _collect(self, ranks: Sequence[int], limit_s: float, verb: str) -> tuple[list[Any], list[tuple[float, int]]]:
        """Returns answers by rank, and (time, rank) of each failure. Ends the pool if a rank is lost."""
        results: list[Any] = [None] * len(ranks)
        failed: list[tuple[float, int]] = []
        lost: list[str] = []
        left = set(ranks)
        until = time.monotonic() + limit_s
        while left and (ready := wait([self._connections[g] for g in left], max(0.0, until - time.monotonic()))):
            for g in sorted(g for g in left if self._connections[g] in ready):
                left.discard(g)
                try:
                    when, good, value = from_bytes(self._connections[g].recv_bytes())
                except (EOFError, OSError):
                    self._processes[g].join(5.0)
                    lost.append(f"rank {g} ended with exit code {self._processes[g].exitcode}.")
                    when, good, value = time.monotonic(), False, RankDied(lost[-1])
                results[g] = value
                if not good:
                    failed.append((when, g))
        for g in sorted(left):
            lost.append(f"rank {g} did not {verb} within {limit_s:g} s and was ended.")
            results[g] = RankDied(lost[-1])
            failed.append((until, g))
        if lost:
            self._end(" ".join(lost))
        return results, failed

    def _end(self, why: str) -> None:
        self.unusable = why
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        # After a loss, the others may hang in a call that is never answered.
        patience_s = 10.0 if why == "it was closed." else 0.0
        for process in self._processes:
            process.join(patience_s)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._store = None


def run_processes(fn: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    """Calls `RankPool.run` with these options on `num_ranks` new processes. Use it for drills that kill a rank."""
    with RankPool(num_ranks) as pool:
        return pool.run(fn, *args, **options)


_shared: RankPool | None = None


def get_pool(num_ranks: int) -> RankPool:
    """Returns the pool that all tests of this process share. It has at least `num_ranks` ranks. An unusable pool is replaced."""
    global _shared
    if _shared is not None and (_shared.unusable or _shared.num_ranks < num_ranks):
        _shared.close()
        _shared = None
    if _shared is None:
        _shared = RankPool(num_ranks)
        atexit.register(_shared.close)
    _shared.asked_ranks = num_ranks
    return _shared


def _context() -> Any:
    """Returns a context that forks from a server with torch loaded, if possible, so that later starts take 0.5 s, not 10 s."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "foremoe.testing.rank_process"])
    return context


def _results(results: list[Any], failed: list[tuple[float, int]], errors: bool) -> list[Any]:
    if not failed or errors:
        return results
    # A TransferError may be a consequence of another rank's error, and may even be detected before it.
    _, _, first = min((isinstance(results[g], TransferError), when, g) for when, g in failed)
    error: BaseException = results[first]
    error.add_note(f"on rank {first} of {len(results)}")
    results.clear()
    try:
        raise error
    finally:
        del error
