"""Examples in docstrings print what they show; they begin where the block of docs/reference.md ends."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from page_blocks import blocks_of

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "foremoe").rglob("*.py")
    if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)
)
# What programs call most; each has an example.
MOST_USED = {
    "synthetic.tokens.synthetic_trace", "synthetic.counts.synthetic_workload", "routing.trace.RoutingTrace",
    "workload.workload.Workload.from_trace", "workload.workload.Workload.from_counts", "workload.skew.skew_statistics",
    "workload.routed_experts.from_routed_experts", "workload.routed_experts.count_workload", "machine.cluster.Cluster.preset",
    "machine.model.Model.preset", "problem.problem.Problem.of", "problem.cost.CostModel", "problem.foresight.Rerouted",
    "planner.planner.Planner", "planner.planner.Planner.plan", "planner.planner.Planner.using",
    "planner.strategies.resolve", "planner.strategies.row_solver", "planner.comparison.compare", "plan.plan.Plan",
    "plan.plan.Plan.explain", "simulate.stage.simulate", "simulate.stage.force_balanced",
}  # fmt: skip


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the set-up of the page defines."""
    found: dict[str, Any] = {}
    ((_, text),) = (block for block in blocks_of("docs/reference.md") if block[0] == "python")
    exec(text, found)
    return found


def test_the_most_used_objects_have_an_example() -> None:
    shown = {
        test.name.removeprefix("foremoe.")
        for module in MODULES
        for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), module)
        if test.examples
    }
    assert shown >= MOST_USED, sorted(MOST_USED - shown)


@pytest.mark.parametrize("module", MODULES)
def test_examples_print_what_they_show(module: str, names: dict[str, Any]) -> None:
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module), module, extraglobs=names):
        told: list[str] = []
        doctest.DocTestRunner(verbose=False).run(test, out=told.append)
        assert not told, "".join(told)
