"""`Roll`: record of which ranks of a group have arrived, have failed or are alive. It is kept in the ranks' common store."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from torch.distributed.distributed_c10d import PrefixStore

from foremoe.base.errors import TransferError
from foremoe.base.threads import call_in_thread
from foremoe.distributed.store import ANSWER_S, StoreClient, StoreLost, torch_reason

# Letters: G ranks.

T = TypeVar("T")

_LOOK_S = 1.0  # seconds between checks for reports
_ALIVE_S = 2.0  # within this time, every rank that is alive also waits and checks for reports


class Roll:
    """The roll of a group as used by one rank. Only `meet` and `connect` are collective.

    Args:
        client: Client of the store.
        name: Unique name of this group.
        rank: This rank.
        ranks: Global ranks of the group's members.
    """

    def __init__(self, client: StoreClient, name: str, rank: int, ranks: Sequence[int]) -> None:
        self.client, self.name, self.rank, self.ranks, self.size = client, name, rank, ranks, len(ranks)
        self._num_parts = 0

    def ask(self, question: Callable[[Any], T], patience_s: float = ANSWER_S) -> T:
        """Asks this group's part of the store a question, as `StoreClient.ask` does."""
        return self.client.ask(lambda store: question(PrefixStore(self.name, store)), patience_s)

    def meet(self, timeout_s: float) -> Roll:
        """Creates a roll of the same ranks in a new part of the store, once all ranks have arrived. Collective.

        A communicator that uses the new part never waits for a rank that will not arrive.

        Raises:
            TransferError: A rank did not arrive within `timeout_s`, a rank reported a failure, or the store is lost. The error
                names the rank and is reported to the other ranks.
        """
        self._num_parts += 1
        part = Roll(self.client, f"{self.name}/private/{self._num_parts}", self.rank, self.ranks)
        try:
            part.come()
            for left_s in _pauses(timeout_s):
                if part.all_came(left_s):
                    return part
                self.end_if_reported()
            raise self.late(part.missing(), timeout_s)
        except StoreLost as lost:
            raise self.without_store("set up their group", lost) from lost

    def connect(self, make: Callable[[PrefixStore], T], timeout_s: float) -> T:
        """Creates a communicator that finds its peers in a new part of the store, once all ranks have arrived.

        `make` runs in a thread, because torch waits for the store without a timeout.
        """
        part, begin = self.meet(timeout_s), time.monotonic()
        made: Future[T] = call_in_thread(lambda: make(part.store()), "connect")
        until = begin + timeout_s + ANSWER_S
        while not wait([made], _LOOK_S).done:
            self.end_if_reported()
            if time.monotonic() > until:
                raise self.blame("connect", time.monotonic() - begin, TimeoutError("the set-up does not end"))
        try:
            communicator = made.result()
        except RuntimeError as error:  # a rank that arrived has died since
            waited_s = time.monotonic() - begin
            failure = self.blame("connect", waited_s if waited_s >= timeout_s or timed_out(error) else None, error)
            self.report(str(failure))  # connected ranks wait for this one below
            raise failure from error
        # A connected rank may close at once, which gloo would report as a broken connection on ranks that are still connecting.
        self.meet(timeout_s)
        return communicator

    def store(self) -> PrefixStore:
        """Returns the group's part of the store for creating a communicator. torch waits for this store without a timeout."""
        return PrefixStore(self.name, self.client.store)

    def come(self) -> None:
        """Announces that this rank has arrived."""
        self.ask(lambda store: store.set(f"here/{self.rank}", ""))

    def all_came(self, left_s: float = ANSWER_S) -> bool:
        """Returns True if all ranks have arrived."""
        here_G = [f"here/{g}" for g in range(self.size)]
        return bool(self.ask(lambda store: store.check(here_G), max(left_s, ANSWER_S)))

    def missing(self) -> list[int]:
        """Returns the ranks that never arrived or, if there are none, the ranks that arrived and left again."""

        def read(store: Any) -> list[int]:
            absent = [g for g in range(self.size) if not store.check([f"here/{g}"])]
            return [g for g in absent if not store.check([f"left/{g}"])] or absent

        return self.ask(read)

    def leave(self) -> None:
        """Announces that this rank stops waiting. Other ranks must neither continue with it nor blame it for missing ranks."""
        self.ask(lambda store: store.set(f"left/{self.rank}", ""))
        self.ask(lambda store: store.delete_key(f"here/{self.rank}"))

    def late(self, ranks: Sequence[int], timeout_s: float) -> TransferError:
        """Returns and reports the error for late ranks. Without the report, the late ranks would also wait when they arrive."""
        error = silent(ranks, "come to set up the group", timeout_s)
        self.report(str(error))
        return error

    def report(self, message: str) -> None:
        """Reports that this rank ends the step. Never raises."""

        def leave(store: Any) -> None:
            store.set(f"report/{self.rank}", message)
            store.set("reported", "")

        try:
            self.ask(leave)
        except StoreLost:  # no rank could read the report
            return

    def reported(self) -> bool:
        """Returns True if a rank has reported a failure, and False if none has or the store does not answer at once."""
        try:
            return self.ask(lambda store: bool(store.check(["reported"])), _LOOK_S / 2)
        except StoreLost:  # waits will end at their own timeouts
            return False

    def reports(self) -> dict[int, str]:
        """Returns the ranks' reports, by rank.

        Raises:
            StoreLost: The store does not answer.
        """

        def read(store: Any) -> dict[int, str]:
            return {g: store.get(f"report/{g}").decode() for g in range(self.size) if store.check([f"report/{g}"])}

        return self.ask(read)

    def end_if_reported(self) -> None:
        """Raises an error with the reports of ranks if any rank has reported a failure."""
        if self.reported() and (reports := self.reports()):
            raise ended_by(reports)

    def blame(self, verb: str, waited_s: float | None, error: Exception) -> TransferError:
        """Returns the error of a failed exchange. It names the ranks that report a failure or are missing after two seconds.

        `waited_s` is None if the exchange ended before its timeout.
        """
        mute = set(range(self.size)) - {self.rank}
        reported: dict[int, str] = {}
        try:
            self.ask(lambda store: store.set(f"alive/{self.rank}", ""))
            until = time.monotonic() + _ALIVE_S
            while mute and time.monotonic() < until:
                reported = self.reports()
                alive = self.ask(lambda store: [g for g in range(self.size) if store.check([f"alive/{g}"])])
                mute -= {*reported, *alive}
                time.sleep(0.02)
        except StoreLost as lost:
            return self.without_store(verb, lost, torch_reason(error))
        reported.pop(self.rank, None)
        return ended_by(reported) if reported else silent(tuple(sorted(mute)), verb, waited_s, torch_reason(error))

    def without_store(self, verb: str, lost: StoreLost, why: str = "") -> TransferError:
        """Returns the error for a store that does not answer. The error names the store's host."""
        host, words = self.client.host()
        if host is not None:
            words = f"rank {self.ranks.index(host)}, {words}" if host in self.ranks else f"rank {host} of all ranks, {words}"
        cause = f" ({why})" if why else ""
        at_fault = (self.ranks.index(host),) if host in self.ranks else ()
        return TransferError(f"{words} {lost}, and the ranks cannot {verb}{cause}; look at its log and restart them.", at_fault)


