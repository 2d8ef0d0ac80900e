"""Figures of a planner with an exact solver. The planner plans as many rows of a random sample as its time limit allows."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer
from foremoe.plan.figures import FIGURES, plan_figures, stage_seconds
from foremoe.plan.plan import Plan
from foremoe.planner.assembly import assemble
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Rerouted, foreseen
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.solvers.home.keep import Keep

# Letters: M micro-steps, L layers, N = M*L rows, E experts.

Progress = Callable[[str, int, int], None]


class Comparison(NamedTuple):
    """Settings that are the same for all planners of one comparison."""

    history_LE: Array | None  # load of an earlier step
    static: Plan  # the static plan, the baseline of speed-ups
    exact_budget_s: float  # time of one exact planner
    seed: int  # seed of the rows that it plans
    progress: Progress | None
    trainer: Trainer | None = None  # for memory


def line_without_figures(name: str, note: str) -> dict[str, Any]:
    """Returns the figures (None) of a planner that planned nothing. `note` gives the reason."""
    return {"solver": name, **dict.fromkeys(FIGURES), "n_solved": 0, "note": note}


def sampled_line(name: str, planner: Planner, problem: Problem, shared: Comparison, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Returns the figures of a planner with an exact solver, computed over the rows that it proves optimal.

    Copies, bytes and memory are counted in a plan of all rows, as for other planners. In this plan, rows without a proof are
    taken from the fastest of `plans`.
    """
    planner = dataclasses.replace(planner, home=Keep())
    proven, num_tried, cpu_s = _prove(name, planner, problem, shared)
    budget = f"{shared.exact_budget_s:g} s"
    if not proven:
        return line_without_figures(name, f"left out: none of {num_tried} sampled rows was proven optimal within {budget}")
    others = [plan for plan in plans.values() if plan.executable and (plan.home_LE == problem.home_LE).all()]
    rest = min(others, key=lambda plan: stage_seconds(plan)[0], default=None)
    around = problem.static() if rest is None else rest.placement
    expert_NGS, quota_NGS = around.expert_NGS.copy(), around.quotas_NGS.copy()
    bound_N, stop_N = np.full(problem.N, -np.inf), np.full(problem.N, Stop.DONE, np.uint8)
    for n, one in proven.items():
        expert_NGS[n], quota_NGS[n] = one.expert_NGS[0], one.quota_NGS[0]
        bound_N[n], stop_N[n] = one.bound_ML[0, 0], one.stop_ML[0, 0]
    placement = Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)
    plan = assemble(planner.header(problem, None), planner.path, problem, placement, stop_N, proven_N=bound_N)
    counted_ML = np.zeros((problem.M, problem.L), bool)
    counted_ML.ravel()[list(proven)] = True
    static_s = stage_seconds(shared.static, counted_ML)[0]
    optimal = "optimal" if planner.foresight == "exact" else "optimal for the load foreseen"
    return plan_figures(name, problem, plan, static_s=static_s, counted_ML=counted_ML, trainer=shared.trainer) | {
        "plan_us_per_layer": 1e6 * cpu_s / num_tried,
        "same_rows": {other: float(plan.skew_ML[counted_ML].mean()) for other, plan in plans.items()},
        "note": f"{len(proven)} of {num_tried} sampled rows proven {optimal} in {budget}; all figures are about these rows",
    }


def _prove(name: str, planner: Planner, problem: Problem, shared: Comparison) -> tuple[dict[int, Plan], int, float]:
    """Plans sampled rows within the budget. Returns the plans of proven rows by row, the number of rows tried, and CPU time."""
    seen = foreseen(problem, planner.foresight, shared.history_LE)
    exact = seen is problem
    # A single row has no micro-steps to foresee from, so the foreseen load becomes its history. Rerouting needs no history.
    view = planner.foresight if exact or isinstance(planner.foresight, Rerouted) else "previous"
    schedule = Schedule.plain(problem.stage, 1, problem.schedule.reforward)
    proven, num_tried, cpu_s = dict[int, Plan](), 0, 0.0
    end = time.perf_counter() + shared.exact_budget_s
    for n in np.random.default_rng(shared.seed).permutation(problem.N):
        left_s = end - time.perf_counter()
        if left_s <= 0.05 * shared.exact_budget_s:
            break
        m, l = divmod(int(n), problem.L)  # noqa: E741
        one = dataclasses.replace(problem[m : m + 1], schedule=schedule).layers([l])
        solvers = tuple(_within(solver, left_s) for solver in planner.rank)
        limited = dataclasses.replace(planner, rank=solvers, foresight=view)
        plan, summary = limited.plan(one, history_LE=None if exact else seen.load_MLE[m, l : l + 1], num_threads=1)
        num_tried += 1
        cpu_s += sum(level.cpu_s for level in summary.levels)
        if plan.stop_ML[0, 0] == (Stop.OPTIMAL if exact else Stop.DONE):
            proven[int(n)] = plan
        if shared.progress is not None:
            shared.progress(name, int(1000 * min(1.0, 1 - left_s / shared.exact_budget_s)), 1000)
    return proven, num_tried, cpu_s


def _within(solver: Any, seconds: float) -> Any:
    """Returns the solver with its time limit set, if it has one."""
    limited = dataclasses.is_dataclass(solver) and hasattr(solver, "time_limit_s")
    return dataclasses.replace(solver, time_limit_s=seconds) if limited else solver
