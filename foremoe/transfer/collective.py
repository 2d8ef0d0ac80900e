"""`Collective`: sends copies as point-to-point messages of torch.distributed, over gloo on CPUs and over NCCL on GPUs."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, TorchGroup
from foremoe.distributed.private import private_nccl
from foremoe.distributed.roll import timed_out
from foremoe.distributed.store import torch_reason
from foremoe.plan.transfers import Link
from foremoe.transfer.base import Buffers, Copy, TransferBackend

_AT_ONCE = timedelta(milliseconds=1)  # zero would mean no timeout
_LINGER_S = 10.0  # time that `close` gives copies that still run on the GPU


@dataclass(frozen=True, slots=True, eq=False)
class _Messages:
    """Copies in flight, which keep their tensors alive, and torch's work handles: one per message, or one in all on a GPU."""

    copies: tuple[Copy, ...]
    works: tuple[tuple[int, Any], ...]  # (rank at the other end, or -1 for all, work)


class Collective(TransferBackend):
    """Sends every tensor of an expert as one message, in the order of the copies' keys.

    The messages use a separate process group, so that they neither wait for the exchange of tokens nor disturb it. They are sent
    as bytes, so all dtypes are supported, including fp8. Tensors without elements are not sent.

    On a CPU (gloo), `wait` gives up after `timeout_s` and names the missing ranks. gloo then closes all connections of this rank.
    All other handles in flight on this rank fail at once, and other ranks fail or time out when they next need this rank. No
    copies are possible until all ranks have closed and reopened the backend.

    On a GPU (NCCL), one call of `start` issues its messages as one group call on NCCL's own stream, which waits for the current
    stream. `wait` makes the current stream wait and returns at once, so it ignores `timeout_s`. It raises an error for failures
    that NCCL has already reported but does not detect a peer that never starts its end of the copy. In that case, NCCL's watchdog
    ends the process after the group's `timeout_s`. `close` waits a few seconds for running copies and then aborts them.
    """

    links: ClassVar[frozenset[Link]] = frozenset({Link.PEER, Link.RDMA})
    one_sided: ClassVar[bool] = False

    def open(self, rank: int, group: Group, buffers: Buffers) -> None:
        if not isinstance(group, TorchGroup):
            raise InputError("collective needs ranks that are processes, in a TorchGroup; use local for threads.")
        self._require_closed()
        device = buffers.slot(0)[0].device if buffers.num_buffers else torch.device("cpu")
        on_gpu = device.type == "cuda"
        link: Any = private_nccl(group) if on_gpu else group.private_gloo()
        self._link = link
        self._group, self._cut = group, False  # cut: a wait failed here, and gloo closed all connections
        self._last: Any = None  # NCCL's newest work, which finishes last
        self._grouped: bool = self._link.supports_coalescing
        if on_gpu:
            link.allreduce([torch.zeros(1, device=device)]).wait()  # creates the communicator
            self._connect(rank, group.size, device)

    def start(self, copies: Sequence[Copy]) -> _Messages:
        self._opened()
        link = self._link
        ordered = tuple(sorted(copies, key=lambda copy: copy.key))
        messages = [(copy, tensor) for copy in ordered for tensor in copy.src or copy.dst or () if tensor.numel()]
        works: list[tuple[int, Any]] = []
        if not messages:
            return _Messages(ordered, ())
        peer = -1
        try:
            if self._grouped:
                link._start_coalescing()
            for copy, tensor in messages:
                # The key distinguishes copies. The tensors of one copy arrive in the order in which they are sent.
                data = [tensor.detach().view(torch.uint8)]
                peer = copy.src_rank if copy.src is None else copy.dst_rank
                begin = link.recv if copy.src is None else link.send
                works.append((peer, begin(data, peer, copy.key)))
            if self._grouped:
                self._last = link._end_coalescing()
                works = [(-1, self._last)]
        except RuntimeError as error:
            self._drop(works)
            # gloo detects a broken connection only when it starts the next message.
            named = () if self._grouped or self._cut else (peer,)
            raise _failure(named, len(ordered), None, error) from error
        return _Messages(ordered, tuple(works))

    def wait(self, handle: _Messages, timeout_s: float) -> None:
        self._opened()
        until = time.monotonic() + timeout_s
        for i, (peer, work) in enumerate(handle.works):
            try:
                if self._grouped:
                    work.wait()
                else:
                    work.wait(max(timedelta(seconds=until - time.monotonic()), _AT_ONCE))
            except RuntimeError as error:
                is_late = time.monotonic() >= until or timed_out(error)
                self._cut = True
                rest = self._drop(handle.works[i + 1 :])
                # Before the timeout, other works that fail now may belong to ranks that are only late.
                ranks = tuple(sorted({peer, *(rest if is_late else ())} - {-1}))
                raise _failure(ranks, len(handle.copies), timeout_s if is_late else None, error) from error

    def close(self) -> None:
        if self._group is None:
            return
        # Unanswered gloo messages end with the last reference to the group. NCCL's would keep the GPU busy forever.
        if self._grouped:
            until = time.monotonic() + _LINGER_S
            while self._last is not None and not self._last.is_completed() and time.monotonic() < until:
                time.sleep(0.001)
            self._link.abort()
        self._group = self._link = self._last = None

    def _connect(self, rank: int, num_ranks: int, device: torch.device) -> None:
        """Exchanges a byte with every other rank, because NCCL connects ranks at their first message, which delays the others."""
        if num_ranks == 1:
            return
        sent, *received = torch.zeros(num_ranks, 1, dtype=torch.uint8, device=device)
        self._link._start_coalescing()
        for at, peer in enumerate(g for g in range(num_ranks) if g != rank):
            self._link.send([sent], peer, 0)
            self._link.recv([received[at]], peer, 0)
        self._link._end_coalescing().wait()

    def _drop(self, works: Sequence[tuple[int, Any]]) -> list[int]:
        """Ends messages in flight, so that nothing is written later. Returns the ranks whose messages were missing."""
        late = []
        for peer, work in () if self._grouped else works:  # NCCL works cannot be ended individually
            try:
                work.wait(_AT_ONCE)
            except RuntimeError:
                late.append(peer)
        return late


def _failure(ranks: tuple[int, ...], num_copies: int, timeout_s: float | None, error: Exception) -> TransferError:
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    why = torch_reason(error)
    if timeout_s is None:
        return TransferError(f"copies to or from {who} broke off ({why}); look at its log and restart the step.", ranks)
    lack = f"did not do its part within {timeout_s:g} s, in a handle of {num_copies} ({why})"
    return TransferError(f"{who} {lack}; look at its log and restart the step.", ranks)
