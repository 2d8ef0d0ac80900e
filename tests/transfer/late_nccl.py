"""A pretended NCCL between ranks that are threads with pretend GPUs: two-sided, on streams, as late as messages may be.

Messages of one `start` go side by side, behind what the current stream had been given and behind this rank's earlier groups. A
message moves when both ends have come to it, and lands when somebody waits for it. The host never waits.

`LateNccl` is a transfer backend. `OverNccl` is a group of threads, which foremoe takes for processes whose tensors NCCL sends.
"""

import threading
from collections import defaultdict

import pretend_gpu
import torch
import torch.distributed as dist
from pretend_gpu import PretendStream, gpu

from foremoe.distributed import private
from foremoe.distributed.group import ThreadGroup, TorchGroup
from foremoe.plan.transfers import Link
from foremoe.transfer.base import Copy, TransferBackend

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


class Exchanges(LateNccl):
    """What foremoe asks of torch's NCCL: exchanges that the current stream waits for when it is told to."""

    def __init__(self, group):
        self.rank, self.size = group.rank, group.size
        self.open(group.rank, group, None)

    def alltoall_base(self, received, sent, num_received_G, num_sent_G, options=None):
        ends = [(g, self.rank, None, [part]) for g, part in enumerate(received.split(num_received_G))]
        ends += [(self.rank, g, [part], None) for g, part in enumerate(sent.split(num_sent_G))]
        handle = self.start([Copy(src * self.size + dst, 0, 0, src, dst, *tensors) for src, dst, *tensors in ends])
        return Work(lambda: self.wait(handle, _LIMIT_S))

    def abort(self):
        self.close()


class Work:
    def __init__(self, wait):
        self.wait = wait


class OverNccl(TorchGroup):
    """A TorchGroup of threads: exchanges are late, and the rest is the threads' own."""

    _on_gloo = False

    def __init__(self, threads):
        self.rank, self.size, self.timeout_s, self.threads = threads.rank, threads.size, threads.timeout_s, threads
        self.process_group = Exchanges(threads)

    def gather(self, value):
        return self.threads.gather(value)

    def report(self, message):
        self.threads.report(message)


class PrivateOverNccl(OverNccl, private._PrivateGroup):
    """The group of the thread that fills host stores."""

    def __init__(self, parent, on_gpu):
        assert on_gpu, "between nodes, NCCL"
        super().__init__(parent.gather(ThreadGroup.of(parent.size, timeout_s=parent.timeout_s))[0][parent.rank])
        self._link, self._control = self.process_group, None


def install(monkeypatch):
    """Puts the pretended NCCL in place of torch's."""

    def exchange(received, sent, num_received_G, num_sent_G, group, async_op=False):
        work = group.alltoall_base(received, sent, num_received_G, num_sent_G)
        return work if async_op else work.wait()

    monkeypatch.setattr(dist, "all_to_all_single", exchange)
    monkeypatch.setattr(dist, "get_backend_config", lambda process_group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(private, "_PrivateGroup", PrivateOverNccl)
