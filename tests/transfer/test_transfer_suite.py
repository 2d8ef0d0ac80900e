"""The conformance suite of transfer backends catches backends that break a law, and says where."""

import os
import tempfile
import threading

import pytest
import torch
from flaky import Shelf
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from foremoe.base.errors import InputError, TransferError
from foremoe.plan.transfers import Link
from foremoe.testing import TransferTests
from foremoe.transfer import TransferBackend
from foremoe.transfer import local as local_module
from foremoe.transfer.local import Local


class TestShelf(TransferTests):
    backend = Shelf()
    in_process = True


def test_a_backend_without_its_attributes_says_which():
    methods = dict.fromkeys(("open", "start", "wait", "close"), lambda *_: None)
    with pytest.raises(InputError, match="backend Mine lacks links and one_sided; set links = frozenset"):
        type("Mine", (TransferBackend,), methods)
    with pytest.raises(InputError, match="backend Mine lacks one_sided; set"):
        type("Mine", (TransferBackend,), methods | {"links": frozenset({Link.PEER})})


class GoesThroughFloat32(Local):
    """Changes the payload of a NaN."""

    def wait(self, handle, timeout_s):
        super().wait(handle, timeout_s)
        for copy, _ in handle:
            for x in copy.dst or ():
                x.copy_(x.float()) if x.dtype.is_floating_point else None


class WritesOneByteMore(Local):
    def wait(self, handle, timeout_s):
        super().wait(handle, timeout_s)
        for copy, _ in handle:
            if copy.dst is not None and copy.dst[-1].numel():
                block = copy.dst[-1].view(torch.uint8)
                block.as_strided((1,), (1,), block.storage_offset() + block.numel()).add_(1)


class ForgetsTheLastTensor(Local):
    def start(self, copies):
        short = [
            local_module.Copy(c.key, c.layer, c.expert, c.src_rank, c.dst_rank, *(x and x[:1] for x in (c.src, c.dst)))
            for c in copies
        ]
        return super().start(short)


class ReadsWhenTheOtherEndWaits(Local):
    """The source is not free after wait, as it must be."""

    def start(self, copies):
        with self._desk.changed:
            for copy in copies:
                if copy.src is not None:
                    self._desk.meeting_of[copy.key] = copy.src
            self._desk.changed.notify_all()
        return copies

    def wait(self, handle, timeout_s):
        with self._desk.changed:
            for copy in handle:
                if copy.dst is not None:
                    self._desk.changed.wait_for(lambda key=copy.key: key in self._desk.meeting_of, timeout_s)
                    for into, tensor in zip(copy.dst, self._desk.meeting_of.pop(copy.key), strict=True):
                        into.copy_(tensor)

    def close(self):
        self._group = None


class NeverGivesUp(Local):
    def wait(self, handle, timeout_s):
        try:
            super().wait(handle, timeout_s)
        except TransferError:
            return


class NamesNobody(Local):
    def wait(self, handle, timeout_s):
        try:
            super().wait(handle, timeout_s)
        except TransferError:
            raise TransferError("something went wrong") from None


class WritesAfterItFailed(Local):
    """Leaves the destination on the desk."""

    def wait(self, handle, timeout_s):
        with self._desk.changed:
            before = dict(self._desk.meeting_of)
        try:
            super().wait(handle, timeout_s)
        except TransferError:
            self._desk.meeting_of.update(before)
            raise


class WritesAfterClose(Local):
    def close(self):
        if self._group is not None:
            self.last.zero_()
        super().close()

    def open(self, rank, group, buffers):
        super().open(rank, group, buffers)
        self.last = buffers.slot(0)[0]


class LeavesItsDestinationBehind(Local):
    def close(self):
        self._group = None


class ClosesOnce(Local):
    def close(self):
        if self._group is None:
            raise RuntimeError("already closed")
        super().close()


class KeepsAFile(Local):
    files = []  # noqa: RUF012 (shared on purpose)

    def open(self, rank, group, buffers):
        super().open(rank, group, buffers)
        self.files.append(tempfile.TemporaryFile())  # noqa: SIM115 (the fault)


