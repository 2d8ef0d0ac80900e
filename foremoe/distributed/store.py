"""`StoreClient`: client of the store that links the ranks, with its own connection and thread, so that every query has a timeout.

torch's own clients wait forever if the host is stopped or if its connection was dropped instead of closed.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from foremoe.base.errors import first_line

T = TypeVar("T")

ANSWER_S = 4.0  # timeout of a query; a working store answers within milliseconds


class StoreLost(Exception):
    """Raised if the store does not answer or no longer exists. The message is a predicate whose subject is the store's host."""


class StoreClient:
    """Client of a store. `client_of` creates one per store and process. The client's thread ends with the last reference to it.

    Attributes:
        store: torch's own connection, for creating communicators.
    """

    def __init__(self, store: Any) -> None:
        self.store = store
        self._calls: SimpleQueue[_Call | None] = SimpleQueue()
        self._began: list[float] = []  # time when the thread began its current call
        self._thread = threading.Thread(target=_serve, args=(store, self._calls, self._began), name="store", daemon=True)
        self._thread.start()
        # Also at exit, because a thread that returns from torch while the interpreter ends would abort the process.
        weakref.finalize(self, _end, self._calls, self._thread)

    def ask(self, question: Callable[[Any], T], patience_s: float = ANSWER_S) -> T:
        """Calls `question` with the store in the client's thread and returns the result. `question` must not wait for a rank.

        Args:
            patience_s: Time in seconds within which the store must have answered this call or an earlier one.

        Raises:
            StoreLost: The store did not answer in time, or the connection broke.
        """
        answer: Future[T] = Future()
        self._calls.put((question, answer))
        begin = time.monotonic()
        while not answer.done():
            busy_s = time.monotonic() - max(self._began, default=begin)
            if busy_s >= patience_s or not self._thread.is_alive():
                answer.cancel()
                raise StoreLost("does not answer")
            wait([answer], min(patience_s - busy_s, 1.0))
        try:
            return answer.result()
        except RuntimeError as error:  # raised by torch
            raise StoreLost(f"is gone ({torch_reason(error)})") from error

    def host(self) -> tuple[int | None, str]:
        """Returns the rank of the store's host, or None if it is not known, and a description of the host."""
        store = self.store
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        if not hasattr(store, "port"):
            return None, "the store that links the ranks"
        place = f"store at {store.host}:{store.port}, which links the ranks,"
        if os.environ.get("MASTER_PORT") != str(store.port):
            return None, f"the {place}"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            return None, f"the launcher's {place}"
        return 0, "which hosts the store that links the ranks,"  # as with torch's env://


_Call = tuple[Callable[[Any], Any], Future[Any]]
_clients: weakref.WeakValueDictionary[int, StoreClient] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def client_of(store: Any) -> StoreClient:
    """Returns the client of one of torch's stores. All groups of this process share it."""
    with _lock:
        client = _clients.get(id(store))
        if client is None:
            client = _clients[id(store)] = StoreClient(store)  # the client holds the store, so its id is not reused
        return client


def _serve(store: Any, calls: SimpleQueue[_Call | None], began: list[float]) -> None:
    own: Any = None
    while (call := calls.get()) is not None:
        question, answer = call
        if answer.set_running_or_notify_cancel():
            began.append(time.monotonic())
            try:
                if own is None:
                    own = store.clone() if hasattr(store, "clone") else store  # older versions of torch have no clone()
                answer.set_result(question(own))
            except BaseException as error:
                answer.set_exception(error)
            began.clear()
        del call, question, answer  # these may reference a group


def _end(calls: SimpleQueue[_Call | None], thread: threading.Thread) -> None:
    calls.put(None)
    if thread is not threading.current_thread():
        with contextlib.suppress(RuntimeError):
            thread.join(1.0)


def torch_reason(error: Exception) -> str:
    """Returns torch's message about a failed exchange without the source position and the advice."""
    return re.sub(r"^\[\S*\] ", "", first_line(error)).partition(". ")[0]
