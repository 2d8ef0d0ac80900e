"""`Group`: communication between the ranks of one EP group, which are processes (torch.distributed) or threads of one process.

A group does not transfer weights. Transfer backends do this.
"""

from __future__ import annotations

import abc
import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.messages import MAX_BYTES, decode, encode
from foremoe.distributed.roll import ended_by, meet_afresh, silent, timed_out
from foremoe.distributed.store import client_of
from foremoe.distributed.watch import Watcher, cut_gloo

# Letters: G ranks.

T = TypeVar("T")

_HEAD_BYTES = 256


class Group(abc.ABC):
    """Ranks of one EP group.

    Every method except `report` is collective, so all ranks must call these methods in the same order. Every wait has a timeout.
    If a rank does not answer within `timeout_s` or has reported a failure, the other ranks raise a `TransferError` that names it.

    Attributes:
        rank: Number of this rank, from 0.
        size: Number of ranks.
        timeout_s: Timeout in seconds for an answer from another rank.
    """

    rank: int
    size: int
    timeout_s: float

    @abc.abstractmethod
    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        """Exchanges entries of axis 0. The first ``num_sent_G[0]`` go to rank 0, and the next ``num_sent_G[1]`` to rank 1."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Gathers a value from every rank over the control channel, which remains usable when a transfer backend fails.

        Processes can gather all types that `messages.encode` supports: plain values, lists, tuples, dicts with string keys,
        bytes, and arrays of numbers. Threads get the object itself.

        Raises:
            InputError: The type of the value is not supported by `messages.encode`.
            TransferError: A rank did not answer, or its message cannot be decoded.
        """

    @abc.abstractmethod
    def report(self, message: str) -> None:
        """Reports that this rank ends the step, so that other ranks can name the reason. Not collective. Never raises."""

    @abc.abstractmethod
    def close(self) -> None:
        """Releases all resources of this object."""

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""
        self.gather(None)


