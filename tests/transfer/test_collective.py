"""Collective over gloo: the conformance suite, and failures that end in one sentence."""

import os
import time

import pytest
import torch

from foremoe.base.errors import InputError, TransferError
from foremoe.testing import TransferTests, get_pool, run_processes, run_threads
from foremoe.transfer.base import Copy
from foremoe.transfer.collective import Collective, _Messages

# Gloo carries host memory, and NCCL refuses two ranks on one GPU.


class TestCollective(TransferTests):
    backend = Collective()
    device = "cpu"


class NoBuffers:
    num_buffers = 0


def opened(group):
    backend = Collective()
    backend.open(group.rank, group, NoBuffers())
    return backend


def end(group, key, src_rank, dst_rank, num=5):
    """This rank's end of a copy of the source's rank number."""
    src = [torch.full((num,), float(src_rank))] if group.rank == src_rank else None
    dst = [torch.full((num,), -1.0)] if group.rank == dst_rank else None
    return Copy(key, 0, key, src_rank, dst_rank, src, dst)


def mine(group, *ends):
    return [copy for copy in ends if group.rank in (copy.src_rank, copy.dst_rank)]


def test_threads_are_refused():
    with pytest.raises(InputError, match="use local for threads"):
        run_threads(lambda group: Collective().open(0, group, NoBuffers()), 1)


def one_is_silent(group, num):
    """Rank 2 starts nothing; ranks 0 and 1 talk to it and to each other."""
    backend = opened(group)
    copies = mine(group, end(group, 0, 0, 1, num), end(group, 1, 2, 0, num), end(group, 2, 1, 2, num))
    errors = []
    if group.rank != 2:
        for _ in range(2):
            try:
                backend.wait(backend.start(copies), 0.5)
            except TransferError as error:
                errors.append((error.ranks, str(error)))
    group.barrier()
    backend.close()
    # Neither the exchange of tokens nor the control channel took harm.
    sent, received = torch.full((group.size,), float(group.rank)), torch.zeros(group.size)
    group.all_to_all(received, sent, [1] * group.size, [1] * group.size)
    again = opened(group)
    copies = mine(group, end(group, 0, 0, 1), end(group, 1, 2, 0))
    again.wait(again.start(copies), 10.0)
    again.close()
    return errors, received.tolist(), [copy.dst[0].tolist() for copy in copies if copy.dst is not None]


@pytest.mark.parametrize("num", [5, 3_000_000])
def test_only_the_silent_rank_is_named_and_the_group_survives(num):
    left, right, silent = get_pool(3).run(one_is_silent, num, num_ranks=3)
    for errors, _, _ in (left, right):
        assert errors[0][0] == (2,) and "rank 2 did not do its part within 0.5 s" in errors[0][1]
        assert len(errors) == 2, "after a failure, the same backend must not pretend to work"
    for _, received, _ in (left, right, silent):
        assert received == [0.0, 1.0, 2.0]
    assert left[2] == [[2.0] * 5] and right[2] == [[0.0] * 5]


def test_a_limit_that_torch_ends_a_few_milliseconds_early_has_passed(monkeypatch):
    class Work:
        def wait(self, limit):
            raise RuntimeError("Timed out waiting 496ms for send operation to complete")

    backend = Collective()
    monkeypatch.setattr(backend, "_opened", lambda: None)
    monkeypatch.setattr(backend, "_grouped", False, raising=False)
    with pytest.raises(TransferError, match=r"rank 2 did not do its part within 600 s") as caught:
        backend.wait(_Messages((), ((2, Work()),)), 600.0)
    assert caught.value.ranks == (2,)


def dies(group):
    backend = opened(group)
    if group.rank == 1:
        group.barrier()
        os._exit(3)
    try:
        handle = backend.start([end(group, 0, 1, 0)])
        group.barrier()
        backend.wait(handle, 1200.0)
    finally:
        backend.close()


