"""Runs row kernels in parallel over blocks of rows, on the library's own threads, with progress and cancellation.

Kernels are serial and release the GIL, so plain threads work in parallel. numba's threading layer is not used, because it does
not survive a fork. Rows are independent of each other, so the blocks do not change results.
"""

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.fields import whole
from foremoe.base.hardware import cores


@dataclass(frozen=True, slots=True)
class RowRunner:
    """Options of `for_rows`: number of threads, progress callback, and cancel event.

    The callback gets the number of rows that were finished since its last call.
    """

    num_threads: int = 1
    progress: Callable[[int], None] | None = None
    cancel: threading.Event | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_RUNNER: contextvars.ContextVar[RowRunner | None] = contextvars.ContextVar("foremoe_row_runner", default=None)


@contextlib.contextmanager
def row_runner(
    num_threads: int | None = None, progress: Callable[[int], None] | None = None, cancel: threading.Event | None = None
) -> Iterator[RowRunner]:
    """Sets the `RowRunner` of solvers that are called inside the block. The planner calls every level in such a block."""
    runner = RowRunner(cores() if num_threads is None else whole(num_threads, "num_threads"), progress, cancel)
    token = _RUNNER.set(runner)
    try:
        yield runner
    finally:
        _RUNNER.reset(token)


def shared_block(num_rows: int, most: int) -> int:
    """Returns a number of rows per block, at most `most`. With several threads, each gets at least about four blocks."""
    num_threads = (_RUNNER.get() or RowRunner()).num_threads
    return most if num_threads == 1 else max(1, min(most, -(-num_rows // (4 * num_threads))))


def for_rows(block: Callable[[int, int], object], num_rows: int, rows_per_block: int = 256, *, whole: bool = False) -> Array:
    """Calls ``block(low, high)`` for all blocks of rows. Returns bool [N], which is False for rows that a cancellation skipped.

    If `whole` is True, the call cannot be cancelled and does not count as progress. Use it for figures, which must be complete.
    """
    runner = _RUNNER.get() or RowRunner()
    if whole:
        runner = RowRunner(runner.num_threads)
    done_N = np.zeros(num_rows, bool)

    def run(low: int) -> None:
        if runner.cancel is not None and runner.cancel.is_set():
            return
        high = min(low + rows_per_block, num_rows)
        block(low, high)
        done_N[low:high] = True
        if runner.progress is not None:
            with runner.lock:
                runner.progress(high - low)

    starts = range(0, num_rows, rows_per_block)
    if runner.num_threads == 1 or len(starts) <= 1:
        for low in starts:
            run(low)
        return done_N
    with ThreadPoolExecutor(runner.num_threads) as pool:
        list(pool.map(run, starts))
    return done_N
