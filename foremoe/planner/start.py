"""What planning starts from, and quotas for placements that have none."""

from __future__ import annotations

import dataclasses

from foremoe.base.errors import InputError, PlanError
from foremoe.levels import SplitSolver
from foremoe.plan.plan import Plan
from foremoe.problem.laws import placement_violations, slot_violations
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.slots import ResidentSlots

# Letters: N rows, G ranks, S slots.


def starting_placement(problem: Problem, start: Plan | Placement | None, split: SplitSolver) -> Placement:
    """The static placement, or `start` with its quotas split again if they do not fit the problem's load.

    Raises:
        InputError: The start is of another shape, or not valid for this problem whatever its quotas.
    """
    if start is None:
        return problem.static()
    if isinstance(start, Plan):
        start = Placement(expert_NGS=start.expert_NGS, quota_NGS=start.quota_NGS)
    if not isinstance(start, Placement):
        raise InputError(f"the start must be a Plan or a Placement; got {type(start).__name__}.")
    broken = slot_violations(start.expert_NGS, (problem.N, problem.G, problem.S), problem.E, problem.L)
    if not broken and (start.quota_NGS is None or placement_violations(problem, start)):
        start = with_quotas(problem, Placement(expert_NGS=start.expert_NGS), split, True)
        broken = placement_violations(problem, start)
    if broken:
        raise InputError(f"the start is not valid for this problem: {broken[0]}")
    return start


def with_quotas(problem: Problem, placement: Placement, split: SplitSolver, keeps_homes: bool) -> Placement:
    """Quotas by `split`; redundant slots that get none are emptied (canonical form), unless they are resident."""
    expert_NGS = placement.expert_NGS
    quota_NGS = split.solve(problem, expert_NGS)
    if quota_NGS.shape != expert_NGS.shape:
        have, want = list(quota_NGS.shape), list(expert_NGS.shape)
        raise PlanError("quota", "", f"{split!r} returned quotas of shape {have} for slots of shape {want}.")
    if keeps_homes and not isinstance(problem.slots, ResidentSlots):
        expert_NGS = expert_NGS.copy()
        expert_NGS[:, :, problem.B :][quota_NGS[:, :, problem.B :] == 0] = -1
    return dataclasses.replace(placement, expert_NGS=expert_NGS, quota_NGS=quota_NGS)
