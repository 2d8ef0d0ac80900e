"""`compare` and `ablate`: strategies side by side on one problem, every figure beside its baseline.

Figures come from the finished plans' arrays, not from the planner's own reports.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.levels import HomeSolver
from foremoe.plan.figures import FIGURES, peak_bytes, plan_figures, stage_seconds, traffic
from foremoe.plan.plan import Plan
from foremoe.planner.parsing import short
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Foresight, predicted_load
from foremoe.problem.placement import Stop
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import SharedSlots
from foremoe.solvers.home.keep import Keep
from foremoe.workload.skew import skew

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, E experts, S slots.

EXACT_BUDGET_S = 15.0
Progress = Callable[[str, int, int], None]


def compare(
    problem: Problem,
    planners: Mapping[str, Planner],
    *,
    history_LE: Array | None = None,
    leave_first_out: bool | None = None,
    exact_budget_s: float = EXACT_BUDGET_S,
    seed: int = 0,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Plans `problem` with every planner, as it is (baselines have no guard), on one thread.

    Args:
        planners: name to planner, for example `STRATEGIES`. Each plans with the homes that its own home level decides; the pack
            level has no part, the problem is dealt already.
        history_LE: int32, load of an earlier step for foresight "previous". Without it the first micro-step has no history and
            is left out of every row's figures (if there is more than one), so that all rows speak of the same micro-steps.
        leave_first_out: overrules that choice.
        exact_budget_s: a planner with an exact solver plans a sample of rows, drawn with `seed`, within these seconds in all;
            the row speaks of those it proved optimal, with ``same_rows``: the other planners' mean skew on the same rows.
        progress: called with (planner, rows done, rows in all).

    Returns:
        One dict per planner: ``solver``, the `FIGURES` (None where nothing was planned), ``n_solved`` (rows planned), and
        ``note`` where something must be said. ``*_per_layer`` is the mean per row (micro-step, layer). Moves are replicas made,
        or slots that changed their expert since the micro-step before where homes move. ``max_fanout`` is the largest number of
        copies that leave one rank for one row. Planning time is CPU time of the solvers alone. For planners that move homes
        ``predicted_stage_s`` leaves their weight transfer out, which stands in ``transfer_s``.
    """
    if leave_first_out is None:
        leave_first_out = needs_first_left_out(problem, planners, history_LE)
    first = 1 if leave_first_out else 0
    static = _with_progress(Planner(rank=()), "static", problem, history_LE, None)
    static_s = stage_seconds(static, first)[0]
    plans: dict[str, Plan] = {}
    rows: dict[str, dict[str, Any]] = {}
    settled = {home: _settled(home, problem) for home in {planner.home: None for planner in planners.values()}}
    for name, planner in planners.items():
        posed = settled[planner.home]
        missing = [module for solver in planner.rank for module in solver.requires if importlib.util.find_spec(module) is None]
        if missing:
            cure = f"skipped: needs {', '.join(missing)}; pip install 'foremoe[exact]'"
            rows[name] = _empty(name, cure)
        elif not any(solver.exact for solver in planner.rank):
            plans[name] = plan = _with_progress(planner, name, posed, history_LE, progress)
            rows[name] = plan_figures(name, posed, plan, first=first, static_s=static_s)
            rows[name]["plan_us_per_layer"] = _cpu_us(planner, posed, history_LE)
            if notes := _notes(planner, posed, problem, plan, first, history_LE):
                rows[name]["note"] = "; ".join(notes)
    for name, planner in planners.items():
        if name not in rows:
            rows[name] = _sampled(
                name, planner, settled[planner.home], history_LE, first, static, plans, exact_budget_s, seed, progress
            )
    return [rows[name] for name in planners]


