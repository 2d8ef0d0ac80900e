"""Kinds of foresight side by side: what planning exposes by hand, and rows that are those of `simulate_systems`."""

from __future__ import annotations

import dataclasses

import pytest

import foremoe
from foremoe.base.errors import InputError
from foremoe.problem.foresight import Rerouted
from foremoe.problem.problem import Problem
from foremoe.simulate import PARTS, System, exposed_planning, simulate_foresight, simulate_systems
from foremoe.synthetic import synthetic_workload

VIEWS = {"exact": "exact", "rerouted=0.3": Rerouted(0.3), "previous": "previous", "step": "step", "none": None}


@pytest.fixture(scope="module")
def problem() -> Problem:
    model = dataclasses.replace(foremoe.Model.preset("gpt-oss-20b"), num_layers=2)
    work = synthetic_workload(model, num_ranks=8, tokens_per_rank=8192, micro_steps=4, regime="mid")
    return foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", num_ranks=8), model=model)


def test_what_planning_exposes_by_hand(problem: Problem) -> None:
    # Four micro-steps: each takes 3 s to plan and 2 s to run, of which two thirds are backward.
    assert exposed_planning("exact", 12.0, 8.0, problem) == pytest.approx(3 + 3 * (3 - 2))
    assert exposed_planning(Rerouted(0.1), 12.0, 16.0, problem) == pytest.approx(3)
    assert exposed_planning("previous", 12.0, 8.0, problem) == pytest.approx(3 * (3 - 2 * 2 / 3))
    assert exposed_planning("previous", 4.0, 8.0, problem) == 0.0
    again = dataclasses.replace(problem, stage="recompute", schedule=foremoe.Schedule.forward_only(4))
    assert exposed_planning("previous", 12.0, 80.0, again) == pytest.approx(3 * 3)


def test_rows_are_those_of_the_simulator(problem: Problem) -> None:
    rows = {row["foresight"]: row for row in simulate_foresight([problem], VIEWS)}
    assert list(rows) == list(VIEWS)
    systems = {"static": System(planner=foremoe.Planner(rank=())), "exact": System(planner=foremoe.Planner())}
    systems["hint"] = System(planner=foremoe.Planner(foresight=Rerouted(0.3)))
    for alone in simulate_systems([problem], systems):
        row = rows[{"static": "none", "exact": "exact", "hint": "rerouted=0.3"}[alone["solver"]]]
        for key in ("skew_mean", "simulated_stage_s", "speedup_vs_static", "bytes_per_layer", *PARTS):
            assert row[key] == pytest.approx(alone[key]), key
    nothing, exact = rows["none"], rows["exact"]
    assert (nothing["net_speedup_vs_static"], nothing["plan_cpu_s"], nothing["copy_bytes"]) == (1.0, 0.0, 0.0)
    assert exact["skew_mean"] < rows["rerouted=0.3"]["skew_mean"] < rows["previous"]["skew_mean"] < nothing["skew_mean"]
    assert exact["copy_bytes"] == pytest.approx(exact["bytes_per_layer"] * problem.N) and exact["plan_cpu_s"] > 0
    total_s = exact["simulated_stage_s"] + exact["plan_exposed_s"]
    assert exact["net_speedup_vs_static"] == pytest.approx(nothing["simulated_stage_s"] / total_s)


def test_static_need_not_be_among_the_views(problem: Problem) -> None:
    alone = simulate_foresight([problem], {"step": "step"})
    assert [row["foresight"] for row in alone] == ["step"] and alone[0]["speedup_vs_static"] > 1.0
    with pytest.raises(InputError, match="another name"):
        simulate_foresight([problem], {"static": "step"})
    with pytest.raises(InputError, match="no EP groups"):
        simulate_foresight([], {"step": "step"})
