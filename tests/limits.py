"""Bounds on memory and time of a block, so that what would fill the machine or hang fails instead."""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

MEGABYTE = 2**20


class TooLong(BaseException):
    """A block that did not end; no `except Exception` of the code under test catches it."""


@contextlib.contextmanager
def limited(megabytes: float = 256, seconds: float = 60) -> Iterator[None]:
    """Runs the block with this much more address space than the process has now, and for this many CPU seconds of it."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    room = pages * resource.getpagesize() + int(megabytes * MEGABYTE)

    def end(*_: object) -> None:
        raise TooLong(f"more than {seconds} s")

    handler = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)
