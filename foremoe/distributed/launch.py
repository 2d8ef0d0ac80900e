"""Starts ranks with torchrun's elastic launcher and converts their failures to errors."""

import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from foremoe.base.errors import TransferError


def start_ranks(rank: Callable[..., Any], args: tuple[Any, ...], num_ranks: int, what: str) -> dict[int, Any]:
    """Calls ``rank(*args)`` in `num_ranks` processes on this machine and returns the results by rank.

    `rank` must be a module-level function. The environment variables that it needs to join a process group are set. If a rank
    fails or dies, the other ranks are stopped, and a `TransferError` names the failed rank and the task `what`.
    """
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=f"foremoe-{what}-{uuid.uuid4().hex[:8]}", rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", local_addr="localhost", max_restarts=0, start_method="spawn", monitor_interval=0.2,
    )  # fmt: skip
    with _quiet(), _single_threaded():
        try:
            results: dict[int, Any] = elastic_launch(config, _recorded)(rank, *args)
        except ChildFailedError as error:
            raise _failure(error, what) from None
        except SignalException:
            raise KeyboardInterrupt from None
    return results


@record
def _recorded(rank: Callable[..., Any], *args: Any) -> Any:
    return rank(*args)


def _failure(error: ChildFailedError, what: str) -> TransferError:
    """Returns the error of the first failed rank, preferring ranks that were killed or failed on their own."""

    def message(failure: Any) -> str:
        return str(failure.message["message"] if isinstance(failure.message, dict) else failure.message)

    def order(item: tuple[int, Any]) -> tuple[bool, bool, int, int]:
        rank, failure = item
        return failure.exitcode >= 0, message(failure).startswith("TransferError"), failure.timestamp, rank

    rank, failure = min(error.failures.items(), key=order)
    first_line = (message(failure).strip().splitlines() or ["no message"])[0].rstrip(".")
    return TransferError(f"rank {rank} failed and the {what} was stopped ({first_line}).", (rank,))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the launcher's own log, whose twenty lines repeat the message of `_failure`."""
    loggers = [logging.getLogger("torch.distributed"), logging.getLogger("torch.multiprocessing")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _single_threaded() -> Iterator[None]:
    """Sets environment variables so that each rank uses one thread and sends messages over the loopback interface."""
    wanted = {"OMP_NUM_THREADS": "1", **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})}
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
