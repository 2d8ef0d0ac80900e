"""`Watcher`: detects that a rank has ended the step and ends this process's waits outside foremoe."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo

from foremoe.base.errors import TransferError
from foremoe.distributed.roll import Roll, ended_by
from foremoe.distributed.store import StoreLost

_logger = logging.getLogger(__name__)

_LOOK_S = 1.0  # seconds between checks
_GRACE_S = 2.0  # ranks that learn of it in one of foremoe's own waits keep their connections
_OWN_TAG = 2**31 - 7  # not used otherwise, because a pending message of another size under this tag would end the process


class Watcher:
    """Checks every second, in a separate thread, whether a rank of a group has reported a failure, and logs the report.

    If this rank is `inside` a block when the report is found and still is two seconds later, it may be waiting in a collective
    outside foremoe. The rank's connections are then closed, so that the collective raises an error. The thread ends with the last
    reference to this object.

    Args:
        roll: Roll of the group.
    """

    def __init__(self, roll: Roll) -> None:
        self._roll, self._inside, stop = roll, _Inside(), threading.Event()
        threading.Thread(target=_watch, args=(roll, stop, self._inside), name="watcher", daemon=True).start()
        weakref.finalize(self, stop.set)

    @contextlib.contextmanager
    def inside(self, process_group: dist.ProcessGroup) -> Iterator[None]:
        """Watches a block that may wait in collectives of a process group or of any other group except the group of all ranks.

        If torch raises an exception after another rank's report, it is converted to a `TransferError` with that rank and reason.
        """
        self._inside.enter(process_group)
        try:
            yield
        except RuntimeError as error:
            reports = {} if isinstance(error, TransferError) else heard_by(self._roll)
            if reports:
                raise ended_by(reports) from error  # torch only says that a connection broke
            raise
        finally:
            self._inside.leave()


class _Inside:
    """Process group in whose collectives this rank may be waiting, if any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._group: dist.ProcessGroup | None = None

    def enter(self, group: dist.ProcessGroup) -> None:
        with self._lock:
            self._group = group

    def leave(self) -> None:
        with self._lock:  # later blocks are not interrupted
            self._group = None

    def cut(self) -> bool:
        """Ends this rank's wait. Returns True if the wait was ended or there was none."""
        with self._lock:
            if self._group is None:
                return True
            cut = [end_waits(group) for group in _with_others(self._group)]
            return any(cut)


def heard_by(roll: Roll) -> dict[int, str]:
    """Returns the reports of other ranks, or an empty mapping if the store does not answer at once."""
    try:
        reports = roll.reports() if roll.reported() else {}
    except StoreLost:
        return {}
    reports.pop(roll.rank, None)
    return reports


def _watch(roll: Roll, stop: threading.Event, inside: _Inside) -> None:
    heard: dict[int, str] = {}
    cut_at: float | None = None
    while not stop.wait(_LOOK_S):
        new = {g: why for g, why in heard_by(roll).items() if g not in heard}
        for g, why in new.items():
            _logger.error("rank %d has ended the step: %s", g, why)
        heard |= new
        if heard and cut_at is None:
            cut_at = time.monotonic() + _GRACE_S
        if cut_at is not None and time.monotonic() >= cut_at:
            if not inside.cut():
                _logger.error("the wait of this rank cannot be ended; end the job.")
            return


def _with_others(group: dist.ProcessGroup) -> list[Any]:
    """Returns `group` and torch's other process groups of this rank, where it may wait for a rank that waits for the failed one.

    The group of all ranks is excluded, so that the program can still use it to agree on what to do.
    """
    others = list(dist.distributed_c10d._world.pg_map)  # torch has no public list of them
    whole = dist.distributed_c10d._get_default_group()
    return [group, *(other for other in others if other is not whole and other is not group)]


def end_waits(group: Any) -> bool:
    """Ends this process's waits in a process group, which becomes unusable. Returns False if the backend cannot do this."""
    ended = False
    for device in ("cpu", "cuda"):
        with contextlib.suppress(RuntimeError):  # the device has no backend, or the backend cannot do this
            backend = group._get_backend(torch.device(device))
            backend = getattr(backend, "wrapped_pg", backend)
            if isinstance(backend, ProcessGroupGloo):
                cut_gloo(backend)
            else:
                backend.abort()
            ended = True
    return ended


def cut_gloo(link: Any) -> None:
    """Ends all operations in flight on a gloo group.

    gloo's `abort` does nothing, but gloo closes all connections when its wait for a single message times out.
    """
    for g in range(link.size()):
        with contextlib.suppress(RuntimeError):
            if g != link.rank():
                link.recv([torch.empty(1)], g, _OWN_TAG).wait(timedelta(milliseconds=1))
