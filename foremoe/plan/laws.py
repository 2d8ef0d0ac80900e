"""Laws of valid plans. Each check is vectorised and returns the violations, with the indices and numbers of each one.

Checks look only at the finished arrays of a plan. Unlike planners and `derive_transfers`, they derive nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, PlanError
from foremoe.plan.transfer_laws import check_transfers
from foremoe.problem.bounds import load_bound, row_bound, settled_load_bound
from foremoe.problem.laws import Violations, check_placement, check_stops
from foremoe.problem.placement import Stop
from foremoe.problem.pricing import price
from foremoe.problem.problem import Problem, layer_number_fault
from foremoe.problem.schedule import Uses

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, B base slots, S slots.

# Searches prove optimality up to a tolerance.
PROVEN = 1.0 + 1e-5
# Sums of floats are compared up to rounding, which differs between machines.
_CLOSE = 1e-9
# Rows for which a solver may have proven more than the bounds of `foremoe.problem.bounds` do.
_SEARCHED = (Stop.OPTIMAL, Stop.LIMIT, Stop.CANCELLED, Stop.FELL_BACK)


class Checked:
    """Cached check result. It is not a field, so copies, files and messages do not contain it."""

    __slots__ = ("_checked",)


def plan_violations(plan: Plan, problem: Problem | None = None) -> list[PlanError]:
    """Lists every law that a plan violates. If `problem` is given, also lists how the plan differs from the problem."""
    found = Violations(plan.L)
    uses = _check_header(found, plan)
    if problem is not None:
        _check_problem(found, plan, problem)
    if found.errors or uses is None:
        return found.errors
    head = plan.header
    within_G = head.cluster.node_of_rank_G if head.replicas == "node" else None
    check_placement(
        found, plan.expert_NGS, plan.quota_NGS, plan.load_MLE.reshape(plan.N, plan.E), plan.home_LE,
        within_G=within_G, keeps_homes=head.keeps_homes,
    )  # fmt: skip
    valid = not found.errors
    _check_numbers(found, plan)
    if head.keeps_homes and not found.errors:
        check_transfers(found, plan, uses)
    if not head.keeps_homes and len(plan.transfers):
        num = len(plan.transfers)
        found.add("residency", f"{num} transfers in a plan that moves homes; such plans are scored, never executed.")
    if problem is not None and valid:
        _check_prices(found, plan, problem)
    return found.errors


def _check_header(found: Violations, plan: Plan) -> Uses | None:
    head = plan.header
    M, L, G, S = plan.expert_MLGS.shape
    if head.cluster.num_ranks != G or head.model.num_experts != plan.E or plan.E % G or plan.E // G + head.redundant != S:
        sizes = f"{head.model.num_experts} experts on {head.cluster.num_ranks} ranks with {head.redundant} redundant slots"
        found.add("header", f"slots [G, S] = [{G}, {S}] do not fit {sizes}.")
        return None
    if head.schedule.M != M or len(head.moe_layer_L) != L:
        sizes = f"{head.schedule.M} x {len(head.moe_layer_L)} rows"
        found.add("header", f"schedule and layer ids are for {sizes}; the plan has {M} x {L}.")
    if head.schedule.trains != (head.key.stage == "update"):
        found.add("header", f"a plan of stage {head.key.stage} has a schedule of the other stage.")
    uses = None
    try:
        uses = head.schedule.uses(L)
    except InputError as error:
        found.add("header", str(error))
    if fault := layer_number_fault(head.moe_layer_L, head.model):
        found.add("header", fault)
    if (np.sort(plan.home_LE, axis=1) != np.arange(plan.E)).any():
        found.add("homes", "home_LE is not a permutation of the home slots.")
    if plan.load_MLE.size and plan.load_MLE.min() < 0:
        found.add("tokens", "load_MLE holds negative counts.")
    return uses


def _check_numbers(found: Violations, plan: Plan) -> None:
    """Checks that costs are finite, that bounds are below the plan's values, and that optimality is only claimed with a proof."""
    for name, part_ML in plan.cost_ML.parts().items():
        odd_N = ~np.isfinite(part_ML.ravel()) | (part_ML.ravel() < -_CLOSE)
        found.mask("cost", odd_N, "N", lambda i, name=name, part_ML=part_ML: f"{name} is {part_ML.ravel()[i[0]]:.6g} s")  # type: ignore[misc]
    bound_N, load_bound_N, stop_N = plan.bound_ML.ravel(), plan.load_bound_ML.ravel(), plan.stop_ML.ravel()
    odd_N = ~(np.isfinite(bound_N) & np.isfinite(load_bound_N)) | (bound_N < -_CLOSE) | (load_bound_N < 0)
    odd_N |= load_bound_N != np.rint(load_bound_N)
    found.mask("bound", odd_N, "N", lambda i: f"{bound_N[i[0]]:.6g}, or {load_bound_N[i[0]]:.6g} pairs, is not a bound")
    check_stops(found, stop_N)
    if plan.header.cost.objective == "balance":
        apart_N = bound_N != load_bound_N
        found.mask(
            "bound", apart_N, "N", lambda i: f"the bound of the load, {load_bound_N[i[0]]:.6g}, is not {bound_N[i[0]]:.6g}"
        )
    if not plan.header.keeps_homes:
        # Bounds hold only for placements that keep homes.
        found.mask("bound", stop_N == Stop.OPTIMAL, "N", lambda i: "a row that moves homes is called optimal")
        return
    load_N, objective_N = plan.load_NG.max(axis=1), plan.objective_ML.ravel()
    found.mask("bound", load_bound_N > load_N, "N", lambda i: f"the load bound exceeds the largest rank load {load_N[i[0]]}")
    # A cost is a sum of floats, so the bound may equal it only up to rounding.
    over_N = bound_N > objective_N * (1 + _CLOSE)
    found.mask("bound", over_N, "N", lambda i: f"the bound exceeds the plan's own {objective_N[i[0]]:.6g}")
    unproven_N = (stop_N == Stop.OPTIMAL) & (objective_N > bound_N * PROVEN)
    found.mask(
        "bound", unproven_N, "N", lambda i: f"called optimal at {objective_N[i[0]]:.6g} with a bound of {bound_N[i[0]]:.6g}"
    )


