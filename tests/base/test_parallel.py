"""for_rows: every row once, whatever the threads; progress, cancellation, errors."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import foremoe
from foremoe.base.errors import InputError
from foremoe.base.hardware import cores
from foremoe.base.parallel import for_rows, row_runner
from foremoe.solvers.base import edit_rows


@given(st.integers(0, 60), st.integers(1, 9), st.integers(1, 4))
def test_every_row_runs_once_for_any_number_of_threads(num_rows: int, rows_per_block: int, num_threads: int) -> None:
    times_N, seen = np.zeros(num_rows, int), []

    def block(low: int, high: int) -> None:
        assert 0 < high - low <= rows_per_block
        times_N[low:high] += 1

    with row_runner(num_threads, progress=seen.append):
        done_N = for_rows(block, num_rows, rows_per_block)
    assert (times_N == 1).all() and done_N.all() and done_N.shape == (num_rows,)
    assert sum(seen) == num_rows


@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_cancel_leaves_out_the_rest_and_says_which(num_threads: int) -> None:
    cancel, ran_N = threading.Event(), np.zeros(40, bool)

    def block(low: int, high: int) -> None:
        ran_N[low:high] = True
        if low >= 8:
            cancel.set()

    with row_runner(num_threads, cancel=cancel):
        done_N = for_rows(block, 40, rows_per_block=4)
    # Another thread may cancel before the first blocks have begun.
    assert (done_N == ran_N).all() and not done_N[-4:].any() and (num_threads > 1 or done_N[:12].all())


@pytest.mark.parametrize("num_threads", [1, 3])
def test_an_error_in_a_block_reaches_the_caller(num_threads: int) -> None:
    def block(low: int, high: int) -> None:
        if low == 4:
            raise ValueError("row 4")

    with row_runner(num_threads), pytest.raises(ValueError, match="row 4"):
        for_rows(block, 12, rows_per_block=2)


def test_without_a_runner_rows_run_on_the_calling_thread() -> None:
    threads = set()
    for_rows(lambda low, high: threads.add(threading.get_ident()), 10, rows_per_block=1)
    assert threads == {threading.get_ident()}


def test_several_threads_really_run() -> None:
    both = threading.Barrier(2, timeout=600)
    with row_runner(2):
        for_rows(lambda low, high: both.wait(), 2, rows_per_block=1)


def test_runners_nest_and_end() -> None:
    with row_runner(3) as outer:
        with row_runner(2) as inner:
            assert inner.num_threads == 2
        assert outer.num_threads == 3
    with row_runner() as runner:
        assert runner.num_threads == cores() >= 1
    with pytest.raises(InputError, match="num_threads must be a whole number of at least 1; got 0"), row_runner(0):
        pass


@pytest.mark.parametrize(("num_ranks", "num_rows", "most"), [(64, 32, 1), (8, 192, 6), (64, 4096, 64)])
def test_the_rows_that_one_rank_plans_are_shared_by_its_threads(num_ranks: int, num_rows: int, most: int) -> None:
    """A few layers of all micro-steps: EP64 with one layer, EP8 with six, and a whole EP64 stage."""
    slots_NGS = np.full((num_rows, num_ranks, 2), -1, np.int16)
    start = foremoe.Placement(expert_NGS=slots_NGS, quota_NGS=np.zeros_like(slots_NGS, np.int32))
    blocks = []
    with row_runner(8):
        edit_rows(start, lambda low, high, *placed: blocks.append(high - low))
    assert len(blocks) >= 32 and max(blocks) == most and sum(blocks) == num_rows
