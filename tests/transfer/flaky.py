"""Backends that fail on demand, for the fault drills."""

import copy
from typing import ClassVar

from foremoe.errors import StaleWeights, TransferError
from foremoe.transfer.base import TransferBackend
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost
from foremoe.transfers import Path


class Flaky(Local):
    """Two-sided; on one rank, every start from the n-th on raises."""

    def __init__(self, rank, starts):
        super().__init__()
        self.flaky_rank, self.starts_left = rank, starts

    def open(self, rank, group, buffers):
        self.starts_left = self.starts_left if rank == self.flaky_rank else 10**9
        super().open(rank, group, buffers)

    def start(self, copies):
        self.starts_left -= 1
        if self.starts_left < 0:
            raise RuntimeError("the link is down")
        return super().start(copies)


class Second(Local):
    """Another two-sided backend, with a mailbox of its own."""


class FlakyHost(PinnedHost):
    """One-sided; on one rank, every pull from the n-th on fails while it is waited for."""

    def __init__(self, rank, pulls, **options):
        super().__init__(**options)
        object.__setattr__(self, "_drill", [rank, pulls])

    def open(self, rank, group, buffers):
        self._drill[1] = self._drill[1] if rank == self._drill[0] else 10**9
        super().open(rank, group, buffers)

    def wait(self, handle, timeout_s):
        self._drill[1] -= 1
        super().wait(handle, timeout_s)
        if self._drill[1] < 0:
            raise TransferError("the host link is down")


class Shelf(TransferBackend):
    """One-sided: publish lays weights on a shelf that all ranks of the process reach, for any path."""

    paths = frozenset({Path.PEER, Path.RDMA})
    one_sided = True
    shelf: ClassVar[dict] = {}

    def open(self, rank, group, buffers):
        self.rank, self.group, self.buffers = rank, group, buffers

    def publish(self, entries, version):
        shelf = self.shelf.setdefault(id(self.group.board), {})
        for entry in entries:
            if entry.home_rank == self.rank:
                shelf[entry.layer, entry.expert] = version, copy.deepcopy(list(self.buffers.home(entry.layer, entry.expert)))
        self.version = version
        self.group.barrier()

    def start(self, copies):
        shelf = self.shelf[id(self.group.board)]
        for one in copies:
            version, weights = shelf[one.layer, one.expert]
            if version != self.version:
                raise StaleWeights("the shelf is of another version")
            for into, have in zip(one.dst, weights, strict=True):
                into.copy_(have)

    def wait(self, handle, timeout_s):
        pass

    def close(self):
        self.shelf.pop(id(self.group.board), None)
