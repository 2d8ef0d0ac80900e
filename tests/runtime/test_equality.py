"""Whatever the plan, a stage computes what the dense model computes: outputs, losses and every gradient."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from profiles import examples
from stage_util import DEVICE, Case, case_of, expected_counts, run_case, run_dense, worst

from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.testing.pasteable import describe
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.testing.samples import plan_of, random_placement, random_sources
from foremoe.testing.strategies import plans, problems
from foremoe.transfer.collective import Collective
from foremoe.transfer.cupy_peer import CupyPeer
from foremoe.transfer.pinned_host import PinnedHost

TOLERANCE = 1e-10

# Letters: M micro-steps, L layers, G ranks, E experts, C copies.


SMALL = {"max_ranks": 4, "max_pairs": 6, "max_micro_steps": 4, "max_layers": 4, "max_base": 2, "uneven": True}
# Every layer of every micro-step has replicas, so a shared ring is overwritten all the time.
BUSY = SMALL | {"min_ranks": 2, "min_redundant": 1, "min_micro_steps": 2, "min_layers": 2, "max_pairs": 4}
BUSY |= {"row_kinds": ("flat", "skewed"), "replicas": ("any",), "uneven": False}
DEPTHS = (1, 2, 8)
SCHEDULES = ("forward", "accumulate", "1f1b", "interleaved", "blocks")


@st.composite
def cases(draw: st.DrawFn, **options: float) -> Case:
    """A problem of any kind and a plan of it."""
    problem: Problem = draw(problems(**SMALL))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return _case(draw, problem, draw(plans(problem)), rng, options)


@st.composite
def busy_cases(
    draw: st.DrawFn,
    schedule: str = "",
    slot_depth: int = 0,
    host: bool = False,
    max_ranks: int = 4,
    **options: float,
) -> Case:
    """Many copies; `schedule` of `SCHEDULES` and `slot_depth` of `DEPTHS`, by default any."""
    schedule, slot_depth = schedule or draw(st.sampled_from(SCHEDULES)), slot_depth or draw(st.sampled_from(DEPTHS))
    stage = "recompute" if schedule == "forward" else "update"
    problem: Problem = draw(problems(**(BUSY | {"slot_depth": slot_depth, "stages": (stage,), "max_ranks": max_ranks})))
    problem = dataclasses.replace(problem, schedule=_schedule(draw, schedule, problem))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placement = random_placement(problem, rng, density=1.0, evenness=20.0)
    plan = plan_of(problem, placement).rederived()
    return _case(draw, problem, by_host(plan, rng) if host else plan, rng, options)


def _schedule(draw: st.DrawFn, kind: str, problem: Problem) -> Schedule:
    M, L, reforward = problem.M, problem.L, draw(st.booleans())
    if kind == "forward":
        return Schedule.forward_only(M)
    if kind == "accumulate":
        return Schedule.accumulate(M, reforward)
    if kind == "1f1b":
        return Schedule.one_f_one_b(M, 3, draw(st.integers(0, 1)), reforward)
    cut = draw(st.integers(1, L - 1))
    if kind == "interleaved":
        schedule = Schedule.interleaved(M, 2 if M % 2 == 0 else 1, 2, 0, reforward)
        return dataclasses.replace(schedule, chunk_L=np.repeat([0, 1], [cut, L - cut]))
    return dataclasses.replace(Schedule.one_f_one_b(M, 2, 0, True), block_L=np.repeat([0, 1], [cut, L - cut]))


def _case(draw: st.DrawFn, problem: Problem, plan: Plan, rng: np.random.Generator, options: dict[str, float]) -> Case:
    note(describe(problem))
    mode = draw(st.sampled_from(["reentrant", "non-reentrant"])) if plan.header.schedule.reforward else "kept"
    return case_of(plan, random_sources(problem, rng), rng, mode=mode, **options)


def by_host(plan: Plan, rng: np.random.Generator) -> Plan:
    """The plan with some of its copies coming from the host store."""
    t = plan.transfers
    host_C = rng.random(len(t)) < 0.7
    link_C, src_C = np.where(host_C, Link.HOST, t.link_C), np.where(host_C, -1, t.src_C)
    return dataclasses.replace(plan, transfers=t.replace(link_C=link_C, src_C=src_C))


def assert_equal(case: Case, ranks: list) -> None:
    assert worst(ranks, run_dense(case)) < TOLERANCE
    served_MLGS, drift_MLG = expected_counts(case)
    for g, (_, _, report) in enumerate(ranks):
        assert (report.served_MLS == served_MLGS[:, :, g]).all()
        assert (report.drift_ML == drift_MLG[:, :, g]).all()
        assert not report.fell_back


@given(cases(), st.integers(0, 3))
@examples(20)
def test_every_plan_equals_the_dense_model(case: Case, prefetch: int) -> None:
    assert_equal(case, run_threads(run_case, case.plan.G, case, ("local",), True, None, prefetch))


@pytest.mark.parametrize("slot_depth", DEPTHS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@given(st.data())
@examples(4)
def test_plans_with_many_copies_equal_the_dense_model(schedule: str, slot_depth: int, data: st.DataObject) -> None:
    case = data.draw(busy_cases(schedule=schedule, slot_depth=slot_depth))
    assert_equal(case, run_threads(run_case, case.plan.G, case, ("local",), True, None, data.draw(st.integers(0, 3))))


@given(busy_cases(unplanned=0.05))
@examples(15)
def test_unplanned_rows_are_served_at_home(case: Case) -> None:
    assert_equal(case, run_threads(run_case, case.plan.G, case))


@given(busy_cases(unplanned=0.2, dropped=0.3))
@examples(10)
def test_rows_that_never_came_leave_quota_unused(case: Case) -> None:
    assert_equal(case, run_threads(run_case, case.plan.G, case))


def process_backends(case: Case, rank: int) -> list:
    """Both kinds of paths at once, on a GPU by copy engines; the store has the plan's nodes."""
    peers = [CupyPeer()] if DEVICE.type == "cuda" else []
    return [*peers, Collective(), PinnedHost(tuple(case.plan.header.cluster.node_of_rank_G.tolist()))]


@given(busy_cases(max_ranks=3, host=True, unplanned=0.05))
@examples(8)
def test_on_processes_with_copies_from_peers_and_from_the_host(case: Case) -> None:
    backends = partial(process_backends, case)
    assert_equal(case, get_pool(3).run(run_case, case, backends, num_ranks=case.plan.G))
