"""Waits end: a rank that will not come to a set-up is named, and whatever ends one rank's planning ends it on all at once."""

from __future__ import annotations

import os
import re
import signal
import time
from threading import Event
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_shared_planning import a_task, counts

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed import planning
from foremoe.distributed.group import TorchGroup, reporting
from foremoe.distributed.planning import plan_together
from foremoe.distributed.private import private_group
from foremoe.distributed.watch import end_waits
from foremoe.integrations.compiling import compile_in_turn
from foremoe.planner.planner import Planner
from foremoe.testing.ranks import RankDied, get_pool, run_processes

LIMIT_S = 2.0  # what the drills give a rank; all others are generous, for busy machines


def dies_in_set_up(group: TorchGroup, what: str) -> tuple[str, tuple[int, ...]]:
    """Rank 1 dies where the others make a group of their own."""
    group.barrier()
    if group.rank == 1:
        os._exit(3)
    group.timeout_s = LIMIT_S
    with pytest.raises(TransferError) as caught:
        if what == "group":
            TorchGroup(group.process_group, timeout_s=LIMIT_S)
        elif what == "private group":
            private_group(group, torch.device("cpu"))
        else:
            compile_in_turn(group.process_group, group_timeout_s=LIMIT_S, compile_limit_s=600.0)
    return str(caught.value), caught.value.ranks


@pytest.mark.parametrize(("what", "num_ranks"), [("group", 3), ("private group", 2), ("compilation", 2)])
def test_a_rank_that_dies_in_set_up_is_named(what: str, num_ranks: int) -> None:
    first, died, *others = run_processes(dies_in_set_up, num_ranks, what, errors=True, timeout_s=60.0)
    assert isinstance(died, RankDied)
    for text, ranks in (first, *others):
        assert "rank 1 did not come to set up the group within 2.0 s" in text, text
        assert "\n" not in text and ranks[0] in (0, 1, 2)


def dies_in_exchange(group: TorchGroup, verb: str) -> str:
    """Rank 1 is killed where the others wait for it with a limit that nobody would wait for."""
    own, ones = TorchGroup(group.process_group, timeout_s=600.0), [1] * group.size
    own.barrier()
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransferError) as caught:
        if verb == "answer":
            own.gather("here")
        else:
            own.all_to_all(torch.zeros(own.size), torch.ones(own.size), ones, ones)
    return str(caught.value)


@pytest.mark.parametrize(("verb", "num_ranks"), [("answer", 3), ("exchange tokens", 2)])
def test_a_rank_that_is_killed_broke_off(verb: str, num_ranks: int) -> None:
    """No limit has passed, so the error speaks of none."""
    first, died, *others = run_processes(dies_in_exchange, num_ranks, verb, errors=True, limit_s=200.0)
    assert isinstance(died, RankDied)
    for text in (first, *others):
        assert re.match(rf"rank [0-2, ]*\b1\b[0-2, ]* broke off and did not {verb} \(", text) and " within " not in text, text


def ends_before_set_up(group: TorchGroup) -> str:
    """Rank 1 fails before the others' second group; they have a limit that nobody would wait for."""
    group.timeout_s = 600.0
    if group.rank == 1:
        group.report("ValueError: no more slots")
        return ""
    with pytest.raises(TransferError) as caught:
        private_group(group, torch.device("cpu"))
    return str(caught.value)


def test_a_report_ends_a_set_up_at_once() -> None:
    text, _ = run_processes(ends_before_set_up, 2, limit_s=200.0)
    assert "rank 1: ValueError: no more slots" in text, text


def comes_late(group: TorchGroup) -> list[int]:
    if group.rank == 1:
        time.sleep(1.5)  # longer than the time between two looks for reports
    mine, _ = private_group(group, torch.device("cpu"))
    found = mine.gather(group.rank)
    mine.close()
    return found


def test_a_rank_that_is_late_in_set_up_is_waited_for() -> None:
    assert get_pool(2).run(comes_late, num_ranks=2, timeout_s=60.0) == [[0, 1]] * 2


def planner_raises(group: TorchGroup, error: str, limit_s: float | None) -> tuple[str, str]:
    """Nobody but foremoe reports here: the ranks have a group that the harness knows nothing of."""
    own, task = TorchGroup(group.process_group, timeout_s=30.0), a_task(2, 2, 2)
    load_MLGE, tokens_MG = counts(2, 2, 2, seed=2)
    original = Planner.plan

    def plan(self: Planner, problem: Any, *args: Any, **options: Any) -> Any:
        if group.rank == 1:
            raise {"SystemExit": SystemExit, "KeyboardInterrupt": KeyboardInterrupt}[error]("enough")
        return original(self, problem, *args, **options)

    try:
        with patch.object(Planner, "plan", plan):
            plan_together(own, Planner(), task, load_MLGE[:, :, group.rank], tokens_MG[:, group.rank], plan_limit_s=limit_s)
    except BaseException as found:
        return type(found).__name__, str(found)
    finally:
        own.close()
    return "", ""


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
def test_whatever_ends_a_rank_in_planning_ends_all(error: str) -> None:
    (other, text), (own, _) = get_pool(2).run(planner_raises, error, None, num_ranks=2)
    assert own == error
    assert other == "TransferError" and f"rank 1: {error}: enough" in text, text


