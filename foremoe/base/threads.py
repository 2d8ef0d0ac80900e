"""Work in a thread that nobody has to wait for."""

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def call_in_thread(work: Callable[[], T], name: str) -> Future[T]:
    """Calls `work` in a thread of its own and returns what will hold its result; a thread that hangs does not hold up an exit."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return made
