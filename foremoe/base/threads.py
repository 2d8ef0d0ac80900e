"""Calls of functions in daemon threads, whose results can be awaited with a timeout."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Calls `work` in a daemon thread and returns the future of its result. A thread that hangs does not delay process exit."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return made
