"""A small case with replicas on two nodes, and its report."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from report_case import small_problem

import foremoe
from foremoe.report import write_report
from foremoe.simulate import run_stage
from foremoe.simulate.runs import Judge


@pytest.fixture(scope="session")
def case() -> SimpleNamespace:
    """Problem, plan, planner's report and simulation."""
    problem = small_problem()
    plan, report = foremoe.Planner().plan(problem)
    assert plan.num_replicas > 0 and len(plan.transfers) > 0
    return SimpleNamespace(problem=problem, plan=plan, report=report, runs=run_stage(problem, plan))


@pytest.fixture(scope="session")
def page(case: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything on it."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    planners = {name: foremoe.STRATEGIES[name] for name in ("static", "eplb-exact", "foremoe")}
    rows = foremoe.compare(case.problem, planners, judge=Judge.of(case.problem))
    write_report(
        path, case.problem, case.plan, planner_report=case.report, runs=case.runs, strategies=rows,
        advice=foremoe.advise(case.problem), source="counts of a test",
    )  # fmt: skip
    return path
