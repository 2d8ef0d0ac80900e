"""The program that processes of `foremoe.testing.ranks.RankPool` run. They exchange messages with the parent process."""

import contextlib
import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from foremoe.distributed.group import TorchGroup


def serve(rank: int, port: int, connection: Connection) -> None:
    """Runs a rank. The rank calls the functions that it receives, until it receives an empty message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    _allow_many_files()
    store = TCPStore("127.0.0.1", port, is_master=False)
    group: TorchGroup | None = None
    world = 0
    connection.send_bytes(to_bytes((0.0, True, None)))
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, OSError):
            task = b""  # the parent is gone
        if not task:
            return
        try:
            sys.path[:], new_world, num_ranks, timeout_s, call = from_bytes(task)
            if group is None or world != new_world:
                if dist.is_initialized():
                    dist.destroy_process_group()
                world, group = new_world, None
                group = _group(PrefixStore(f"world {world}", store), rank, num_ranks, timeout_s)
            fn, args = from_bytes(call)
            answer = to_bytes((0.0, True, fn(group, *args)))
        except BaseException as error:
            answer = _failure(error)
            if group is not None:
                group.report(f"{type(error).__name__}: {error}")
        connection.send_bytes(answer)


def _allow_many_files() -> None:
    """Raises the limit of open files to the user's maximum, because gloo hangs if it cannot open a socket."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _end_with_parent() -> None:
    """Ends this process when its parent is gone, even in the middle of a call."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _group(store: Store, rank: int, num_ranks: int, timeout_s: float) -> TorchGroup:
    timeout = timedelta(seconds=2 * timeout_s)  # gloo must not give up before the group has named the missing ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    return TorchGroup(timeout_s=timeout_s)


def to_bytes(value: Any) -> bytes:
    # Plain pickle does not support fp8 tensors.
    file = io.BytesIO()
    torch.save(value, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


def _failure(error: BaseException) -> bytes:
    when = time.monotonic()
    error.add_note(f"{''.join(traceback.format_exception(error)).strip()}")
    try:
        answer = to_bytes((when, False, error))
        from_bytes(answer)
        return answer
    except Exception:  # the exception class cannot be pickled, so send its text
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.__notes__ = error.__notes__
        return to_bytes((when, False, plain))