class TorchGroup(Group):
    """Group of ranks that are processes.

    Control messages use a separate gloo group because they must arrive even if NCCL fails.

    Args:
        process_group: Process group of the EP group, with any backend (gloo or NCCL). Defaults to all ranks.
        timeout_s: Timeout in seconds for another rank, here and in every exchange. It also limits the time that a rank may
            compute between two exchanges. If tokens are exchanged with NCCL, NCCL's watchdog limits this exchange instead.

    Raises:
        InputError: torch.distributed has no process group.
        TransferError: A rank has died or did not join this group within `timeout_s`.
    """

    _watcher: Watcher | None = None

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 300.0) -> None:
        if not dist.is_initialized():
            raise InputError("there is no process group; call torch.distributed.init_process_group first.")
        self.process_group: Any = process_group or dist.distributed_c10d._get_default_group()
        ranks = dist.get_process_group_ranks(self.process_group)
        self.rank, self.size, self.timeout_s = dist.get_rank(self.process_group), len(ranks), timeout_s
        # Reports must not wait for a peer, so they use the store with which the process group was created.
        self._roll = meet_afresh(client_of(dist.distributed_c10d._get_default_store()), self.rank, ranks, timeout_s)
        self._control: Any = self.private_gloo()
        self._on_gloo = dist.get_backend(self.process_group) == "gloo"

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        if sent.element_size() == 1:  # gloo does not support fp8
            received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        exchange = partial(dist.all_to_all_single, received, sent, num_received_G, num_sent_G, group=self.process_group)
        if self._on_gloo or not sent.is_cuda:
            self._answered(lambda: exchange(async_op=True), "exchange tokens", own=False)
        else:
            exchange()  # only a stream waits for a CUDA collective, not the host, so there is nothing to watch

    def gather(self, value: Any) -> list[Any]:
        try:
            data = encode(value)
        except InputError as error:
            self.report(str(error))  # the others wait for it
            raise
        # Most values fit into the first message, after their length.
        sent = torch.zeros(_HEAD_BYTES, dtype=torch.uint8)
        head = len(data).to_bytes(8, "little") + data[: _HEAD_BYTES - 8]
        sent[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        received = torch.empty(self.size, _HEAD_BYTES, dtype=torch.uint8)
        ones = [1] * self.size
        self._answered(lambda: self._exchange(self._control, received, sent.repeat(self.size, 1), ones, ones), "answer")
        heads = [row.numpy().tobytes() for row in received]
        sizes = [int.from_bytes(head[:8], "little") for head in heads]
        for g, size in enumerate(sizes):  # checked before memory is allocated
            if size > MAX_BYTES:
                lack = f"rank {g} announced a message of {size} bytes; the limit is {MAX_BYTES}"
                raise TransferError(f"{lack}. Look at its log and restart the step.", (g,))
        if max(sizes) > _HEAD_BYTES - 8:
            whole = torch.frombuffer(bytearray(data), dtype=torch.uint8).repeat(self.size)
            received = torch.empty(sum(sizes), dtype=torch.uint8)
            self._answered(lambda: self._exchange(self._control, received, whole, sizes, [len(data)] * self.size), "answer")
            return [decode(memoryview(part.numpy()), g) for g, part in enumerate(received.split(sizes))]
        return [decode(head[8 : 8 + size], g) for g, (head, size) in enumerate(zip(heads, sizes, strict=True))]

    def private_gloo(self) -> ProcessGroupGloo:
        """Creates a new gloo group of the same ranks for private messages. It ends with its last reference. Collective.

        It does not use torch's function for this, which names groups by their ranks and would look for an earlier group's ports.
        """
        limit = timedelta(seconds=self.timeout_s)
        return self._roll.connect(lambda store: ProcessGroupGloo(store, self.rank, self.size, limit), self.timeout_s)

    def private_store(self) -> PrefixStore:
        """Returns a private part of the store that links the ranks, once all ranks have called this method. Collective."""
        return self._roll.meet(self.timeout_s).store()

    def report(self, message: str) -> None:
        self._roll.report(message)

    @contextlib.contextmanager
    def watched(self, process_group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Watches a block that may wait in collectives of `process_group` or this group (see ``Watcher``). Not collective."""
        self._watcher = self._watcher or Watcher(self._roll)
        with self._watcher.inside(process_group or self.process_group):
            yield

    def close(self) -> None:
        # gloo's threads end with the last reference. If that is at interpreter exit, they abort the process.
        self._control = self.process_group = self._watcher = None

    def _exchange(self, link: Any, received: torch.Tensor, sent: torch.Tensor, num_in_G: list[int], num_out_G: list[int]) -> Any:
        options = dist.AllToAllOptions()
        # Longer than our own timeout, because gloo must not give up before the missing ranks are named.
        options.timeout = timedelta(seconds=2 * self.timeout_s)
        return link.alltoall_base(received, sent, num_in_G, num_out_G, options)

    def _answered(self, start: Callable[[], Any], verb: str, own: bool = True) -> None:
        """Waits for an exchange, on the control link if `own`. Checks every second whether another rank reported a failure."""
        begin, reported = time.monotonic(), False
        try:
            work = start()
            while True:
                left_s = begin + self.timeout_s - time.monotonic()
                try:
                    work.wait(timedelta(seconds=max(min(left_s, 1.0), 0.001)))
                    return
                except RuntimeError:
                    if work.is_completed():
                        work.wait()  # it may have finished just after the timeout, and a failed exchange raises again
                        return
                    if left_s <= 0 or reported:
                        raise
                    reported = self._roll.reported()  # earlier messages may be in flight, so wait one more second
        except RuntimeError as error:
            blamed = self._roll.blame(verb, self._waited_s(begin, error), error)
            if own:  # releasing the link would wait for operations in flight until gloo's timeout
                cut_gloo(self._control)
            raise blamed from error

    def _waited_s(self, begin: float, error: RuntimeError) -> float | None:
        """Returns the seconds since `begin` if a timeout of ours or of the process group has passed, or None otherwise."""
        waited_s = time.monotonic() - begin
        return waited_s if waited_s >= self.timeout_s or timed_out(error) else None


class ThreadGroup(Group):
    """Group of ranks that are threads of one process, for tests, simulations and the executable specification.

    `ThreadGroup.of` creates one object per rank.
    """

    def __init__(self, rank: int, board: _Board, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, board.size, timeout_s
        self.board = board

    @staticmethod
    def of(num_ranks: int, *, timeout_s: float = 30.0) -> list[ThreadGroup]:
        """Creates a group of `num_ranks` threads and returns its members by rank."""
        board = _Board(num_ranks)
        return [ThreadGroup(rank, board, timeout_s) for rank in range(num_ranks)]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        parts_GG = self.gather(sent.detach().split(num_sent_G))
        with torch.no_grad():
            for part, mine in zip(received.split(num_received_G), (parts[self.rank] for parts in parts_GG), strict=True):
                part.copy_(mine)
        self.barrier()  # no rank may reuse `sent` before all have read it

    def gather(self, value: Any) -> list[Any]:
        return self.board.exchange(self.rank, value, self.timeout_s)

    def report(self, message: str) -> None:
        self.board.end(self.rank, message)

    def close(self) -> None:
        """Does nothing."""


class _Board:
    """Rendezvous of threads. In every round, each thread leaves a value and takes the values of all threads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, Any]] = {}  # values by rank, for rounds that some rank has not joined yet
        self._next_G = [0] * size
        self._reports: dict[int, str] = {}

    def end(self, rank: int, message: str) -> None:
        with self._changed:
            self._reports.setdefault(rank, message)
            self._changed.notify_all()

    def exchange(self, rank: int, value: Any, timeout_s: float) -> list[Any]:
        with self._changed:
            number = self._next_G[rank]
            self._next_G[rank] += 1
            values = self._rounds.setdefault(number, {})
            values[rank] = value
            if len(values) == self.size:
                del self._rounds[number]  # waiting ranks hold a reference
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(values) == self.size or bool(self._reports), timeout_s)
            if len(values) == self.size:
                return [values[g] for g in range(self.size)]
            if self._reports:
                raise ended_by(self._reports)
            raise silent([g for g in range(self.size) if g not in values], "answer", timeout_s)


def as_group(group: Group | dist.ProcessGroup | None) -> Group:
    """Returns `group` if it is a `Group`, or else a `TorchGroup` around the process group. None means all ranks."""
    return group if isinstance(group, Group) else TorchGroup(group)


def first_fault(faults: Sequence[str]) -> str:
    """Returns the first fault that a rank has found, as a message for all ranks, or an empty string."""
    return next((f"rank {g}: {fault}" for g, fault in enumerate(faults) if fault), "")


def make_on_all(group: Group, make: Callable[[], T]) -> T:
    """Calls `make` and returns its result. If it raises an `InputError` on one rank, all ranks raise it. Collective."""
    fault: InputError | None = None
    try:
        made = make()
    except InputError as error:
        fault = error
    faults = group.gather("" if fault is None else str(fault))
    if any(faults):
        raise fault or InputError(first_fault(faults))
    return made


@contextlib.contextmanager
def reporting(group: Group) -> Iterator[None]:
    """Reports an exception in the block to other ranks, so that none waits. Ignores `InputError`, which all ranks raise."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        group.report(str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}")
        raise
