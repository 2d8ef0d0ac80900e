"""Every field of a plan has a law: whatever one of them is changed to is refused, or changes nothing."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from field_mutations import FREE, changed, leaves, paths, replaced
from hypothesis import given, note, settings
from hypothesis import strategies as st
from mutations import copying_plans
from reference import dense_reference, run_reference

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, PlanError
from foremoe.plan.header import PlanKey
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.planner.planner import Planner
from foremoe.problem.placement import Stop
from foremoe.problem.problem import Problem
from foremoe.testing.samples import many_row_problem, random_sources
from foremoe.workload.dealing import Dealt

# What the executor shows; whether a search proved a bound or a stop cannot be seen from outside.
SHOWN = ("transfers", "expert_MLGS", "quota_MLGS")
CLAIMED = {("bound_ML",), ("load_bound_ML",), ("stop_ML",)}
PATHS = list(paths(Plan))


def refused(plan: Plan, problem: Problem, path: tuple[str, ...], content: Any) -> Plan | None:
    """The plan with another content of one field, or None where that is refused."""
    try:
        found: Plan = replaced(plan, path, content)
        found.check(problem)
    except (InputError, PlanError):
        return None
    return found


def same_results(problem: Problem, plan: Plan) -> bool:
    load_MLGE = random_sources(problem, np.random.default_rng(7))
    dense = dense_reference(load_MLGE, backward=problem.schedule.trains)
    return max(run_reference(plan, load_MLGE, land=land).difference(dense) for land in ("early", "late")) < 1e-10


def test_these_are_all_fields() -> None:
    plan, _ = Planner().plan(many_row_problem(4))
    assert [path for path, _ in leaves(plan)] == PATHS


# A hundred fields share the profile's examples.
@settings(max_examples=max(5, settings.default.max_examples // 10))
@pytest.mark.parametrize("path", PATHS, ids=".".join)
@given(data=st.data())
def test_a_changed_field_is_refused_or_changes_nothing(path: tuple[str, ...], data: st.DataObject) -> None:
    problem, plan = data.draw(copying_plans(max_micro_steps=3, max_layers=2))
    content = plan
    for name in path:
        content = getattr(content, name)
    other = changed(content, np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))))
    note(f"{'.'.join(path)}: {other!r}")
    found = refused(plan, problem, path, other)
    if found is None or path in FREE or found.same_as(plan):
        return
    if path[0] in SHOWN:
        assert same_results(problem, found)
    elif path in CLAIMED:
        # Only where a search may have proven it; never above what the plan reaches.
        assert np.isin(
            found.stop_ML[found.stop_ML != plan.stop_ML], (Stop.DONE, Stop.LIMIT, Stop.CANCELLED, Stop.FELL_BACK)
        ).all()
        assert (found.bound_ML <= found.objective_ML * (1 + 1e-9)).all()
    else:
        mine, its = content, found
        for name in path:
            its = getattr(its, name)
        assert np.allclose(mine, its, rtol=1e-6, atol=1e-8) if isinstance(mine, np.ndarray) else mine == its


PROBLEM = many_row_problem(24)
# Slow compute without tiles, so that copies pay for rows as small as these.
TIMED = dataclasses.replace(
    PROBLEM, cost=dataclasses.replace(PROBLEM.cost, objective="time"),
    cluster=dataclasses.replace(PROBLEM.cluster, compute_efficiency=0.001, tile_pairs=1),
)  # fmt: skip


def with_header(plan: Plan, **fields: Any) -> Plan:
    return dataclasses.replace(plan, header=dataclasses.replace(plan.header, **fields))


def with_row(plan: Plan, name: str, value: float) -> Plan:
    array_ML = getattr(plan, name).copy()
    array_ML[0, 0] = value
    return dataclasses.replace(plan, **{name: array_ML})


def with_copies(plan: Plan, **columns: Any) -> Plan:
    return dataclasses.replace(plan, transfers=plan.transfers.replace(**columns))


def with_costs(plan: Plan, change: Callable[[Array], Array]) -> Plan:
    return dataclasses.replace(plan, cost_ML=plan.cost_ML.each(change))


def swapped(transfers: TransferList) -> TransferList:
    order_C = np.arange(len(transfers))
    order_C[[0, 1]] = 1, 0
    return transfers.cut(C=order_C)


# Each was valid once; the last column says whether it takes the problem to see it.
HOLES: dict[str, tuple[Any, str]] = {
    "redundant is text": (lambda plan: with_header(plan, redundant="1"), "redundant must be a whole number"),
    "redundant is null": (lambda plan: with_header(plan, redundant=None), "redundant must be a whole number"),
    "replicas switches the node law off": (lambda plan: with_header(plan, replicas="nodes"), "replicas must be"),
    "another stage": (lambda plan: with_header(plan, key=PlanKey(stage="recompute")), "schedule of the other stage"),
    "no such stage": (lambda plan: with_header(plan, key=PlanKey(stage="dream")), "stage must be one of"),
    "a link of code 7": (lambda plan: with_copies(plan, link_C=np.full(len(plan.transfers), 7)), "not a code of Link"),
    "copies out of order": (lambda plan: dataclasses.replace(plan, transfers=swapped(plan.transfers)), r"\[order\]"),
    "costs times 1000": (lambda plan: with_costs(plan, lambda x: x * 1000), r"\[cost\].*comes to"),
    "negative costs": (lambda plan: with_costs(plan, lambda x: -x - 1), r"\[cost\]"),
    "infinite costs": (lambda plan: with_costs(plan, lambda x: x + np.inf), r"\[cost\]"),
    "a stop of code 200": (lambda plan: with_row(plan, "stop_ML", 200), "not a code of Stop"),
    "optimal without a bound": (lambda plan: with_row(with_row(plan, "stop_ML", Stop.OPTIMAL), "bound_ML", 0.0), r"\[bound\]"),
    "a load bound raised to the load": (
        lambda plan: with_row(plan, "load_bound_ML", plan.load_NG[0].max()), r"\[bound\].*it comes to|\[bound\].*is not",
    ),
    "a bound raised to the objective": (lambda plan: with_row(plan, "bound_ML", plan.objective_ML[0, 0]), r"\[bound\]"),
    "another trace": (lambda plan: with_header(plan, trace_id="of another"), "made for trace_id"),
    "dealt otherwise": (
        lambda plan: with_header(plan, dealt=Dealt(tokens_per_rank=1, packer="AsGiven()", seed=0)), "made for dealt",
    ),
    "another objective": (
        lambda plan: with_header(plan, cost=dataclasses.replace(plan.header.cost, overlap=0.25)), "made for cost",
    ),
    "a layer twice": (lambda plan: with_header(plan, moe_layer_L=np.zeros(plan.L)), "layer numbers"),
    "a layer beyond the model": (lambda plan: with_header(plan, moe_layer_L=np.arange(plan.L) + 100), "the last layer of"),
}  # fmt: skip


@pytest.mark.parametrize("hole", HOLES)
def test_what_once_passed_for_valid_is_refused(hole: str) -> None:
    change, sentence = HOLES[hole]
    plan, _ = Planner().plan(TIMED)
    open_N = (plan.stop_ML != Stop.OPTIMAL).ravel() & (plan.load_NG.max(axis=1) > plan.load_bound_ML.ravel())
    assert len(plan.transfers) > 1 and open_N[0] and plan.objective_ML[0, 0] > plan.bound_ML[0, 0] * 1.01
    plan.check(TIMED)
    with pytest.raises((InputError, PlanError), match=sentence):
        change(plan).check(TIMED)


def test_the_fact_that_a_plan_was_checked_stays_in_memory(tmp_path: Any) -> None:
    plan, _ = Planner().plan(PROBLEM)
    assert plan.checked
    assert not dataclasses.replace(plan).checked and not plan.rederived().checked
    plan.save(tmp_path / "plan.safetensors")
    assert Plan.load(tmp_path / "plan.safetensors").checked
    broken = with_row(plan, "bound_ML", 1e9)
    assert not broken.checked
    broken.save(tmp_path / "broken.safetensors")
    with pytest.raises(InputError, match=r"breaks its laws \(\[bound\].*foremoe check"):
        Plan.load(tmp_path / "broken.safetensors")