class KeepsAThread(Local):
    def open(self, rank, group, buffers):
        super().open(rank, group, buffers)
        threading.Thread(target=STOP.wait, daemon=True).start()


STOP = threading.Event()


class LooksAtNoVersion(Shelf):
    def wait(self, handle, timeout_s):
        self.version = max(version for version, _ in self.shelf.values())
        for copy in handle:
            _, weights = self.shelf[copy.layer, copy.expert]
            for into, tensor in zip(copy.dst, weights, strict=True):
                into.copy_(tensor)


class PublishesOnce(Shelf):
    def publish(self, entries, version):
        known = dict(self.shelf)
        super().publish(entries, version)
        self.group.barrier()
        self.shelf.update({key: (version, weights) for key, (_, weights) in known.items()})
        self.group.barrier()


class NeedsItsHome(Shelf):
    def wait(self, handle, timeout_s):
        super().wait(handle, timeout_s)
        self.group.timeout_s = 0.3
        self.group.barrier()


class MakesSomethingUp(Shelf):
    """A pull of what was never published succeeds."""

    def wait(self, handle, timeout_s):
        super().wait([copy for copy in handle if (copy.layer, copy.expert) in self.shelf], timeout_s)


@pytest.mark.parametrize(
    ("backend", "test", "sentence"),
    [
        (GoesThroughFloat32(), "test_every_byte_arrives_and_no_other_is_written", r"bytes of tensor \d are wrong"),
        (WritesOneByteMore(), "test_every_byte_arrives_and_no_other_is_written", "gap between tensors"),
        (ForgetsTheLastTensor(), "test_every_byte_arrives_and_no_other_is_written", r"bytes of tensor \d are wrong"),
        (ReadsWhenTheOtherEndWaits(), "test_a_source_is_free_once_it_has_waited_itself", "bytes are wrong, the first in slot"),
        (NeverGivesUp(), "test_a_silent_peer_is_named", "its peer has not started"),
        (NamesNobody(), "test_a_silent_peer_is_named", "must name rank 1"),
        (WritesAfterItFailed(), "test_a_silent_peer_is_named", "written to after wait had failed"),
        (WritesAfterClose(), "test_every_byte_arrives_and_no_other_is_written", "after close"),
        (LeavesItsDestinationBehind(), "test_close_is_safe_at_any_time", "written to after close"),
        (ClosesOnce(), "test_close_is_safe_at_any_time", "already closed"),
        (KeepsAFile(), "test_opening_and_closing_leaves_nothing", "more open files"),
        (KeepsAThread(), "test_opening_and_closing_leaves_nothing", "more threads"),
        (LooksAtNoVersion(), "test_weights_of_an_older_version_are_stale", "must raise StaleWeights"),
        (PublishesOnce(), "test_pulls_see_the_weights_of_the_last_publish", "bytes are wrong, the first in slot"),
        (NeedsItsHome(), "test_pulls_need_no_help_of_the_home", "bytes are wrong|did not answer|another rank"),
        (MakesSomethingUp(), "test_weights_that_were_never_published_are_an_error", "must raise an error"),
    ],
    ids=lambda value: "" if isinstance(value, str) else type(value).__name__,
)
def test_the_suite_catches_a_broken_backend(backend, test, sentence):
    if "leaves_nothing" in test and not os.path.isdir("/proc/self/task"):
        pytest.skip("what a process holds cannot be counted here")
    STOP.clear()
    mine = type("Broken", (TransferTests,), {"backend": backend, "in_process": True, "timeout_s": 2.0})()
    run = getattr(mine, test)
    if hasattr(run, "hypothesis"):
        inner = run.hypothesis.inner_test
        # The first failure will do: shrinking it takes seconds.
        run = settings(phases=(Phase.generate,), database=None, deadline=None, max_examples=200)(
            given(st.data())(lambda data: inner(mine, data))
        )
    try:
        with pytest.raises((AssertionError, RuntimeError), match=sentence) as caught:
            run()
    finally:
        STOP.set()
        KeepsAFile.files.clear()
    if "arrive" in test:
        notes = "\n".join(getattr(caught.value, "__notes__", []))
        assert "ranks, experts of" in notes and "round 0" in notes, "the copies of the failing case are printed"
