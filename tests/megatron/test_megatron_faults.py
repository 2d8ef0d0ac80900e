"""What fails is repaired, or ends the step on every rank: nobody hangs, and nothing wrong is computed."""

import contextlib
import logging
import os
import sys
import time
from dataclasses import dataclass
from unittest.mock import patch

import compare
import program_arms as arms
import pytest
from layouts import Case
from program import Layout, Program

from foremoe.base.errors import InputError, TransferError
from foremoe.integrations.megatron import attach
from foremoe.levels import PathSolver
from foremoe.plan.transfers import Link
from foremoe.planner.planner import Planner
from foremoe.testing.ranks import RankDied, run_processes
from foremoe.transfer.collective import Collective
from foremoe.transfer.pinned_host import PinnedHost

PLAIN = Case(2, Layout())


# Before a step: all ranks say no together, and the next stage runs.


def refused_then_run(group, case, fault):
    """What this rank is told when rank 1 has the fault, and the drift of a stage after that."""
    program = Program(case.layout)
    topk_MTLK = program.routing(0)
    work = [x.numpy() for x in topk_MTLK]
    here = group.rank == 1
    with arms.attached(program, case) as moe:
        said = ""
        try:
            if fault == "planner" and here:
                with patch.object(Planner, "plan", side_effect=ZeroDivisionError("no ranks left")):
                    moe.stage(work).__enter__()
            elif fault == "experts" and here:
                moe.stage([x + 7 for x in work]).__enter__()
            elif fault == "shape" and here:
                moe.stage([x[:, :, 0] for x in work]).__enter__()
            elif fault == "micro-steps" and here:
                moe.stage(work[1:]).__enter__()
            elif fault == "schedule":
                moe.stage(moe.plan(work, "recompute"), "update" if here else "recompute").__enter__()
            else:
                moe.stage(work).__enter__()
        except InputError as error:
            said = str(error)
        program.zero()
        with moe.stage(work):
            program.forward_backward(0, topk_MTLK)
        return said, moe.metrics()["drift"]


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("planner", "rank 1 could not plan its layers (ZeroDivisionError: no ranks left)"),
        ("experts", "rank 1: routing holds experts"),
        ("shape", "rank 1: routing must be whole numbers [tokens, layers, top-k]"),
        ("micro-steps", "counts of different sizes"),
        ("schedule", "rank 1: the plan's schedule"),
    ],
)
def test_a_fault_of_one_rank_before_the_step_is_told_on_all(pool, fault, sentence):
    for said, drift in pool.run(refused_then_run, PLAIN, fault, num_ranks=2):
        assert sentence in said and said.count(". ") == 0
        assert drift == 0


# In a step.


def ended_by_rank_1(group, case, fault):
    """Rank 1 fails in the middle of a stage, and its process ends, as an exception ends a training run. Megatron's own passes on
    other ranks wait for it no longer than that. What these see, and what rank 1 left word of."""
    options = {} if fault == "loss" else {"planner": Planner(path=ByHost()), "backends": (FlakyHost(4, 1), Collective())}
    program = Program(case.layout)
    topk_MTLK = program.routing(0)
    work = [x.numpy() for x in topk_MTLK]
    mean, calls = program.loss, []

    def loss(value):
        calls.append(value)
        if fault == "loss" and group.rank == 1 and len(calls) == 2:
            raise ArithmeticError("the loss is not a number")
        return mean(value)

    program.loss = loss
    with arms.attached(program, case, **options) as moe:
        try:
            with moe.stage(work):
                program.forward_backward(0, topk_MTLK)
        except Exception as error:
            if group.rank == 1:
                os._exit(3)
            told = moe.group._roll.reports()[1]
            with pytest.raises(InputError, match="an earlier stage failed"):
                moe.stage(work).__enter__()
            moe.detach()
            return f"{type(error).__name__}: {error}", told
    return None


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("loss", "ArithmeticError: the loss is not a number"),
        # Its forward has run on the replica, so the row cannot go home any more.
        ("pull", "for the backward of micro-step 1 are missing on rank 1"),
    ],
)
def test_an_exception_in_a_pass_ends_the_step_on_all_ranks(fault, cause):
    begin = time.monotonic()
    case = Case(2, Layout(), 1)
    alive, ended = run_processes(ended_by_rank_1, 2, case, fault, timeout_s=30.0, errors=True)
    assert time.monotonic() - begin < 900  # a process group alone would wait for half an hour
    assert isinstance(ended, RankDied)
    error, told = alive
    assert error and cause in told


