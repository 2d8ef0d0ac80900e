"""Texts about a plan: lines fit 80 columns, and a row says why it is no better."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

import foremoe
from foremoe.plan.text import STOPS
from foremoe.problem.placement import Stop


@pytest.fixture(scope="module")
def problem() -> foremoe.Problem:
    return problem_of(8)


def problem_of(num_ranks: int) -> foremoe.Problem:
    work = foremoe.synthetic_workload(
        "gpt-oss-20b", num_ranks=num_ranks, tokens_per_rank=1024, micro_steps=2, num_layers=3, seed=1, regime="mid"
    )
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=num_ranks, ranks_per_node=num_ranks // 2)
    return foremoe.Problem.of(work, cluster, redundant=1)


@pytest.fixture(scope="module")
def plan(problem: foremoe.Problem) -> foremoe.Plan:
    return foremoe.Planner().plan(problem)[0]


def stopped(plan: foremoe.Plan, micro_step: int = 0, layer: int = 0) -> str:
    return plan.explain(micro_step, layer).splitlines()[3].removeprefix("stopped: ")


@pytest.mark.parametrize("name", foremoe.STRATEGIES)
def test_a_summary_fits_80_columns(problem, name):
    if name == "exact":  # takes minutes
        problem = problem_of(4)
    if foremoe.STRATEGIES[name].refusal(problem):
        pytest.skip(f"{name} does not plan this")
    plan = foremoe.STRATEGIES[name].plan(problem)[0]
    lines = [*plan.summary().splitlines(), *plan.explain(1, 2).splitlines()[:4]]
    assert max(map(len, lines)) <= 80, lines
    assert re.search(r"^(weights sent|moves homes): ", plan.summary(), re.MULTILINE)


def test_a_row_says_why_it_stopped(problem, plan):
    below = dataclasses.replace(plan, load_bound_ML=np.zeros_like(plan.load_bound_ML))
    for stop, words in STOPS.items():
        assert stopped(dataclasses.replace(below, stop_ML=np.full_like(plan.stop_ML, stop))) == words.format(objective="time")
    done = dataclasses.replace(below, stop_ML=np.full_like(plan.stop_ML, Stop.DONE))
    used = (plan.quota_MLGS[0, 0, :, plan.B :] > 0).sum()
    assert 0 < used < 8
    assert stopped(done) == f"{8 - used} of 8 redundant slots are free; no further copy was found to pay"
    high = dataclasses.replace(plan, load_bound_ML=np.full_like(plan.load_bound_ML, 1e6))
    assert stopped(high) == "no placement with these homes and slots has a lower busiest rank"


def test_a_row_says_what_it_costs(plan):
    line = plan.explain(1, 2).splitlines()[2]
    parts = {name: float(value) for name, value in re.findall(r"([a-z ]+) (\d+)", line.removeprefix("price, us: "))}
    assert sum(parts.values()) == pytest.approx(1e6 * plan.cost_ML.total_s[1, 2], abs=2.0) and len(parts) == 4


def test_a_solver_that_does_not_ask_what_pays_is_not_said_to(problem):
    plan = foremoe.resolve("greedy").plan(problem)[0]
    below = dataclasses.replace(
        plan, load_bound_ML=np.zeros_like(plan.load_bound_ML), stop_ML=np.full_like(plan.stop_ML, Stop.DONE)
    )
    assert stopped(below).endswith(("redundant slots are free", "redundant slots are taken"))


def test_without_slots_there_is_nothing_to_try(problem):
    none = foremoe.Planner().plan(dataclasses.replace(problem, redundant=0))[0]
    above = dataclasses.replace(none, stop_ML=np.zeros_like(none.stop_ML), load_bound_ML=np.zeros_like(none.load_bound_ML))
    assert stopped(above) == "there are no redundant slots (R = 0)"


def test_a_summary_counts_one_gradient_for_every_replica(plan):
    found = re.search(r"^gradients returned: (\d+) \((.*)\)$", plan.summary(), re.MULTILINE)
    assert found is not None and int(found[1]) == plan.num_replicas
    gigabytes = sum(float(part.split()[1]) for part in found[2].split(", "))
    assert gigabytes == pytest.approx(plan.num_replicas * plan.header.model.gradient_bytes / 1e9, abs=0.1)
    forward = dataclasses.replace(problem_of(8), stage="recompute", schedule=foremoe.Schedule.forward_only(2))
    assert "gradients" not in foremoe.Planner().plan(forward)[0].summary()
