"""Drills of the conformance suite for transfer backends. A drill runs on every rank and returns error messages.

Every drill uses the case `DRILL` with two or more ranks. Ranks after the first two only open and close the backend.
"""

import contextlib
import copy
import dataclasses
import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.distributed.group import Group
from foremoe.testing.transfer_cases import Memory, Op, Round, TransferCase, copy_of, entries_of, run_case
from foremoe.transfer.backends import resolve_backend
from foremoe.transfer.base import TransferBackend

# Rank 0 copies expert 2 and then expert 3 of rank 1, and rank 1 copies expert 0.
DRILL = TransferCase(
    num_ranks=2, home_LE=((0, 0, 1, 1),), num_buffers=2, dtype="bfloat16", sizes=(700, 0, 33),
    rounds=(Round(((Op(7, 0, 2, 0, 0), Op(8, 0, 0, 1, 0)), (Op(9, 0, 3, 0, 1),))),),
)  # fmt: skip
FIRST, SECOND = DRILL.rounds[0].batches
NUM_CYCLES = 12


def on_a_copy(group: Group, fn: Callable[..., Any], backend: TransferBackend | str, *args: Any) -> Any:
    """Calls a drill with this rank's own copy of the backend object."""
    return fn(group, resolve_backend(copy.deepcopy(backend)), *args)


def _start(ops: Sequence[Op], memory: Memory, backend: TransferBackend) -> Any:
    return backend.start([end for op in ops if (end := copy_of(DRILL, op, memory, backend)) is not None])


def _publish(backend: TransferBackend, ops: Sequence[Op], memory: Memory) -> None:
    if backend.one_sided:
        backend.publish(entries_of(memory.case, ops), memory.version)


def _check(memory: Memory, ops: Sequence[Op]) -> list[str]:
    """Returns the errors in the buffers of copies, or elsewhere in memory."""
    for op in ops:
        if op.rank == memory.rank:
            memory.expect(("slot", op.rank, op.buffer), ("home", op.layer, op.expert), memory.version)
    wrong = memory.wrong_anywhere()
    return [f"rank {memory.rank}: {wrong}"] if wrong else []


@contextlib.contextmanager
def _opened(group: Group, backend: TransferBackend, device: str) -> Iterator[Memory]:
    """Opens the backend over memory of this rank inside the block."""
    memory = Memory(DRILL, group.rank, device)
    backend.open(group.rank, group, memory)
    try:
        yield memory
    finally:
        backend.close()


