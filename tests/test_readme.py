"""The README's example prints exactly what the README shows, and its solver recipe works."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
TEXT = re.findall(r"```text\n(.*?)```", README, re.DOTALL)


def test_the_example_prints_what_the_readme_shows():
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(PYTHON[0], {})
    assert printed.getvalue() == TEXT[0]


def test_the_solver_recipe_passes_its_conformance_suite():
    pytest.importorskip("hypothesis")
    names: dict = {"__name__": "recipe"}
    exec(PYTHON[1], names)
    exec(PYTHON[2], names)
    suite = names["TestHalveHottest"]()
    tests = [name for name in dir(suite) if name.startswith("test_")]
    assert tests
    planner = names["foremoe"].Planner(rank=(names["HalveHottest"](),))
    work = names["foremoe"].Workload.from_trace(
        names["foremoe"].RoutingTrace.synthetic("gpt-oss-20b", seed=0), num_ranks=8, tokens_per_rank=512
    )
    problem = names["foremoe"].Problem.of(work, names["foremoe"].Cluster.preset("8xh100"), redundant=1)
    plan, report = planner.plan(problem)
    plan.check(problem)
    assert report.rows_kept_at_start < report.rows
