"""Inputs of planning: the problem of a whole step, the levels that have already run, the first placement, and missing quotas."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.levels import HomeSolver, PackSolver, SplitSolver
from foremoe.plan.plan import Plan
from foremoe.plan.split import served_quotas
from foremoe.planner.answers import quotas_of
from foremoe.problem.laws import placement_violations, slot_violations
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.home.keep import Keep
from foremoe.solvers.robust.kernels import keep_rows
from foremoe.solvers.split.exact import ExactSplit
from foremoe.workload.packing import AsGiven

# Letters: N rows, G ranks, S slots.


def starting_placement(problem: Problem, start: Plan | Placement | None, split: SplitSolver) -> Placement:
    """Returns the placement to start from. If the quotas of `start` do not fit the problem's load, they are split again."""
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


def with_quotas(
    problem: Problem, placement: Placement, split: SplitSolver, keeps_homes: bool, *, copied: bool = False
) -> Placement:
    """Returns the placement with quotas from `split`. Redundant slots without pairs become empty (canonical form).

    Args:
        copied: Whether weights are copied before the load is known. Every replica whose expert has pairs then gets at least one
            of them, so that the plan contains all copies that were made.
    """
    expert_NGS = placement.expert_NGS
    quota_NGS = quotas_of(split, problem, expert_NGS)
    if not keeps_homes:
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
    if copied:
        quota_NGS = quota_NGS.copy()
        exact = isinstance(split, ExactSplit)
        for_rows(lambda low, high: keep_rows(low, high, problem.B, exact, expert_NGS, quota_NGS), problem.N, whole=True)
    return _canonical(problem, expert_NGS, quota_NGS)


def served(problem: Problem, planned: Problem, placement: Placement) -> Placement:
    """Returns the placement for the routing of `problem` that follows from a placement for the routing of `planned`.

    The quotas are the numbers of pairs that slots then serve (`served_quotas`). Replicas that no pair reaches are left out.
    """
    rank_LE, slot_LE = np.divmod(problem.home_LE, problem.B)
    home_NE = np.tile(rank_LE * problem.S + slot_LE, (problem.M, 1)).astype(np.int64)
    load_NGE = problem.load_NE[:, None] if problem.load_NGE is None else problem.load_NGE
    node_G = problem.cluster.node_of_rank_G
    quota_NGS = served_quotas(placement.expert_NGS, placement.quotas_NGS, planned.load_NGE, load_NGE, home_NE, node_G)
    return _canonical(problem, placement.expert_NGS, quota_NGS)


def _canonical(problem: Problem, expert_NGS: Array, quota_NGS: Array) -> Placement:
    expert_NGS = expert_NGS.copy()
    expert_NGS[:, :, problem.B :][quota_NGS[:, :, problem.B :] == 0] = -1
    return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)


def whole_step(problems: Sequence[Problem]) -> Problem:
    """Returns one problem with the micro-steps of all stages, which is the input of the home level."""
    if not problems:
        raise InputError("homes needs at least one problem.")
    first = problems[0]
    for other in problems[1:]:
        if (other.L, other.E, other.G) != (first.L, first.E, first.G):
            sizes = [(its.L, its.E, its.G) for its in (first, other)]
            raise InputError(f"homes are decided for one set of layers, experts and ranks; got {sizes[0]} and {sizes[1]}.")
    if len(problems) == 1:
        return first
    arrays = Problem.join_arrays(problems, "M")
    return dataclasses.replace(first, schedule=Schedule.plain(first.stage, len(arrays["load_MLE"])), routed=None, **arrays)


def pack_that_ran(pack: PackSolver, problem: Problem) -> PackSolver:
    """Returns `pack`, or `AsGiven()` if `problem` records no packing. Raises InputError if another pack level packed it."""
    if problem.dealt is None:
        return AsGiven()
    if pack != AsGiven() and problem.dealt.packer != repr(pack):
        dealt = f"{problem.dealt.packer} dealt this problem, not pack={pack!r}"
        raise InputError(f"{dealt}; deal it with Planner.workload, or leave pack out.")
    return pack


def require_decided(home: HomeSolver, problem: Problem) -> None:
    """Raises InputError if `home` has not run, that is, if homes are still in order although `home` would move experts."""
    if home == Keep() or (problem.home_LE != np.arange(problem.E)).any():
        return
    moved = int((home.solve(problem) != problem.home_LE).sum())
    if moved:
        cure = "decide homes with Planner.homes and give them to the problem as home_LE, or leave home out"
        raise InputError(f"home={home!r} has not run: it would move {moved} experts; {cure}.")
