"""Gradients of replicas come home once each, whatever fails meanwhile."""

import dataclasses
import functools

import numpy as np
import pytest
from engine_util import ToyBuffers, a_plan, check_grads, gradient, run_stage, run_uses
from flaky import Flaky, Second

import foremoe
from foremoe.base.errors import TransferError
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.schedule import Phase
from foremoe.testing.ranks import run_threads
from foremoe.testing.samples import plan_of
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost

RANKS, MICRO_STEPS = 3, 5


@functools.cache
def some_plan() -> Plan:
    """A plan with replicas in every row."""
    return a_plan(ranks=RANKS, micro_steps=MICRO_STEPS)


class Falls:
    """An engine whose `prepare` says of some rows that they lack a replica."""

    def __init__(self, engine: Engine, rows: set[tuple[int, int]]) -> None:
        self.engine, self.rows = engine, rows

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def prepare(self, m: int, layer: int, phase: int) -> bool:
        return self.engine.prepare(m, layer, phase) and (m, layer) not in self.rows


@pytest.mark.parametrize("rows", [{(0, 0)}, {(1, 0), (2, 1)}, {(3, 0), (3, 1)}, {(m, 0) for m in range(4)}], ids=str)
def test_rows_that_fall_back_leave_the_gradients_of_the_others_right(rows: set[tuple[int, int]]) -> None:
    def run(group):
        buffers = ToyBuffers(some_plan(), group.rank)
        engine = Engine(buffers, group=group, backends=(Local(),), debug=True)
        engine.begin(some_plan())
        assert set(run_uses(Falls(engine, rows), some_plan(), group)) == rows
        engine.end()
        engine.close()
        check_grads(some_plan(), buffers, fell_back=rows)

    run_threads(run, RANKS)


@pytest.mark.parametrize("micro_steps", [1, 2, 3])
def test_a_stage_that_ends_early_brings_home_what_there_is(micro_steps: int) -> None:
    def run(group):
        buffers = ToyBuffers(some_plan(), group.rank)
        engine = Engine(buffers, group=group, backends=(Local(),))
        engine.begin(some_plan())
        run_uses(engine, some_plan(), group, stop=2 * some_plan().L * micro_steps)
        engine.end(partial=True)
        engine.close()
        for (layer, e), grads in buffers.grads.items():
            want = 0.0
            for m, g in np.ndindex(micro_steps, some_plan().G):
                for s in np.flatnonzero(some_plan().expert_MLGS[m, layer, g] == e):
                    want += gradient(m, layer, e, g) * (s < some_plan().B or some_plan().quota_MLGS[m, layer, g, s] > 0)
            assert all((grad == want).all() for grad in grads), (layer, e)

    uses = some_plan().header.schedule.uses(some_plan().L)
    assert uses.phase_U[2 * some_plan().L - 1] == Phase.BACKWARD and uses.micro_step_U[2 * some_plan().L] == 1
    run_threads(run, RANKS)


@pytest.mark.parametrize("others", [(), (Second,), (PinnedHost,)], ids=["no other", "a second way", "no other way home"])
def test_a_way_home_that_fails_between_micro_steps_ends_all_or_none(others: tuple[type, ...]) -> None:
    """Never a gradient that is lost in silence."""

    def run(group, starts):
        backends = Flaky(1, starts), *(backend() for backend in others)
        run_stage(group, some_plan(), backends, timeout_s=3.0 if others else 2.0, debug=False)

    ends = set()
    for starts in range(8):
        results = run_threads(lambda group, n=starts: run(group, n), RANKS, errors=True)
        ended = [isinstance(result, TransferError) for result in results]
        assert all(ended) or not any(isinstance(result, BaseException) for result in results), results
        ends.add(all(ended))
    assert ends == {True, False}


def sent_again(rows: list[tuple[int, int, int, int]]) -> Plan:
    """A lawful plan of one layer whose rank 0 holds a replica of experts 2, 2, 3, 2; rows: use, expert, buffer, use before it."""
    seq, model = [2, 2, 3, 2], dataclasses.replace(some_plan().header.model, num_layers=1, num_experts=4)
    work = foremoe.Workload.from_counts(np.full((4, 1, 2, 4), 20), num_topk=1, stage="update")
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=2)
    problem = foremoe.Problem.of(work, cluster, model=model, redundant=1, slot_depth=2)
    expert_NGS, quota_NGS = problem.static().expert_NGS.copy(), problem.static().quotas_NGS.copy()
    for m, e in enumerate(seq):
        expert_NGS[m, 0, 2], quota_NGS[m, 0, 2] = e, 10
        quota_NGS[m, 1, e - 2] -= 10
    plan = plan_of(problem, foremoe.Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS))
    need, expert, buffer, after = (np.array(column) for column in zip(*rows, strict=True))
    uses, zero = plan.header.schedule.uses(1), np.zeros(len(rows))
    transfers = TransferList(
        micro_step_C=uses.micro_step_U[need], layer_C=zero, phase_C=uses.phase_U[need], expert_C=expert, src_C=zero + 1,
        dst_C=zero, slot_C=zero + 2, link_C=zero + int(Link.PEER), buffer_C=buffer, need_C=need, after_C=after,
    )  # fmt: skip
    return dataclasses.replace(plan, transfers=transfers)


@pytest.mark.parametrize("again", [(2, 2, 1, -1), (2, 2, 0, 1)], ids=["into a second buffer", "into its own"])
def test_an_expert_that_is_sent_although_it_is_there(again: tuple[int, int, int, int]) -> None:
    """Uses 0 to 7 are forward and backward of four micro-steps; expert 3 comes over the first buffer, or into the other."""
    plan = sent_again([(0, 2, 0, -1), again, (4, 3, 1 - again[2], 1 if again[2] else -1)])
    assert plan.violations() == []

    assert [fell_back for fell_back, _ in run_threads(lambda group: run_stage(group, plan, (Local(),)), 2)] == [[]] * 2
