"""Local: the conformance suite on threads, and what it says when it is used wrongly."""

import pytest
import torch

from foremoe.base.errors import InputError, TransferError
from foremoe.testing import TransferTests, run_processes, run_threads
from foremoe.transfer.base import Copy
from foremoe.transfer.local import Local


class TestLocal(TransferTests):
    backend = Local()
    in_process = True


def two_ranks(left, right, timeout_s=0.2):
    """Runs ``left(backend)`` on rank 0 and ``right(backend)`` on rank 1."""

    def body(group):
        backend = Local()
        backend.open(group.rank, group, None)
        try:
            return (left, right)[group.rank](backend)
        finally:
            group.barrier()
            backend.close()

    return run_threads(body, 2, errors=True)


def send(tensors, key=0):
    return Copy(key, 0, 0, 0, 1, tensors, None)


def receive(tensors, key=0):
    return Copy(key, 0, 0, 0, 1, None, tensors)


def test_processes_are_refused():
    with pytest.raises(InputError, match="give it a ThreadGroup, or use collective"):
        run_processes(open_local, 1)


def open_local(group):
    Local().open(group.rank, group, None)


def test_a_second_open_is_refused():
    def body(group):
        backend = Local()
        backend.open(group.rank, group, None)
        backend.open(group.rank, group, None)

    with pytest.raises(InputError, match="already open"):
        run_threads(body, 1)


def test_use_before_open_is_refused():
    with pytest.raises(InputError, match="not open"):
        Local().start([])


@pytest.mark.parametrize("dst", [torch.zeros(1), torch.zeros(3, dtype=torch.float64)], ids=["size", "dtype"])
def test_other_tensors_at_the_other_end_are_an_error(dst):
    """Not even where torch would broadcast or cast."""
    results = two_ranks(
        lambda backend: backend.wait(backend.start([send([torch.ones(3)])]), 0.2),
        lambda backend: backend.wait(backend.start([receive([dst])]), 0.2),
    )
    assert all(isinstance(error, TransferError) for error in results)
    assert any("an expert must have the same tensors on every rank" in str(error) for error in results)
    assert not dst.any()


def test_two_backends_of_one_group_do_not_meet():
    """The n-th Local that is opened on one rank talks to the n-th of the others."""

    def body(group):
        first, second = Local(), Local()
        for backend in (first, second):
            backend.open(group.rank, group, None)
        got = torch.zeros(2)
        if group.rank == 0:
            handles = [b.start([send([torch.full((2,), float(i))])]) for i, b in enumerate((first, second))]
            for backend, handle in zip((first, second), handles, strict=True):
                backend.wait(handle, 5.0)
        else:
            second.wait(second.start([receive([got])]), 5.0)
            first.wait(first.start([receive([torch.zeros(2)])]), 5.0)
        group.barrier()
        return got.tolist()

    assert run_threads(body, 2)[1] == [1.0, 1.0]
