"""Identification of the ranks' processes, and a check that they can open each other's GPU memory through CUDA IPC."""

from __future__ import annotations

import functools
import os
import socket
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from foremoe.base.errors import first_line
from foremoe.distributed.group import Group


class Process(NamedTuple):
    """Identity of a rank's process and host. A memory handle can only be opened by other processes of the same host.

    Containers of one machine may have the same host name and the same process numbers, and machines from one image may have the
    same name. `host` therefore contains the kernel's own identifier, and `mark` is unique to this process, except for its forks.
    """

    host: str
    pid: int
    mark: str


def this_process() -> Process:
    """Returns the identity of the calling process."""
    return Process(f"{socket.gethostname()} {_boot_id()}", os.getpid(), _MARK)


def fault_between(cuda: Any, group: Group) -> str:
    """Returns the reason why processes of one host cannot open each other's GPU memory, or an empty string. Collective.

    Every rank offers one allocation and opens the allocations of the other ranks.

    Args:
        cuda: CuPy's module for CUDA runtime calls, or the reason why this rank does not have it.
    """
    base, handle, fault = 0, b"", ""
    try:
        if isinstance(cuda, str):
            fault = cuda
        else:
            base = int(cuda.malloc(_PROBED_BYTES))
            handle = bytes(cuda.ipcGetMemHandle(base))
    except Exception as error:
        fault = first_line(error)
    me = this_process()
    found = group.gather((tuple(me), handle, fault))
    for rank, (process, theirs, missing) in enumerate(found):
        other = Process(*process)
        if missing or fault or other == me or other.host != me.host:
            continue
        try:
            cuda.ipcCloseMemHandle(int(cuda.ipcOpenMemHandle(theirs)))
        except Exception as error:
            fault = f"it cannot open the memory of rank {rank} ({first_line(error)})"
    faults = group.gather(fault)
    if base:
        cuda.free(base)
    return next((f"rank {rank}: {fault}" for rank, fault in enumerate(faults) if fault), "")


_PROBED_BYTES = 512
_MARK = uuid.uuid4().hex


@functools.cache
def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""