def raises_and_lives(group, case):
    """The last rank raises in a pass and its process lives on, all its connections open. What a rank is told that sits in a
    collective of Megatron's dispatcher or waits for another pipeline stage, and what its log says."""
    program = Program(case.layout)
    topk_MTLK = program.routing(0)
    work = [x.numpy() for x in topk_MTLK]
    if group.rank == group.size - 1:
        program.loss = raises
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("foremoe").addHandler(handler)
    begin = time.monotonic()
    with arms.attached(program, case, group_timeout_s=600.0) as moe:
        try:
            with moe.stage(work):
                program.forward_backward(0, topk_MTLK)
        except Exception as error:
            ranks = getattr(error, "ranks", None)
            return type(error).__name__, str(error), ranks, type(error.__cause__).__name__, lines, time.monotonic() - begin
    return None


def raises(_):
    raise ArithmeticError("the loss is not a number")


@pytest.mark.parametrize("case", [PLAIN, Case(2, Layout(dispatcher="deepep")), Case(4, Layout(pp=2, num_layers=2))], ids=str)
def test_a_rank_that_fails_and_lives_holds_nobody(case):
    """Nobody of foremoe looks there: the process group of Megatron's own collective would wait for half an hour."""
    *others, own = run_processes(raises_and_lives, case.num_ranks, case, timeout_s=900.0, limit_s=300.0, errors=True)
    last = case.num_ranks - 1
    assert own[0] == "ArithmeticError"
    for kind, text, ranks, torchs, lines, _ in others:
        assert kind == "TransferError" and f"rank {last}: ArithmeticError: the loss is not a number" in text, text
        assert ranks == (last,)
        assert torchs.endswith("Error") and torchs != "TransferError"
        assert f"rank {last} has ended the step: ArithmeticError: the loss is not a number" in lines, lines


def fails_in_set_up(group, case, error):
    """What the ranks are told when attaching fails on rank 1, not by an `InputError`; nobody but `attach` can tell rank 0."""
    program = Program(case.layout)
    fault = patch.object(sys.modules[attach.__module__], "find_layers", side_effect=error("no more"))
    try:
        with fault if group.rank == 1 else contextlib.nullcontext():
            attach(program.chunks, group_timeout_s=60.0)
    except BaseException as found:
        return type(found).__name__, str(found)


@pytest.mark.parametrize("error", [MemoryError, SystemExit])
def test_whatever_ends_a_rank_in_set_up_ends_all(error):
    (other, text), (own, _) = run_processes(fails_in_set_up, 2, PLAIN, error, timeout_s=60.0)
    assert own == error.__name__
    assert other == "TransferError" and f"rank 1: {error.__name__}: no more" in text, text


def groups_patience(group, case):
    moe = attach(Program(case.layout).chunks, timeout_s=5.0, group_timeout_s=7.0)
    found = moe.group.timeout_s
    moe.detach()
    return found


def test_the_groups_patience_is_an_option():
    assert run_processes(groups_patience, 2, PLAIN, timeout_s=60.0) == [7.0] * 2


# Copies.


@dataclass(frozen=True)
class ByHost(PathSolver):
    """All weights from the host store."""

    def solve(self, problem, transfers):
        return transfers.replace(link_C=transfers.link_C * 0 + Link.HOST, src_C=transfers.src_C * 0 - 1)


class FlakyHost(PinnedHost):
    """On rank 1, pulls from the n-th on fail while they are waited for; `failing` of them."""

    def __init__(self, pulls, failing):
        super().__init__()
        self.pulls, self.failing = pulls, failing

    def open(self, rank, group, buffers):
        self.mine = rank == 1
        super().open(rank, group, buffers)

    def wait(self, handle, timeout_s):
        super().wait(handle, timeout_s)
        self.pulls -= self.mine
        if -self.failing <= self.pulls < 0:
            raise TransferError("the host link is down")


def by_host():
    return {"planner": Planner(path=ByHost()), "backends": ("pinned_host", "collective")}


def host_down():
    return {"planner": Planner(path=ByHost()), "backends": (FlakyHost(0, 10**9), Collective())}


LAYOUTS = (
    PLAIN,
    Case(4, Layout(ep=4, recompute="full"), 1, nodes=2),
    Case(4, Layout(pp=2, num_layers=4, recompute="selective"), 8),
)


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_weights_from_the_host_gradients_between_ranks(pool, case):
    verdicts = pool.run(compare.one_step, case, "", 0, False, by_host, num_ranks=case.num_ranks)
    assert all(verdict.equal and verdict.served and verdict.fell_back == 0 for verdict in verdicts)
    backends = {copy for verdict in verdicts for copy in verdict.backends}
    assert backends == {("weights", "PinnedHost"), ("gradient", "Collective")}


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_rows_whose_replicas_cannot_be_had_run_at_home_on_all_ranks(pool, case):
    verdicts = pool.run(compare.one_step, case, "", 0, False, host_down, num_ranks=case.num_ranks)
    for verdict in verdicts:
        assert verdict.equal and verdict.drift == 0
        assert verdict.fell_back > 0
    assert not any(verdict.served for verdict in verdicts)
