"""The validity laws of the Plan IR, vectorised: each check returns what is broken, where, with the numbers.

The checks derive nothing the way planners and `derive_transfers` do: they look only at the finished arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, PlanError
from foremoe.plan.landings import Landings
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.laws import SHOWN_PER_LAW, Violations, check_placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Uses
from foremoe.problem.slots import ResidentSlots, SharedSlots, resident_fault

if TYPE_CHECKING:
    from foremoe.plan.plan import Plan

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, B base slots, S slots, C copies, Y of them relays,
# Z landings, U uses, D demands.


def plan_violations(plan: Plan, problem: Problem | None = None) -> list[PlanError]:
    """Every law a plan breaks; with `problem`, also where the plan does not belong to it."""
    found = Violations(plan.L)
    _check_header(found, plan)
    if problem is not None:
        _check_problem(found, plan, problem)
    if found.errors:
        return found.errors
    head = plan.header
    within_G = head.cluster.node_of_rank_G if head.replicas == "node" else None
    check_placement(
        found, plan.expert_NGS, plan.quota_NGS, plan.load_MLE.reshape(plan.N, plan.E), plan.home_LE,
        within_G=within_G, resident=isinstance(head.slots, ResidentSlots), keeps_homes=head.keeps_homes,
    )  # fmt: skip
    load_N = plan.load_NG.max(axis=1)
    below_N = plan.load_bound_ML.ravel() > load_N
    if head.keeps_homes:
        found.mask("bound", below_N, "N", lambda i: f"the load bound exceeds the largest rank load {load_N[i[0]]}")
        # A cost is a sum of floats; the bound may meet it only up to rounding.
        over_N = plan.bound_ML.ravel() > plan.objective_ML.ravel() * (1 + 1e-9)
        found.mask("bound", over_N, "N", lambda i: f"the bound exceeds the plan's own {plan.objective_ML.ravel()[i[0]]:.6g}")
        if not found.errors:
            _check_transfers(found, plan)
    elif len(plan.transfers):
        num = len(plan.transfers)
        found.add("residency", f"{num} transfers in a plan that moves homes; such plans are scored, never executed.")
    return found.errors


def _check_header(found: Violations, plan: Plan) -> None:
    head = plan.header
    M, L, G, S = plan.expert_MLGS.shape
    if head.cluster.num_ranks != G or head.model.num_experts != plan.E or plan.E % G or plan.E // G + head.redundant != S:
        sizes = f"{head.model.num_experts} experts on {head.cluster.num_ranks} ranks with {head.redundant} redundant slots"
        found.add("header", f"slots [G, S] = [{G}, {S}] do not fit {sizes}.")
        return
    if head.schedule.M != M or len(head.moe_layer_L) != L:
        sizes = f"{head.schedule.M} x {len(head.moe_layer_L)} rows"
        found.add("header", f"schedule and layer ids are for {sizes}; the plan has {M} x {L}.")
    try:
        head.schedule.uses(L)
    except InputError as error:
        found.add("header", str(error))
    fault = resident_fault(plan.resident_LGS, head.slots, plan.E, plan.B)
    if fault:
        found.add("header", fault)
    if (np.sort(plan.home_LE, axis=1) != np.arange(plan.E)).any():
        found.add("homes", "home_LE is not a permutation of the home slots.")
    if (np.sort(plan.order_M) != np.arange(M)).any():
        found.add("header", f"order_M {plan.order_M.tolist()[:8]} is not a permutation of the {M} micro-steps.")
    if plan.load_MLE.size and plan.load_MLE.min() < 0:
        found.add("tokens", "load_MLE holds negative counts.")


def _check_problem(found: Violations, plan: Plan, problem: Problem) -> None:
    for name, mine, theirs in (
        ("load_MLE", plan.load_MLE, problem.load_MLE),
        ("home_LE", plan.home_LE, problem.home_LE),
        ("layer numbers", plan.header.moe_layer_L, problem.moe_layer_L),
    ):
        if mine.shape != theirs.shape or (mine != theirs).any():
            found.add("problem", f"the plan's {name} differs from the problem's; it was made for another one.")
    have, want = plan.resident_LGS, problem.resident_LGS
    if (have is None) != (want is None) or (have is not None and want is not None and not np.array_equal(have, want)):
        found.add("problem", "the plan starts from other resident experts than the problem; plan it again from these.")
    for name in ("model", "slots", "redundant", "replicas"):
        mine, theirs = getattr(plan.header, name), getattr(problem, name)
        if mine != theirs:
            found.add("problem", f"the plan was made for {name} {mine}, the problem has {theirs}.")
    if plan.header.key.stage != problem.stage:
        found.add("problem", f"the plan is for stage {plan.header.key.stage}, the problem for {problem.stage}.")
    for name in ("cluster", "schedule"):
        if not getattr(plan.header, name).same_as(getattr(problem, name)):
            found.add("problem", f"the plan was made for another {name}.")


def _check_transfers(found: Violations, plan: Plan) -> None:
    """Law 3: replaying the copies gives every use the weights it needs, and nothing lands on a buffer still in use."""
    uses = plan.header.schedule.uses(plan.L)
    _check_ranges(found, plan)
    if not found.errors:
        _check_times(found, plan, uses)
    if found.errors:
        return
    t = plan.transfers
    placed_C = plan.expert_MLGS[t.micro_step_C, t.layer_C, t.dst_C, t.slot_C] == t.expert_C
    lack = "where the plan does not place expert"
    found.mask("residency", ~placed_C, "C", lambda i: f"fills slot {t.slot_C[i]}, {lack} {t.expert_C[i]}")
    landings = Landings.of(t, plan.resident_LGS, plan.B, plan.header.slots.num_buffers(plan.header.redundant, 1))
    early_Z = _check_buffers(found, plan, landings)
    _check_readers(found, plan, uses, landings, early_Z)


def _check_ranges(found: Violations, plan: Plan) -> None:
    """Every column of a copy names something that exists."""
    t, R = plan.transfers, plan.header.redundant
    inside = (t.layer_C >= 0) & (t.layer_C < plan.L) & (t.expert_C >= 0) & (t.expert_C < plan.E)
    inside &= (t.dst_C >= 0) & (t.dst_C < plan.G) & (t.slot_C >= plan.B) & (t.slot_C < plan.B + R)
    found.mask("residency", ~inside, "C", lambda i: f"layer, expert, rank or slot out of range (slot {t.slot_C[i]})")
    if found.errors:
        return
    per_pool = plan.header.slots.num_buffers(R, 1)
    shared = isinstance(plan.header.slots, SharedSlots)
    low_C = np.zeros(len(t), np.int64) if shared else t.layer_C.astype(np.int64) * per_pool
    found.mask(
        "buffers", (t.buffer_C < low_C) | (t.buffer_C >= low_C + per_pool), "C",
        lambda i: f"buffer {t.buffer_C[i]} is outside this layer's {low_C[i]} to {low_C[i] + per_pool - 1}",
    )  # fmt: skip
    other_rank_C = (t.src_C >= 0) & (t.src_C < plan.G) & (t.src_C != t.dst_C)
    found.mask(
        "residency", ~np.where(t.link_C == Link.HOST, t.src_C == -1, other_rank_C), "C",
        lambda i: f"expert {t.expert_C[i]} comes from {t.src_C[i]}, which is not another rank (nor -1 by host)",
    )  # fmt: skip
    if plan.header.cluster.host_bytes_per_s == 0:
        lost = "comes from a host store, which the cluster has none of"
        found.mask("residency", t.link_C == Link.HOST, "C", lambda i: f"expert {t.expert_C[i]} {lost}")


def _check_times(found: Violations, plan: Plan, uses: Uses) -> None:
    """Every copy is needed by a use of its layer, phase and micro-step, and may land before it."""
    t = plan.transfers
    late_C = t.after_C >= t.need_C
    found.mask("buffers", late_C, "C", lambda i: f"may land after use {t.after_C[i]} but is needed at {t.need_C[i]}")
    at_C = np.minimum(np.searchsorted(uses.use_U, t.need_C), len(uses.use_U) - 1)
    right = (uses.use_U[at_C] == t.need_C) & (uses.layer_U[at_C] == t.layer_C) & (uses.phase_U[at_C] == t.phase_C)
    right &= plan.order_M[uses.micro_step_U[at_C]] == t.micro_step_C
    found.mask("residency", ~right, "C", lambda i: f"need {t.need_C[i]} is not a use of its layer, phase and micro-step")


def _check_buffers(found: Violations, plan: Plan, landings: Landings) -> Array:
    """A copy's own use is over before the next copy lands; bool [Z]: landings that are overwritten too early."""
    t = plan.transfers
    this_Z, next_Z = landings.successions()
    early_Z = landings.until_Z() < landings.need_Z
    early_Z[next_Z] |= landings.need_Z[next_Z] == landings.need_Z[this_Z]
    found.mask(
        "buffers", early_Z[len(early_Z) - len(t) :], "C",
        lambda i: f"buffer {t.buffer_C[i]} of rank {t.dst_C[i]} is overwritten while use {t.need_C[i]} still reads it",
    )  # fmt: skip
    return early_Z


