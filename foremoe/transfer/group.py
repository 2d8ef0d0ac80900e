"""Group: how the ranks of one EP group talk about a step, in processes (torch.distributed) or in threads of one process.

Weights do not travel here; transfer backends carry them.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from foremoe.errors import InputError, TransferError

# Letters: G ranks.


class Group(abc.ABC):
    """The ranks of one EP group.

    Every method but `report` is collective: all ranks call it, in the same order. None of them hangs: a rank that does not
    answer within `timeout_s`, or that reported a failure, ends the call on the others with a `TransferError` that names it.

    Attributes:
        rank, size: this rank, and how many there are.   timeout_s: seconds to wait for another rank.
    """

    rank: int
    size: int
    timeout_s: float

    @abc.abstractmethod
    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        """Exchanges rows: the first ``num_sent_G[0]`` rows of `sent` go to rank 0, and so on; `received` is filled likewise."""

    @abc.abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, by rank; on the control channel, which stays usable when a backend fails."""

    @abc.abstractmethod
    def report(self, message: str) -> None:
        """Leaves word that this rank ends the step, so that the others can say why; not collective, never raises."""

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back what this object created."""

    def barrier(self) -> None:
        """Returns once all ranks have called it."""
        self.gather(None)


class TorchGroup(Group):
    """Ranks that are processes.

    Args:
        process_group: the EP group; default: all ranks. Any backend (gloo, NCCL).
        timeout_s: seconds to wait for another rank in `gather`. Exchanges of tokens wait as long as `process_group` was made for.

    Control messages use a gloo group of their own: they must get through when NCCL does not.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None, *, timeout_s: float = 30.0) -> None:
        if not dist.is_initialized():
            raise InputError("there is no process group; call torch.distributed.init_process_group first.")
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.rank, self.size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        self.timeout_s = timeout_s
        ranks = dist.get_process_group_ranks(self.process_group)
        self._control = dist.new_group(
            ranks, timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=process_group is not None
        )
        # Reports must not wait for a peer: they go through the store that the process group was made with.
        self._store = PrefixStore(f"foremoe/{self._control.group_name}", dist.distributed_c10d._get_default_store())

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        if sent.element_size() == 1:  # fp8 is unknown to gloo
            received, sent = received.view(torch.uint8), sent.view(torch.uint8)
        self._answered(
            lambda: dist.all_to_all_single(received, sent, num_received_G, num_sent_G, group=self.process_group),
            "exchange tokens",
        )

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        self._answered(lambda: dist.all_gather_object(values, value, group=self._control), "answer")
        return values

    def report(self, message: str) -> None:
        try:
            self._store.set(f"report/{self.rank}", message)
        except Exception:  # the store went with its host: nobody is left to read it
            return

    def close(self) -> None:
        if self._control is not None:
            dist.destroy_process_group(self._control)
            self._control = None  # type: ignore[assignment]

    def _answered(self, call: Callable[[], None], verb: str) -> None:
        begin = time.monotonic()
        try:
            call()
        except RuntimeError as error:
            waited_s = time.monotonic() - begin
            raise self._blame(verb, waited_s, error) from error

    def _blame(self, verb: str, waited_s: float, error: Exception) -> TransferError:
        """The error of a failed exchange: by the reports of other ranks, or by who does not show up within two seconds."""
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        reported: dict[int, str] = {}
        silent = set(range(self.size)) - {self.rank}
        try:
            self._store.set(f"alive/{self.rank}", "")
            until = time.monotonic() + 2.0
            while silent and time.monotonic() < until:
                for g in sorted(silent):
                    if self._store.check([f"report/{g}"]):
                        reported[g] = self._store.get(f"report/{g}").decode()
                    if g in reported or self._store.check([f"alive/{g}"]):
                        silent.discard(g)
                time.sleep(0.02)
        except Exception:
            return TransferError(f"the ranks cannot {verb} and the store that links them is gone ({first_line}); restart them.")
        if reported:
            ranks = tuple(sorted(reported))
            why = "; ".join(f"rank {g}: {reported[g]}" for g in ranks)
            return TransferError(f"the step was ended by another rank ({why})", ranks)
        ranks = tuple(sorted(silent))
        who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
        return TransferError(
            f"{who} did not {verb} within {waited_s:.1f} s ({first_line}); look at its log and restart the step.", ranks
        )


class ThreadGroup(Group):
    """Ranks that are threads of one process: what tests, simulations and the executable specification run on.

    Made by `ThreadGroup.of`, one object per rank.
    """

    def __init__(self, rank: int, board: _Board, timeout_s: float) -> None:
        self.rank, self.size, self.timeout_s = rank, board.size, timeout_s
        self.board = board

    @staticmethod
    def of(num_ranks: int, *, timeout_s: float = 30.0) -> list[ThreadGroup]:
        """One group of `num_ranks` threads, by rank."""
        board = _Board(num_ranks)
        return [ThreadGroup(rank, board, timeout_s) for rank in range(num_ranks)]

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        parts_GG = self._exchange(sent.detach().split(num_sent_G))
        with torch.no_grad():
            for part, mine in zip(received.split(num_received_G), (parts[self.rank] for parts in parts_GG), strict=True):
                part.copy_(mine)
        self._exchange(None)  # nobody may reuse `sent` before all have read it

    def gather(self, value: Any) -> list[Any]:
        return self._exchange(value)

    def report(self, message: str) -> None:
        self.board.end(self.rank, message)

    def close(self) -> None:
        """Nothing to give back."""

    def _exchange(self, value: Any) -> list[Any]:
        return self.board.exchange(self.rank, value, self.timeout_s)


class _Board:
    """Rendezvous of threads: round by round, everyone leaves a value and takes everyone's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._changed = threading.Condition()
        self._rounds: dict[int, list[Any]] = {}
        self._present: dict[int, set[int]] = {}
        self._taken: dict[int, int] = {}
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
            present = self._present.setdefault(number, set())
            self._rounds.setdefault(number, [None] * self.size)[rank] = value
            present.add(rank)
            self._changed.notify_all()
            complete = self._changed.wait_for(lambda: len(present) == self.size or bool(self._reports), timeout_s)
            if len(present) == self.size:
                values = self._rounds[number]
                self._taken[number] = self._taken.get(number, 0) + 1
                if self._taken[number] == self.size:
                    del self._rounds[number], self._present[number], self._taken[number]
                return values
            if complete:
                ranks = tuple(sorted(self._reports))
                why = "; ".join(f"rank {g}: {self._reports[g]}" for g in ranks)
                raise TransferError(f"the step was ended by another rank ({why})", ranks)
            missing = tuple(sorted(set(range(self.size)) - present))
            who = ", ".join(map(str, missing))
            raise TransferError(f"rank {who} did not answer within {timeout_s:.1f} s; look at its log and restart.", missing)


def as_group(group: Group | dist.ProcessGroup | None, *, timeout_s: float = 30.0) -> Group:
    """`group` itself, or a `TorchGroup` around a process group (None: all ranks)."""
    return group if isinstance(group, Group) else TorchGroup(group, timeout_s=timeout_s)


def gather_equal(group: Group, value: Any, what: str) -> None:
    """Checks that all ranks have the same `value`.

    Raises:
        InputError: they differ; on every rank.
    """
    values = group.gather(value)
    different: Sequence[int] = [g for g, other in enumerate(values) if other != values[0]]
    if different:
        raise InputError(f"rank {different[0]} has another {what} than rank 0; give every rank the same.")