def test_a_rank_that_died_is_named_long_before_the_timeout():
    error, died = run_processes(dies, 2, errors=True)
    assert isinstance(error, TransferError) and error.ranks == (1,)
    assert "rank 1 broke off" in str(error) and "\n" not in str(error)
    assert "exit code 3" in str(died)


def dies_between_messages(group):
    """Both have talked; rank 1 is gone before rank 0 begins the next message, which then fails at its start."""
    backend = opened(group)
    backend.wait(backend.start([end(group, 0, 1, 0)]), 10.0)
    if group.rank == 1:
        os._exit(3)
    with pytest.raises(TransferError):
        group.barrier()
    for key in range(1, 50):
        backend.wait(backend.start([end(group, key, 0, 1)]), 10.0)
        time.sleep(0.05)


def test_a_rank_that_died_before_a_message_is_named():
    error, died = run_processes(dies_between_messages, 2, errors=True)
    assert isinstance(error, TransferError) and error.ranks == (1,) and "rank 1 broke off" in str(error)
    assert "exit code 3" in str(died)


class PretendNccl:
    """Notes what it is asked for. One work for each group of messages, which is done after a few looks."""

    supports_coalescing = True

    def __init__(self, fails=False):
        self.calls, self.looks, self.fails, self.num_waits = [], 3, fails, 0

    def _start_coalescing(self):
        self.calls.append("begin")

    def _end_coalescing(self):
        self.calls.append("end")
        return self

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer, [x.dtype for x in tensors]))

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer, [x.dtype for x in tensors]))

    def wait(self):
        self.num_waits += 1
        if self.fails:
            raise RuntimeError("NCCL communicator was aborted on rank 0.")

    def is_completed(self):
        self.looks -= 1
        return self.looks <= 0

    def abort(self):
        self.calls.append(("abort", self.looks))


def on_pretend_nccl(**options):
    backend = Collective()
    backend._group, backend._grouped, backend._last, backend._link = object(), True, None, PretendNccl(**options)
    return backend, backend._link


def some_copies():
    weights = [torch.ones(3, dtype=torch.bfloat16), torch.ones(0, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16)]
    return [Copy(5, 0, 1, 1, 0, None, weights), Copy(4, 0, 0, 0, 2, weights, None)]


def test_nccl_gets_one_group_of_messages_in_the_order_of_keys():
    backend, link = on_pretend_nccl()
    backend.wait(backend.start([]), 1.0)
    assert not link.calls, "an empty group call would be a message to nobody"
    backend.wait(backend.start(some_copies()), 1.0)
    message = [torch.uint8]
    assert link.calls == ["begin", *[("send", 2, message)] * 2, *[("recv", 1, message)] * 2, "end"]


def test_nccl_connects_every_pair_of_ranks_before_the_first_copy():
    """By sends and receives: a collective would connect neighbours of its ring or tree alone."""
    met = set()
    for rank in range(4):
        backend, link = on_pretend_nccl()
        backend._connect(rank, 4, torch.device("cpu"))
        assert (link.calls[0], link.calls[-1]) == ("begin", "end") and link.num_waits == 1
        met |= {(rank, peer) if kind == "send" else (peer, rank, "received") for kind, peer, _ in link.calls[1:-1]}
    pairs = {(a, b) for a in range(4) for b in range(4) if a != b}
    assert met == pairs | {(*pair, "received") for pair in pairs}


def test_nccl_copies_that_still_run_are_waited_for_before_the_abort():
    backend, link = on_pretend_nccl()
    backend.start(some_copies())
    backend.close()
    backend.close()
    assert [call for call in link.calls if call[0] == "abort"] == [("abort", 0)]


def test_what_nccl_reports_is_a_transfer_error():
    backend, _ = on_pretend_nccl(fails=True)
    with pytest.raises(TransferError, match=r"broke off \(NCCL communicator was aborted on rank 0\.\)"):
        backend.wait(backend.start(some_copies()), 1.0)
    backend.close()
