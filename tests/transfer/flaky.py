"""Backends that fail on demand, for the fault drills."""

import threading

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.plan.transfers import Link
from foremoe.transfer.base import TransferBackend
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost


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

    def __init__(self, rank, pulls, pulls_failing=10**9, **options):
        super().__init__(**options)
        self._drill, self.pulls_failing = [rank, pulls], pulls_failing

    def open(self, rank, group, buffers):
        self._drill[1] = self._drill[1] if rank == self._drill[0] else 10**9
        super().open(rank, group, buffers)

    def wait(self, handle, timeout_s):
        self._drill[1] -= 1
        super().wait(handle, timeout_s)
        if -self.pulls_failing <= self._drill[1] < 0:
            raise TransferError("the host link is down")


class OverwrittenHost(PinnedHost):
    """One-sided; something else writes over what is stored before each pull of one rank."""

    def __init__(self, rank):
        super().__init__()
        self.culprit = rank

    def start(self, copies):
        self.finish()
        if self._rank == self.culprit and self._store is not None:
            self._store._bytes.fill_(0x7F)
        return super().start(copies)


class Late(Local):
    """Two-sided; reads its source and writes its destination some time after start, as a network does."""

    def __init__(self, delay_s=0.003):
        super().__init__()
        self.delay_s = delay_s

    def start(self, copies):
        done = []
        timer = threading.Timer(self.delay_s, lambda: done.append(super(Late, self).start(copies)))
        timer.start()
        return timer, done

    def wait(self, handle, timeout_s):
        timer, done = handle
        timer.join()
        super().wait(done[0], timeout_s)


class Slow(Late):
    """`Late`, and from the n-th start on one rank's `wait` fails at once, while its copies are still to come."""

    def __init__(self, rank, starts, delay_s=0.05):
        super().__init__(delay_s)
        self.slow_rank, self.starts_left = rank, starts

    def open(self, rank, group, buffers):
        self.mine = rank == self.slow_rank
        super().open(rank, group, buffers)

    def wait(self, handle, timeout_s):
        self.starts_left -= 1
        if self.mine and self.starts_left < 0:
            handle[0].join()  # law: nothing is written after wait has raised
            raise TransferError("the link is slow")
        super().wait(handle, timeout_s)


class Shelf(TransferBackend):
    """One-sided: publish lays weights on a shelf that all ranks of the process reach, for any path."""

    links = frozenset({Link.PEER, Link.RDMA})
    one_sided = True

    def open(self, rank, group, buffers):
        self.rank, self.group, self.buffers, self.version = rank, group, buffers, 0
        self.shelf = group.gather({} if rank == 0 else None)[0]

    def publish(self, entries, version):
        for entry in entries:
            if entry.home_rank == self.rank:
                weights = [x.clone() for x in self.buffers.home(entry.layer, entry.expert)]
                self.shelf[entry.layer, entry.expert] = version, weights
        self.version = version
        self.group.barrier()

    def start(self, copies):
        return copies

    def wait(self, handle, timeout_s):
        for copy in handle:
            version, weights = self.shelf[copy.layer, copy.expert]
            if version != self.version:
                raise StaleWeights("the shelf is of another version")
            for into, tensor in zip(copy.dst, weights, strict=True):
                into.copy_(tensor)

    def close(self):
        self.shelf = None


class Ordered(Local):
    """Two-sided, and as strict about order as NCCL: the copies of a `start` begin when those of all earlier ones on this rank are
    done, so ranks that start them in different orders wait for each other for ever."""

    _lock = threading.Condition()

    def open(self, rank, group, buffers):
        super().open(rank, group, buffers)
        self.queues = group.gather([])

    def start(self, copies):
        batch = {"copies": {one.key: one for one in copies}, "done": set()}
        with self._lock:
            self.queues[self._rank].append(batch)
            self._go_on()
        return batch

    def _go_on(self):
        moved = True
        while moved:
            moved = False
            for queue in self.queues:
                while queue and len(queue[0]["done"]) == len(queue[0]["copies"]):
                    queue.pop(0)
                    moved = True
            heads = [queue[0] if queue else None for queue in self.queues]
            for rank, head in enumerate(heads):
                for key, one in head["copies"].items() if head is not None else ():
                    other = heads[one.dst_rank]
                    if rank == one.src_rank and key not in head["done"] and other is not None and key in other["copies"]:
                        for into, have in zip(other["copies"][key].dst, one.src, strict=True):
                            into.copy_(have)
                        head["done"].add(key)
                        other["done"].add(key)
                        moved = True
        self._lock.notify_all()

    def wait(self, handle, timeout_s):
        with self._lock:
            if not self._lock.wait_for(lambda: len(handle["done"]) == len(handle["copies"]), timeout_s):
                raise TransferError("copies wait for each other")


class Lazy(Local):
    """Two-sided; nothing moves before one of the ends waits: a source that is not waited for is read when its destination is."""

    _lock = threading.Condition()

    def open(self, rank, group, buffers):
        super().open(rank, group, buffers)
        self.ends = group.gather({})[0]

    def start(self, copies):
        with self._lock:
            for one in copies:
                self.ends.setdefault(one.key, {})["src" if one.src is not None else "dst"] = one
            self._lock.notify_all()
        return [self.ends[one.key] for one in copies]

    def wait(self, handle, timeout_s):
        with self._lock:
            if not self._lock.wait_for(lambda: all(len(ends) >= 2 for ends in handle), timeout_s):
                raise TransferError("the other end did not come")
            for ends in handle:
                if "done" not in ends:
                    ends["done"] = True
                    self.ends.pop(ends["src"].key)
                    for into, have in zip(ends["dst"].dst, ends["src"].src, strict=True):
                        into.copy_(have)
