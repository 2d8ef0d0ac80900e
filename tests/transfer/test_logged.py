"""What an engine cannot do as planned is in the log: once per backend and once per stage, with its reason."""

import logging
import subprocess
import sys
from functools import partial

import pytest
from engine_util import ToyBuffers, a_plan, run_plan
from flaky import Flaky, FlakyHost, Second, Shelf
from test_faults import RANKS, by_host, by_peer

from foremoe.testing.ranks import run_threads
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local


def stages(group, plan, backends, num_stages):
    """The timelines of so many stages with one engine."""
    made = [make() for make in backends]
    engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=made, timeout_s=2.0)
    timelines = [run_plan(engine, plan, group)[1] for _ in range(num_stages)]
    engine.close()
    return timelines


@pytest.fixture
def logged(caplog):
    """Runs stages; returns what was logged meanwhile, as (module, text), and the timelines by rank."""

    def run(plan, *backends, num_stages=1):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="foremoe"):
            timelines = run_threads(stages, RANKS, plan, backends, num_stages)
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        return [(record.name.removeprefix("foremoe.transfer."), record.getMessage()) for record in caplog.records], timelines

    return run


def test_a_stage_without_faults_says_nothing(logged):
    assert logged(by_peer(a_plan(ranks=RANKS)), Local)[0] == []


@pytest.mark.parametrize("others", [(Second,), ()], ids=["another takes over", "none is left"])
def test_a_backend_given_up_for_good_is_told_once_with_its_reason(logged, others):
    """By one rank for all, whether ranks agree on it at a pass boundary or as the stage ends."""
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=5, stage="recompute"))
    said, timelines = logged(plan, partial(Flaky, 1, 2), *others, num_stages=2)
    assert all(line.retired == ("Flaky",) for lines in timelines for line in lines)
    (text,) = [text for name, text in said if name == "backends" and "is retired" in text]
    assert "Flaky" in text and "rank 1: RuntimeError: the link is down" in text
    assert text.endswith("Second sends its copies from now on." if others else "for gradients: updates run at home placement.")
    assert all(line.to_dict()["retired"] == ["Flaky"] for lines in timelines for line in lines)


def test_a_pull_that_takes_another_way_is_told_once_per_stage(logged):
    plan = by_host(a_plan(ranks=RANKS, micro_steps=4))
    said, timelines = logged(plan, partial(FlakyHost, 1, 2), Shelf, Local, num_stages=2)
    failed = [text for name, text in said if name == "backends"]
    assert failed == ["rank 1: FlakyHost failed (TransferError: the host link is down); its copies are pulled over Shelf."] * 2
    totals = [text for name, text in said if name == "timeline"]
    for text, timeline in zip(totals, timelines[1], strict=True):  # of the failing rank alone, once per stage
        told = timeline.to_dict()
        assert told["failed_over"] and f"of {told['weight_copies']} weight copies, {told['failed_over']} used" in text


def test_rows_that_run_at_home_are_told_once_per_stage_with_their_number(logged):
    plan = by_host(a_plan(ranks=RANKS, micro_steps=4, stage="recompute"))
    said, timelines = logged(plan, partial(FlakyHost, 1, 2), Local)
    (timeline,) = timelines[0]
    m, layer = timeline.fell_back[0]
    (rows,) = [text for _, text in said if "at home" in text]
    assert rows.startswith(f"{len(timeline.fell_back)} rows ") and rows.endswith(f"micro-step {m}, layer {layer}.")
    assert len([text for _, text in said if "did not arrive" in text]) == 1, "the rank that lacks copies says so, once"
    assert len(timeline.fell_back) > 1


def test_a_program_that_sets_up_no_log_reads_it_on_stderr():
    code = (
        "from foremoe.transfer.timeline import Timeline\n"
        "Timeline(rank=0, begin_s=0.0, wall_s=1.0, fell_back=((2, 1),)).logged()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr.startswith("1 rows ran at home placement")