def _notes(planner: Planner, posed: Problem, problem: Problem, plan: Plan, first: int, history_LE: Array | None) -> list[str]:
    """What a row's figures leave out."""
    notes = []
    if posed is not problem:
        notes.append(f"homes by {planner.home!r}; what moving them costs, once a step, is in no figure")
    if planner.foresight == "previous" and history_LE is None and problem.M == 1:
        notes.append("one micro-step and no history: nothing is foreseen, so this is static placement")
    if first and not plan.executable and planner.foresight == "step":
        notes.append(
            f"placed once, in micro-step 0: {traffic(posed, plan)[0] * plan.M:.1f} moves per layer that no figure counts"
        )
    return notes


def _settled(home: HomeSolver, problem: Problem) -> Problem:
    """The problem with the homes that a home level decides; the same object where they stay."""
    home_LE = home.solve(problem)
    return problem if np.array_equal(home_LE, problem.home_LE) else dataclasses.replace(problem, home_LE=home_LE)


def needs_first_left_out(problem: Problem, planners: Mapping[str, Planner], history_LE: Array | None) -> bool:
    """True if the first micro-step is left out of all figures: something needs history and has none for it."""
    return problem.M > 1 and history_LE is None and any(p.foresight == "previous" for p in planners.values())


def ablate(
    problem: Problem,
    planner: Planner,
    *,
    redundant: Sequence[int] = (0, 1, 2, 4),
    foresight: Sequence[Foresight] = ("exact", "previous", "step"),
    history_LE: Array | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Leaves out one level at a time, for every number of redundant slots and every foresight; paired by row.

    The first micro-step is left out of all rows where any foresight has no history for it (see `compare`).

    Returns:
        One dict per variant with ``levels`` (what is left out), ``redundant``, ``foresight`` and compare's figures.
    """
    variants = {"all": planner}
    if len(planner.rank) > 1:
        for i, solver in enumerate(planner.rank):
            variants[f"without {short(solver)}"] = dataclasses.replace(planner, rank=planner.rank[:i] + planner.rank[i + 1 :])
    if planner.home != Keep():
        variants[f"without {short(planner.home)}"] = dataclasses.replace(planner, home=Keep())
    if planner.guard:
        variants["without the guard"] = dataclasses.replace(planner, guard=False)
    rows = []
    blind = problem.M > 1 and history_LE is None and "previous" in foresight
    for slots, view in itertools.product(redundant, foresight):
        varied = dataclasses.replace(problem, redundant=slots)
        planners = {name: dataclasses.replace(p, foresight=view) for name, p in variants.items()}
        for row in compare(varied, planners, history_LE=history_LE, leave_first_out=blind, progress=progress):
            levels = row.pop("solver")
            rows.append({"levels": levels, "redundant": slots, "foresight": str(view), **row})
    return rows


def _with_progress(planner: Planner, name: str, problem: Problem, history_LE: Array | None, progress: Progress | None) -> Plan:
    report = None if progress is None else lambda done, total: progress(name, done, total)
    return planner.plan(problem, history_LE=history_LE, progress=report)[0]


def _cpu_us(planner: Planner, problem: Problem, history_LE: Array | None) -> float:
    """Microseconds of one thread's CPU time per row, solvers and their splits alone; the kernels are compiled already."""
    _, report = planner.plan(problem, history_LE=history_LE, num_threads=1)
    return 1e6 * sum(level.cpu_s for level in report.levels) / problem.N


def _empty(name: str, note: str) -> dict[str, Any]:
    return {"solver": name, **dict.fromkeys(FIGURES), "n_solved": 0, "note": note}


def _sampled(
    name: str, planner: Planner, problem: Problem, history_LE: Array | None, first: int, static: Plan,
    plans: Mapping[str, Plan], budget_s: float, seed: int, progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    """The row of a planner with an exact solver: as many rows of a seeded sample as the budget allows."""
    order_N = np.random.default_rng(seed).permutation(np.arange(first * problem.L, problem.N))
    # A row alone has no micro-steps beside it to foresee from: what the planner would see is foretold as its history.
    seen_MLE = predicted_load(problem.load_MLE, planner.foresight, history_LE)
    foreseen = planner.foresight != "exact"
    proven = Stop.DONE if foreseen else Stop.OPTIMAL
    end = time.perf_counter() + budget_s
    solved: list[int] = []
    singles: list[dict[str, Any]] = []
    tried, cpu_s = 0, 0.0
    update, reforward = problem.stage == "update", problem.schedule.reforward
    schedule = Schedule.accumulate(1, reforward) if update else Schedule.forward_only(1)
    # One layer alone finds its weights still in the ring at backward; among all layers they are sent again.
    sends = 2.0 if update and isinstance(problem.slots, SharedSlots) else 1.0
    for n in order_N:
        left_s = end - time.perf_counter()
        if left_s <= 0.05 * budget_s:
            break
        m, l = divmod(int(n), problem.L)  # noqa: E741
        one = dataclasses.replace(problem[m : m + 1], schedule=schedule).layers([l])
        limited = dataclasses.replace(planner, rank=tuple(_within(solver, left_s) for solver in planner.rank))
        if foreseen:
            limited = dataclasses.replace(limited, foresight="previous")
        plan, report = limited.plan(one, history_LE=seen_MLE[m, l : l + 1] if foreseen else None, num_threads=1)
        tried += 1
        cpu_s += sum(level.cpu_s for level in report.levels)
        if plan.stop_ML[0, 0] == proven:
            solved.append(int(n))
            row_static_s = float(static.cost_ML.total_s.ravel()[n])
            figures = plan_figures(name, one, plan, first=0, static_s=row_static_s, sends=sends)
            # Memory is that of all layers, as in the rows beside it.
            singles.append({**figures, "peak_bytes": peak_bytes(problem, plan)})
        if progress is not None:
            progress(name, int(1000 * min(1.0, 1 - left_s / budget_s)), 1000)
    if not solved:
        return _empty(name, f"none of {tried} sampled rows was proven optimal within {budget_s:g} s")
    mean = lambda key: float(np.mean([s[key] for s in singles]))  # noqa: E731
    skew_N = np.array([s["skew_mean"] for s in singles])
    stage_s = sum(s["predicted_stage_s"] for s in singles)
    links = singles[0]["bytes_by_link"]
    return {
        "solver": name,
        "skew_mean": float(skew_N.mean()),
        "skew_p99": float(np.quantile(skew_N, 0.99)),
        "skew_max": float(skew_N.max()),
        "gap_mean": mean("gap_mean"),
        "replicas_per_layer": mean("replicas_per_layer"),
        "moves_per_layer": mean("moves_per_layer"),
        "max_fanout": max(s["max_fanout"] for s in singles),
        "bytes_per_layer": mean("bytes_per_layer"),
        "bytes_by_link": {link: float(np.mean([s["bytes_by_link"][link] for s in singles])) for link in links},
        "predicted_stage_s": stage_s,
        "transfer_s": sum(s["transfer_s"] for s in singles),
        "speedup_vs_static": float(static.cost_ML.total_s.ravel()[solved].sum()) / stage_s if stage_s > 0 else 1.0,
        "peak_bytes": max(s["peak_bytes"] for s in singles),
        "plan_us_per_layer": 1e6 * cpu_s / tried,
        "n_solved": len(solved),
        "same_rows": {other: float(skew(plan.load_NG[solved]).mean()) for other, plan in plans.items()},
        "note": f"{len(solved)} of {tried} sampled rows proven optimal{' for the load foreseen' * foreseen} in {budget_s:g} s; "
        "every figure is theirs alone",
    }


def _within(solver: Any, seconds: float) -> Any:
    """The solver with its time limit set, if it has one."""
    limited = dataclasses.is_dataclass(solver) and any(f.name == "time_limit_s" for f in dataclasses.fields(solver))
    return dataclasses.replace(solver, time_limit_s=seconds) if limited else solver
