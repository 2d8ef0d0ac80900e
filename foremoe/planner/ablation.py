"""`ablate`: measures variants of a planner without one of its levels, for several numbers of slots and kinds of foresight."""

import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.levels import PathSolver
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import TransferList
from foremoe.planner.comparison import EXACT_BUDGET_S, compare
from foremoe.planner.parsing import short
from foremoe.planner.planner import Planner
from foremoe.planner.sampling import Progress
from foremoe.problem.foresight import Foresight
from foremoe.problem.problem import Problem
from foremoe.solvers.home.keep import Keep
from foremoe.solvers.split.even import Even
from foremoe.workload.packing import AsGiven

# Letters: M micro-steps, L layers, G ranks, E experts, C copies.

ALL = "all"


@dataclass(frozen=True)
class FromHome(PathSolver):
    """A path level that does nothing, so that every copy comes from the home rank."""

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Returns the copies unchanged."""
        return transfers


def left_out(planner: Planner) -> dict[str, Planner]:
    """Returns the planner as ``all``, and variants that each leave out one level, keyed by the name of that level.

    Without the pack level, sequences stay where they are. Without the home level, experts stay where they are. Without the split
    level, quotas are even instead of chosen by the solvers. Without the path level, copies come from the home rank. The variant
    without the pack level needs a problem whose sequences were not packed by that level.
    """
    out = {ALL: planner}
    if planner.pack != AsGiven():
        out[f"without {short(planner.pack)}"] = replace(planner, pack=AsGiven())
    if planner.home != Keep():
        out[f"without {short(planner.home)}"] = replace(planner, home=Keep())
    for i, solver in enumerate(planner.rank):
        out[f"without {short(solver)}"] = replace(planner, rank=planner.rank[:i] + planner.rank[i + 1 :])
    if planner.split is not None:
        out[f"without {short(planner.split)}"] = replace(planner, split=None)
    elif planner.rank:
        out["without split"] = replace(planner, split=Even())
    if planner.rank and planner.keeps_homes:
        out[f"without {short(planner.path)}"] = replace(planner, path=FromHome())
    if planner.guard:
        out["without the guard"] = replace(planner, guard=False)
    return out


def ablate(
    problem: Problem, planner: Planner, *, redundant: Sequence[int] = (0, 1, 2, 4),
    foresight: Sequence[Foresight] = ("exact", "previous", "step"), history_LE: Array | None = None,
    unpacked: Problem | None = None, exact_budget_s: float = EXACT_BUDGET_S, progress: Progress | None = None,
    judge: Callable[[Problem, Plan], Mapping[str, Any]] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Leaves out one level at a time, for all numbers of redundant slots and kinds of foresight. All variants plan the same rows.

    Raises the errors of `compare`.

    Args:
        problem: Problem to plan. Its own number of redundant slots is ignored.
        planner: Planner whose levels are left out.
        redundant: Numbers of redundant slots to try.
        foresight: Kinds of foresight to try.
        history_LE: Load of an earlier step, as for `compare`.
        unpacked: Problem of the same batch, packed without the planner's pack level. If None, the pack level is never left out.
        exact_budget_s: Time limit of exact solvers, as for `compare`.
        progress: Callback for progress, as for `compare`.
        judge: Function that returns further figures of a variant, as for `compare`. Its baseline should be the static placement
            of `problem`.

    Returns:
        One dict per variant with ``levels`` (the level that was left out), ``redundant``, ``foresight``, the figures of
        `compare`, and ``plan``. Two variants with an equal ``plan`` have the same plan. ``plan`` is None unless all rows of the
        problem were planned.
    """
    variants = left_out(planner)
    pack_name = f"without {short(planner.pack)}" if planner.pack != AsGiven() else None
    given = None if pack_name is None else variants.pop(pack_name)
    rows = []
    for slots, view in itertools.product(redundant, foresight):
        options: dict[str, Any] = {
            "history_LE": history_LE, "exact_budget_s": exact_budget_s, "judge": _judging(judge),
            "progress": None if progress is None else functools.partial(_told, progress, f", R = {slots}, {view}"),
        }  # fmt: skip
        vary = lambda p, view=view: replace(p, foresight=view)  # noqa: E731
        found = compare(replace(problem, redundant=slots), {name: vary(p) for name, p in variants.items()}, **options)
        if given is not None and pack_name is not None and unpacked is not None:
            (row,) = compare(replace(unpacked, redundant=slots), {pack_name: vary(given)}, **options)
            found.insert(1, row)
        rows += [
            {"levels": row.pop("solver"), "redundant": slots, "foresight": str(view), **row, "plan": row.get("plan")}
            for row in found
        ]
    return rows


def _told(progress: Progress, where: str, name: str, done: int, total: int) -> None:
    progress(name + where, done, total)


def _judging(judge: Callable[[Problem, Plan], Mapping[str, Any]] | None) -> Callable[[Problem, Plan], Mapping[str, Any]]:
    return lambda problem, plan: {**({} if judge is None else judge(problem, plan)), **_same_plan(problem, plan)}


def _same_plan(problem: Problem, plan: Plan) -> dict[str, str]:
    """Returns a digest of loads, homes, replicas, quotas and copies. The order of slots and empty slots do not change it."""
    held_MLGS = plan.expert_MLGS >= 0
    m, l, g, _ = np.nonzero(held_MLGS)  # noqa: E741
    expert, quota = plan.expert_MLGS[held_MLGS], plan.quota_MLGS[held_MLGS]
    order = order_of(m, l, g, expert)
    copies = plan.transfers
    links = (copies.micro_step_C, copies.layer_C, copies.phase_C, copies.expert_C, copies.src_C, copies.dst_C, copies.link_C)
    by_copy = order_of(*links)
    digest = hashlib.sha256()
    for array in (plan.load_MLE, plan.home_LE, *(a[order] for a in (m, l, g, expert, quota))):
        digest.update(np.ascontiguousarray(array, np.int64).tobytes())
    for array in links:
        digest.update(np.ascontiguousarray(array[by_copy], np.int64).tobytes())
    return {"plan": digest.hexdigest()[:16]}
