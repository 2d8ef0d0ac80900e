"""A pretend GPU for tests of bookkeeping: its memory is the host's, and its streams run when somebody waits for them."""

import contextlib
import itertools
from types import SimpleNamespace

import torch

_number = itertools.count(1)


class PretendTensor(torch.Tensor):
    is_cuda = True
    device = torch.device("cuda", 0)


class PretendStream:
    """Work that is queued here runs when the stream, or one of its events, is waited for."""

    streams = {}  # noqa: RUF012 (the pretend GPU's own table)

    def __init__(self, device=None):
        self.device = torch.device("cuda", 0)
        self.queue, self.cuda_stream, self.num_waits = [], next(_number), 0
        self.streams[self.cuda_stream] = self

    def wait_stream(self, other):
        self.wait_event(other.record_event())

    def record_event(self):
        return SimpleNamespace(stream=self, after=len(self.queue))

    def wait_event(self, event):
        self.num_waits += 1
        event.stream.synchronize(event.after)

    def synchronize(self, after=None):
        after = len(self.queue) if after is None else after
        for n, work in enumerate(self.queue[:after]):
            self.queue[n] = lambda: None
            work()


class PretendCudart:
    """Page locks by address."""

    def __init__(self):
        self.locked, self.num_locks, self.error = {}, 0, 0

    def cudaHostRegister(self, address, size, flags):
        if self.error:
            return self.error
        assert address % 4096 == 0 and address not in self.locked and flags == 1
        self.locked[address] = size
        self.num_locks += 1
        return 0

    def cudaHostUnregister(self, address):
        del self.locked[address]
        return 0


def install(monkeypatch):
    """Puts the pretend GPU in place of torch.cuda; returns its current stream and its page locks."""
    PretendStream.streams.clear()
    current, cudart = PretendStream(), PretendCudart()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", PretendStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return current, cudart