def meet_afresh(client: StoreClient, rank: int, ranks: Sequence[int], timeout_s: float) -> Roll:
    """Returns the roll of a new group with a unique name, once all its ranks have arrived. Collective.

    The first rank chooses the name. The name cannot depend on what a process remembers, because a rank may have been replaced or
    may have missed or abandoned an earlier group.

    Raises:
        TransferError: As in `Roll.meet`.
    """
    board = f"foremoe/{','.join(map(str, ranks))}"
    roll = Roll(client, f"{board}/{uuid.uuid4().hex}", rank, ranks)
    try:
        if rank == 0:
            _lead(roll, board, timeout_s)
            return roll
        return _follow(roll, board, timeout_s)
    except StoreLost as lost:
        raise roll.without_store("set up their group", lost) from lost


def _lead(roll: Roll, board: str, timeout_s: float) -> None:
    """Publishes the name until all ranks have arrived."""
    roll.come()
    roll.client.ask(lambda store: store.set(f"{board}/name", roll.name))
    try:
        for left_s in _pauses(timeout_s):
            if roll.all_came(left_s):
                roll.ask(lambda store: store.set("complete", ""))
                return
            roll.end_if_reported()
        missing = roll.missing()
    finally:
        # The name is not deleted, because a rank that is about to read it would have to wait for the next one.
        roll.client.ask(lambda store: store.set(f"{board}/name", ""))
    raise roll.late(missing, timeout_s)


def _follow(roll: Roll, board: str, timeout_s: float) -> Roll:
    """Joins the group under the published name, and joins again if another name replaces it."""

    def read(store: Any) -> str:
        return store.get(f"{board}/name").decode() if store.check([f"{board}/name"]) else ""

    joined = None
    for left_s in _pauses(timeout_s):
        name = roll.client.ask(read, max(left_s, ANSWER_S))
        # Checked in this order, because a name is published only after the previous group is complete or abandoned.
        if joined is not None:
            if joined.ask(lambda store: store.check(["complete"]), max(left_s, ANSWER_S)):
                return joined
            joined.end_if_reported()
        if name and (joined is None or name != joined.name):
            joined = Roll(roll.client, name, roll.rank, roll.ranks)
            joined.come()
    if joined is None:
        raise silent([0], "come to set up the group", timeout_s)
    missing = joined.missing() or [0]
    joined.leave()
    raise joined.late(missing, timeout_s)


def _pauses(timeout_s: float) -> Iterator[float]:
    """Yields the remaining seconds before every poll, with pauses in between, and once more when no time is left."""
    until, pause_s = time.monotonic() + timeout_s, 0.001
    while (left_s := until - time.monotonic()) > 0:
        yield left_s
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, 0.1)
    yield 0.0


def ended_by(reports: dict[int, str]) -> TransferError:
    """Returns the error for a step that other ranks have ended. It contains their reports."""
    ranks = tuple(sorted(reports))
    why = "; ".join(f"rank {g}: {reports[g]}" for g in ranks)
    return TransferError(f"the step was ended by another rank ({why})", ranks)


def silent(ranks: Sequence[int], verb: str, waited_s: float | None, why: str = "") -> TransferError:
    """Returns the error for missing ranks, if known. `waited_s` is None if a connection broke before the timeout."""
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "a rank"
    lack = f"broke off and did not {verb}" if waited_s is None else f"did not {verb} within {waited_s:.1f} s"
    lack += f" ({why})" if why else ""
    return TransferError(f"{who} {lack}; look at its log and restart the step.", tuple(ranks))


def timed_out(error: Exception) -> bool:
    """Returns True if torch reports a timeout. torch counts whole milliseconds, so its timeouts may end slightly early."""
    return re.search("tim(ed |e)out", str(error), re.IGNORECASE) is not None