def _check_readers(found: Violations, plan: Plan, uses: Uses, landings: Landings, early_Z: Array) -> None:
    """Every slot that serves, and every rank that passes a copy on, has the expert when it reads it."""
    t, B = plan.transfers, plan.B
    replica_MLGR = np.where(plan.quota_MLGS[..., B:] > 0, plan.expert_MLGS[..., B:], -1)
    used_UGR = replica_MLGR[plan.order_M[uses.micro_step_U], uses.layer_U]
    at_U, rank_D, slot_D = np.nonzero(used_UGR >= 0)
    # A rank that passes on its own copy must hold it as a reader does, through the use for which it is passed on.
    relay_Y = np.flatnonzero((t.link_C != Link.HOST) & (t.src_C != plan.home_LE[t.layer_C, t.expert_C] // B))
    pairs = (
        (rank_D, t.src_C), (uses.layer_U[at_U], t.layer_C), (used_UGR[at_U, rank_D, slot_D], t.expert_C),
        (uses.use_U[at_U], t.need_C),
    )  # fmt: skip
    rank_D, layer_D, expert_D, use_D = (np.concatenate([mine_D, column_C[relay_Y]]) for mine_D, column_C in pairs)
    landing_D = landings.latest(rank_D, layer_D, expert_D, use_D)
    missing_D, gone_D = landing_D < 0, np.zeros(len(landing_D), bool)
    there = landing_D[~missing_D]
    # What is overwritten before even its own use was reported above.
    gone_D[~missing_D] = (landings.until_Z()[there] < use_D[~missing_D]) & ~early_Z[there]
    for mask_D, text in ((missing_D, "was never copied there"), (gone_D, "has been overwritten by then")):
        for d in np.flatnonzero(mask_D)[:SHOWN_PER_LAW]:
            reader = f"slot {B + slot_D[d]}" if d < len(slot_D) else f"to be passed on by copy {relay_Y[d - len(slot_D)]}"
            where = f"use {use_D[d]} (layer {layer_D[d]}), rank {rank_D[d]}, {reader}"
            found.add("residency", f"expert {expert_D[d]} {text} ({int(mask_D.sum())} uses in all).", where)
    _check_circles(found, t, relay_Y, landing_D[len(slot_D) :] - (len(early_Z) - len(t)))


def _check_circles(found: Violations, t: TransferList, relay_Y: Array, parent_Y: Array) -> None:
    """Within a use, a copy comes from one that comes from another: followed far enough, these end at one that is not a relay."""
    from_C = np.arange(len(t))
    same_use = (parent_Y >= 0) & (t.need_C[parent_Y.clip(0)] == t.need_C[relay_Y])
    from_C[relay_Y[same_use]] = parent_Y[same_use]
    end_C = from_C
    for _ in range(len(t).bit_length() if len(relay_Y) else 0):
        end_C = end_C[end_C]
    found.mask(
        "residency", from_C[end_C] != end_C, "C",
        lambda i: f"expert {t.expert_C[i]} is passed on in a circle of ranks: none of them has it first",
    )  # fmt: skip