@pytest.mark.parametrize("error", ["SystemExit", "KeyboardInterrupt"])
def test_whatever_ends_a_planning_thread_is_one_error_on_all_ranks(error: str) -> None:
    for kind, text in get_pool(2).run(planner_raises, error, 600.0, num_ranks=2):
        assert kind == "InputError"
        assert f"rank 1 could not plan its layers (RuntimeError: the planner raised {error}: enough)" in text, text


def interrupted(group: TorchGroup) -> tuple[str, str, bool]:
    """The main thread of rank 1 is interrupted while its planner runs."""
    own, task = TorchGroup(group.process_group, timeout_s=30.0), a_task(2, 2, 2)
    load_MLGE, tokens_MG = counts(2, 2, 2, seed=2)
    original, began, stopped, wait = Planner.plan, Event(), Event(), planning.wait

    def plan(self: Planner, problem: Any, *args: Any, cancel: Event, **options: Any) -> Any:
        began.set()
        if group.rank == 1 and cancel.wait(60.0):
            stopped.set()
        return original(self, problem, *args, cancel=cancel, **options)

    def interrupt(*args: Any) -> Any:
        if group.rank == 1 and began.wait(60.0):
            raise KeyboardInterrupt
        return wait(*args)

    try:
        with patch.object(Planner, "plan", plan), patch.object(planning, "wait", interrupt):
            plan_together(own, Planner(), task, load_MLGE[:, :, group.rank], tokens_MG[:, group.rank], plan_limit_s=600.0)
    except BaseException as found:
        return type(found).__name__, str(found), stopped.wait(60.0 if group.rank == 1 else 0.0)
    finally:
        own.close()
    return "", "", False


def test_an_interrupt_ends_the_others_and_stops_the_planner() -> None:
    (other, text, _), (own, _, stopped) = get_pool(2).run(interrupted, num_ranks=2)
    assert own == "KeyboardInterrupt" and stopped
    assert other == "TransferError" and "rank 1: KeyboardInterrupt" in text, text


def gives_up_and_closes(group: TorchGroup) -> str:
    """Rank 1 reports and does not come; the others' messages are in flight when they give their group back."""
    own, found = TorchGroup(group.process_group, timeout_s=600.0), ""
    own.barrier()  # a report may end the making of a group, too
    if group.rank == 1:
        own.report("ValueError: no more")
    else:
        with pytest.raises(TransferError) as caught:
            own.gather("here")
        found = str(caught.value)
        del caught  # it holds the group
        own.close()
    group.barrier()  # until then the connections of rank 1 are open
    return found


def test_a_group_that_failed_is_given_back_at_once() -> None:
    """What is in flight does not hold up its end: not for the twenty minutes that gloo would give it."""
    text, _ = run_processes(gives_up_and_closes, 2, timeout_s=150.0, limit_s=200.0)
    assert "rank 1: ValueError: no more" in text, text


def says(group: TorchGroup, error: BaseException) -> str:
    own = TorchGroup(group.process_group, timeout_s=3.0)
    found = ""
    try:
        with reporting(own):
            if group.rank == 1:
                raise error
            own.barrier()
    except TransferError as other:
        found = str(other)
    except BaseException:
        pass
    own.close()
    return found


def test_only_an_input_error_is_not_reported() -> None:
    """All ranks raise it alike and go on; here one alone does, and the other only sees that it left."""
    assert "rank 1: SystemExit: 2" in get_pool(2).run(says, SystemExit(2), num_ranks=2)[0]
    assert "rank 1 broke off and did not answer" in get_pool(2).run(says, InputError("x"), num_ranks=2)[0]


def cuts_with_mail(group: TorchGroup) -> str:
    """What rank 0's wait ends with when its connections are cut while a message of rank 1 lies there that nobody asked for."""
    if group.rank == 1:
        sent = dist.isend(torch.zeros(384), 0, group=group.process_group)
        group.barrier()
        sent.wait()
        return ""
    group.barrier()
    waits = dist.irecv(torch.empty(1), 1, group=group.process_group, tag=3)
    assert end_waits(group.process_group)
    with pytest.raises(RuntimeError) as caught:
        waits.wait()
    return str(caught.value)


def test_connections_are_cut_with_a_message_that_nobody_asked_for() -> None:
    """As between pipeline stages: with a receive of another size under its tag, gloo would end the process."""
    first, last = run_processes(cuts_with_mail, 2, errors=True, timeout_s=60.0)
    assert isinstance(first, str) and first, first
    assert not isinstance(last, RankDied), last
