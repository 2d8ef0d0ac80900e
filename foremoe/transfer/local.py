"""`Local`: a minimal two-sided backend, which copies between ranks that are threads of one process."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, ThreadGroup
from foremoe.plan.transfers import Link
from foremoe.transfer.base import Buffers, Copy, Tensors, TransferBackend


@dataclass(slots=True, eq=False)
class _Meeting:
    """Copy in flight, with the end that has started so far, and whether both ends have met."""

    first: Copy
    done: bool = False


class _Desk:
    """Meeting point of the two ends of a copy, shared by all ranks. Copies run under its lock, so a withdrawn one never runs."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.meeting_of: dict[int, _Meeting] = {}  # key -> copy whose other end is still missing


class Local(TransferBackend):
    """Copies when the second of the two ends has called `start`.

    This class is the executable specification of a two-sided backend. It is used for tests and simulations on a `ThreadGroup`. It
    serves all links and can therefore replace any other backend.
    """

    links: ClassVar[frozenset[Link]] = frozenset(Link)
    one_sided: ClassVar[bool] = False

    def open(self, rank: int, group: Group, buffers: Buffers) -> None:
        if not isinstance(group, ThreadGroup):
            raise InputError("local links ranks that are threads; give it a ThreadGroup, or use collective for processes.")
        self._require_closed()
        self._desk: _Desk = group.gather(_Desk() if rank == 0 else None)[0]
        self._rank, self._group = rank, group

    def start(self, copies: Sequence[Copy]) -> list[tuple[Copy, _Meeting]]:
        self._opened()
        desk, under_way = self._desk, []
        with desk.changed:
            for copy in copies:
                meeting = desk.meeting_of.pop(copy.key, None)
                if meeting is None:
                    meeting = desk.meeting_of[copy.key] = _Meeting(copy)
                else:
                    _copy(copy, meeting.first)
                    meeting.done = True
                under_way.append((copy, meeting))
            desk.changed.notify_all()
        return under_way

    def wait(self, handle: list[tuple[Copy, _Meeting]], timeout_s: float) -> None:
        self._opened()
        desk = self._desk
        with desk.changed:
            desk.changed.wait_for(lambda: all(meeting.done for _, meeting in handle), timeout_s)
            late = [copy for copy, meeting in handle if not meeting.done]
            for copy in late:
                desk.meeting_of.pop(copy.key, None)
        if late:
            ranks = tuple(sorted({copy.src_rank if copy.dst_rank == self._rank else copy.dst_rank for copy in late}))
            lack = f"did not start its end of {len(late)} of {len(handle)} copies within {timeout_s:g} s"
            raise TransferError(f"rank {', '.join(map(str, ranks))} {lack}; look at its log and restart the step.", ranks)

    def close(self) -> None:
        if self._group is None:
            return
        self._group, meeting_of = None, self._desk.meeting_of
        with self._desk.changed:
            for key, first in [(key, meeting.first) for key, meeting in meeting_of.items()]:
                if self._rank == (first.src_rank if first.src is not None else first.dst_rank):
                    del meeting_of[key]


def _copy(one: Copy, other: Copy) -> None:
    source, target = (one, other) if one.src is not None else (other, one)
    src, dst = source.src, target.dst
    if src is None or dst is None:
        raise TransferError(f"both ends of copy {one.key} claim to be its {'source' if dst is None else 'destination'}.")
    if _layout(src) != _layout(dst):
        layouts = f"{_layout(src)} on rank {one.src_rank} and {_layout(dst)} on rank {one.dst_rank}"
        has = f"expert {one.expert} of layer {one.layer} has tensors {layouts}"
        raise TransferError(f"{has}; an expert must have the same tensors on every rank.")
    with torch.no_grad():
        for to, tensor in zip(dst, src, strict=True):
            to.copy_(tensor)


def _layout(tensors: Tensors) -> list[tuple[int, str]]:
    return [(tensor.numel(), str(tensor.dtype).removeprefix("torch.")) for tensor in tensors]
