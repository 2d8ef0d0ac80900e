"""A pretended NCCL between ranks that are threads with pretend GPUs: two-sided, on streams, as late as messages may be.

Messages of one `start` go side by side, behind what the current stream had been given and behind this rank's earlier groups. A
message moves when both ends have come to it, and lands when somebody waits for it. The host never waits.
"""

import threading
from collections import defaultdict

import pretend_gpu
import torch
from pretend_gpu import PretendStream, gpu

from foremoe.plan.transfers import Link
from foremoe.transfer.base import TransferBackend

_LIMIT_S = 20.0


class Board:
    """What the ends of messages have told each other; the n-th send with a key goes with the n-th receive."""

    def __init__(self):
        self.changed, self.told, self.num = threading.Condition(pretend_gpu._lock), {}, defaultdict(int)

    def turn(self, end, key):
        """The number of this message among those with the same key, by end."""
        with self.changed:
            self.num[end, key] += 1
            return key, self.num[end, key]

    def tell(self, end, message, value):
        with self.changed:
            self.told[end, message] = value
            self.changed.notify_all()


class Told:
    """An event of the other end of a message, which may not have come yet."""

    stream = None

    def __init__(self, board, end, message):
        self.board, self.what = board, (end, message)

    def query(self):
        told = self.board.told.get(self.what)
        return told is not None and told[0].query()

    def synchronize(self):
        with self.board.changed:
            if not self.board.changed.wait_for(lambda: self.what in self.board.told, _LIMIT_S):
                raise RuntimeError(f"nobody came for {self.what}")
        self.board.told[self.what][0].synchronize()


class LateNccl(TransferBackend):
    """Copies by messages, both ends of which take part."""

    links, one_sided = frozenset({Link.PEER, Link.RDMA}), False

    def open(self, rank, group, buffers):
        self.board = group.gather(Board())[0]
        self.group = PretendStream()  # where this rank's groups follow each other

    def start(self, copies):
        self.group.wait_stream(torch.cuda.current_stream())
        begin, ends = self.group.record_event(), []
        for copy in sorted(copies, key=lambda copy: copy.key):
            stream = PretendStream()
            stream.wait_event(begin)
            if copy.dst is None:
                message = self.board.turn("sent", copy.key)
                self.board.tell("sent", message, (stream.record_event(), copy.src))
                stream.put(lambda: None, Told(self.board, "received", message))
            else:
                message = self.board.turn("received", copy.key)
                stream.put(
                    gpu.copying(lambda copy=copy, message=message: self._move(copy, message)), Told(self.board, "sent", message)
                )
                self.board.tell("received", message, (stream.record_event(), None))
            ends.append(stream.record_event())
        for end in ends:
            self.group.wait_event(end)
        return self.group.record_event()

    def _move(self, copy, message):
        for dst, src in zip(copy.dst, self.board.told["sent", message][1], strict=True):
            pretend_gpu.raw(dst).copy_(pretend_gpu.raw(src))

    def wait(self, handle, timeout_s):
        torch.cuda.current_stream().wait_event(handle)

    def close(self):
        self.group.synchronize()