def slow_peer(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks copies that rank 1 starts later than rank 0."""
    with _opened(group, backend, device) as memory:
        _publish(backend, FIRST, memory)
        if group.rank == 1:
            time.sleep(0.3)
        if group.rank < 2:
            backend.wait(_start(FIRST, memory, backend), timeout_s)
        group.barrier()
    return _check(memory, FIRST)


def early_source(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks that the source of a two-sided copy may reuse its memory after its own wait, before the destination waits."""
    with _opened(group, backend, device) as memory:
        handle = _start(SECOND, memory, backend) if group.rank < 2 else None
        if group.rank == 1:
            backend.wait(handle, timeout_s)
            for tensor in memory.home(0, 3):
                tensor.zero_()
        group.barrier()
        if group.rank == 0:
            backend.wait(handle, timeout_s)
        group.barrier()
    return _check(memory, SECOND) if group.rank == 0 else []


def silent_peer(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks the timeout of a two-sided copy that rank 1 starts only after rank 0 has given up."""
    wrong = []
    with _opened(group, backend, device) as memory:
        if group.rank == 0:
            try:
                backend.wait(_start(SECOND, memory, backend), 0.5)
                wrong.append("rank 0: wait returned, but its peer has not started the copy.")
            except TransferError as error:
                if 1 not in error.ranks or "1" not in str(error):
                    wrong.append(f"rank 0: the error must name rank 1, in text and in `ranks`; it is {error!r} {error.ranks}.")
        group.barrier()
        if group.rank == 1:
            # Rank 1 starts too late. A backend need not detect this.
            with contextlib.suppress(Exception):
                backend.wait(_start(SECOND, memory, backend), 0.5)
        group.barrier()
        late = memory.wrong_anywhere()
        if late and group.rank != 0:
            wrong.append(f"rank {group.rank}: {late}")
        elif late:
            wrong.append(f"rank 0: written to after wait had failed: {late}.")
    backend.close()
    return wrong


def no_help(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks that one-sided pulls of rank 0 succeed while all other ranks wait for its next message."""
    with _opened(group, backend, device) as memory:
        _publish(backend, SECOND, memory)
        if group.rank == 0:
            backend.wait(_start(SECOND, memory, backend), timeout_s)
        group.barrier()
    return _check(memory, SECOND)


def pull_stale(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks one-sided pulls after weights have changed, when only one of two experts has been published again."""
    wrong = []
    with _opened(group, backend, device) as memory:
        _publish(backend, [*FIRST, *SECOND], memory)
        group.barrier()
        memory.change_weights()
        _publish(backend, FIRST, memory)
        if group.rank == 0:
            with contextlib.suppress(StaleWeights):
                backend.wait(_start(SECOND, memory, backend), timeout_s)
                wrong.append("rank 0: a pull of weights that were only published with an older version must raise StaleWeights.")
        group.barrier()
    return wrong


def publish_again(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks that one-sided pulls see the new weights after every publish of a new version."""
    wrong = []
    with _opened(group, backend, device) as memory:
        for _ in range(3):
            _publish(backend, FIRST, memory)
            if group.rank < 2:
                backend.wait(_start(FIRST, memory, backend), timeout_s)
            wrong += _check(memory, FIRST)
            group.barrier()
            memory.change_weights()
    return wrong


def pull_unpublished(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks that a one-sided pull of unpublished weights is an error."""
    wrong = []
    with _opened(group, backend, device) as memory:
        _publish(backend, FIRST, memory)
        if group.rank == 0:
            with contextlib.suppress(Exception):  # any error is accepted
                backend.wait(_start(SECOND, memory, backend), timeout_s)
                wrong.append("rank 0: a pull of weights that were never published must raise an error.")
        group.barrier()
    return wrong


def close_in_flight(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks that a backend can be closed before it is opened, twice, and with copies in flight, and can then be opened again."""
    backend.close()
    wrong = []
    for _ in range(2):
        memory = Memory(DRILL, group.rank, device)
        backend.open(group.rank, group, memory)
        _publish(backend, [*FIRST, *SECOND], memory)
        if group.rank == 0 or (group.rank == 1 and not backend.one_sided):
            _start(SECOND if group.rank == 0 else FIRST, memory, backend)
        group.barrier()
        if group.rank == 0:
            backend.close()
            backend.close()
            before = memory.contents()
        group.barrier()
        if group.rank == 1 and not backend.one_sided:
            # A backend may refuse copies whose other end has given up, but must not write to them.
            with contextlib.suppress(Exception):
                _start(SECOND, memory, backend)
        group.barrier()
        if group.rank == 0 and not torch.equal(memory.contents(), before):
            wrong.append("rank 0: written to after close.")
        backend.close()
        group.barrier()
    return wrong + run_case(group, backend, dataclasses.replace(DRILL, num_ranks=group.size), device, timeout_s)


def cycles(group: Group, backend: TransferBackend, device: str, timeout_s: float) -> list[str]:
    """Checks that opening, copying and closing many times does not leave resources in the process."""
    case = dataclasses.replace(DRILL, num_ranks=group.size)
    wrong = run_case(group, backend, case, device, timeout_s)
    group.barrier()
    before = _holdings()
    group.barrier()
    for _ in range(NUM_CYCLES):
        wrong += run_case(group, backend, case, device, timeout_s)
    until = time.monotonic() + 2.0  # threads of a library may take a moment to end
    while (grown := _grown(before)) and time.monotonic() < until:
        time.sleep(0.05)
    group.barrier()
    return wrong + [f"rank {group.rank}: {text}" for text in grown]


def _grown(before: dict[str, int]) -> list[str]:
    # Growth of less than one per cycle is not a leak, because libraries and other programs create resources as well.
    after = _holdings()
    return [
        f"{NUM_CYCLES} cycles of open and close left {after[what] - num} more {what}."
        for what, num in before.items()
        if after[what] - num >= NUM_CYCLES
    ]


def _holdings() -> dict[str, int]:
    """Returns the numbers of those resources of the process that this system reports."""
    gc.collect()
    folders = {"open files": "/proc/self/fd", "threads": "/proc/self/task", "files in /dev/shm": "/dev/shm"}
    found = {what: len(os.listdir(folder)) for what, folder in folders.items() if os.path.isdir(folder)}
    maps = Path("/proc/self/maps")
    if maps.exists():
        found["mappings of /dev/shm"] = maps.read_text().count("/dev/shm/")
    return found