def _check_prices(found: Violations, plan: Plan, problem: Problem) -> None:
    """Checks that costs and bounds match the problem."""
    cost, load_bound_N, bound_N = price(problem, plan.placement), load_bound(problem), row_bound(problem)
    have, total_N = plan.cost_ML.reshape(plan.N), cost.total_s

    def apart_N(name: str, part_N: Array) -> Array:
        return np.abs(have.parts()[name] - part_N) > _CLOSE * total_N

    for name, part_N in cost.parts().items():
        found.mask(
            "cost", apart_N(name, part_N), "N",
            lambda i, name=name, part_N=part_N: f"{name} is {have.parts()[name][i[0]]:.6g} s; it comes to {part_N[i[0]]:.6g} s",  # type: ignore[misc]
        )  # fmt: skip
    searched_N = np.isin(plan.stop_ML.ravel(), _SEARCHED)
    balance = plan.header.cost.objective == "balance"
    # Rows that no search has proven are settled only as far as their own largest load allows.
    settles = balance and plan.header.keeps_homes
    most_N = settled_load_bound(problem, plan.load_NG.max(axis=1).astype(np.float64)) if settles else load_bound_N
    for mine_ML, theirs_N, up_to_N, may_rise_N in (
        (plan.bound_ML, bound_N, most_N if settles else bound_N, searched_N),
        (plan.load_bound_ML, load_bound_N, most_N, searched_N & balance),
    ):
        mine_N, slack_N = mine_ML.ravel(), _CLOSE * np.abs(theirs_N)
        wrong_N = (mine_N < theirs_N - slack_N) | ((mine_N > up_to_N + slack_N) & ~may_rise_N)
        found.mask(
            "bound", wrong_N, "N",
            lambda i, mine_N=mine_N, theirs_N=theirs_N: f"the bound is {mine_N[i[0]]:.9g}; it comes to {theirs_N[i[0]]:.9g}",  # type: ignore[misc]
        )  # fmt: skip


def _check_problem(found: Violations, plan: Plan, problem: Problem) -> None:
    for name, mine, theirs in (
        ("load_MLE", plan.load_MLE, problem.load_MLE),
        ("home_LE", plan.home_LE, problem.home_LE),
        ("layer numbers", plan.header.moe_layer_L, problem.moe_layer_L),
    ):
        if mine.shape != theirs.shape or (mine != theirs).any():
            found.add("problem", f"the plan's {name} differs from the problem's; it was made for another one.")
    for name in ("model", "redundant", "slot_depth", "replicas", "cost", "trace_id", "dealt"):
        mine, theirs = getattr(plan.header, name), getattr(problem, name)
        if mine != theirs:
            found.add("problem", f"the plan was made for {name} {mine}, the problem has {theirs}.")
    if plan.header.key.stage != problem.stage:
        found.add("problem", f"the plan is for stage {plan.header.key.stage}, the problem for {problem.stage}.")
    for name in ("cluster", "schedule"):
        if not getattr(plan.header, name).same_as(getattr(problem, name)):
            found.add("problem", f"the plan was made for another {name}.")
