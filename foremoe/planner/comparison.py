"""`compare`: compares strategies on one problem. Figures are given together with their baselines.

The figures are computed from the arrays of finished plans, not taken from the planner's own summaries.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.levels import HomeSolver
from foremoe.machine.trainer import Trainer
from foremoe.plan.figures import plan_figures, stage_seconds
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.planner.sampling import Comparison, Progress, line_without_figures, sampled_line
from foremoe.problem.problem import Problem
from foremoe.solvers.home.keep import Keep
from foremoe.workload.packing import AsGiven

# Letters: M micro-steps, L layers, N = M*L rows, E experts.

EXACT_BUDGET_S = 15.0
NO_HISTORY = "micro-step 0 has no history and is static; give history_LE"


def compare(
    problem: Problem, planners: Mapping[str, Planner], *, history_LE: Array | None = None,
    exact_budget_s: float = EXACT_BUDGET_S, seed: int = 0, trainer: Trainer | None = None,
    judge: Callable[[Problem, Plan], Mapping[str, Any]] | None = None, progress: Progress | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Plans `problem` with every planner on one thread and returns the figures of the plans. Baselines run without a guard.

    Args:
        problem: Problem to plan. Each planner uses the homes that its own home level chooses.
        planners: Planners by name, for example `STRATEGIES`.
        history_LE: Load of an earlier step for foresight "previous", int32 [L, E]. Without it, a planner with this foresight has
            no history in the first micro-step, which it leaves static.
        exact_budget_s: Time limit in seconds for a planner with an exact solver, which plans only a sample of rows. The figures
            of this planner cover only the rows that it proves optimal. ``same_rows`` holds the mean skew of the other planners on
            these rows.
        seed: Seed of the sample for exact solvers.
        trainer: The training around the stage, as for `rank_memory`.
        judge: Function that gets the problem and the plan of every planner that plans all rows. It returns further figures of the
            planner, such as those of `foremoe.simulate.Judge`.
        progress: Callback that gets (planner, rows done, number of rows).

    Returns:
        One dict per planner with ``solver``, the `FIGURES` (None if nothing was planned, see `Planner.refusal`), ``n_solved``
        (the number of planned rows), and an optional ``note``. ``*_per_layer`` is the mean per row (micro-step, layer). ``moves``
        is the number of new replicas. For planners that move homes, it is the number of slots whose expert differs from the
        micro-step before. ``max_fanout`` is the largest number of copies that leave one rank for one row. Planning time is the
        CPU time of the solvers alone. For planners that move homes, ``transfer_s`` is the time to transfer the weights of moved
        experts, which ``predicted_stage_s`` does not include.

    Raises:
        InputError: A planner has a pack level, but the problem was not packed by that level.

    Example:
        >>> rows = foremoe.compare(problem, {name: foremoe.resolve(name) for name in ("static", "greedy", "foremoe")})
        >>> [(row["solver"], round(row["skew_mean"], 3)) for row in rows]
        [('static', 1.739), ('greedy', 1.015), ('foremoe', 1.053)]
    """
    for name, planner in planners.items():
        if not isinstance(planner, Planner):
            raise InputError(f"{name} must be a Planner; got {planner!r}; make it one with foremoe.resolve.")
        _require_part(name, planner, problem)
    shared = Comparison(history_LE, Planner(rank=()).plan(problem)[0], exact_budget_s, seed, progress, trainer)
    plans: dict[str, Plan] = {}
    lines: dict[str, dict[str, Any]] = {}
    homes = {home: _with_homes(home, problem) for home in {planner.home: None for planner in planners.values()}}
    for name, planner in planners.items():
        posed = homes[planner.home]
        reason = planner.refusal(posed)
        if reason is not None:
            lines[name] = line_without_figures(name, f"left out: {reason}")
        elif not any(solver.exact for solver in planner.rank):
            lines[name], plans[name] = _line(name, planner, posed, shared, homes_moved=posed is not problem)
            if judge is not None:
                lines[name] |= judge(posed, plans[name])
    for name, planner in planners.items():
        if name not in lines:
            lines[name] = sampled_line(name, planner, homes[planner.home], shared, plans)
    return [lines[name] for name in planners]


def _require_part(name: str, planner: Planner, problem: Problem) -> None:
    if planner.pack != AsGiven() and (problem.dealt is None or problem.dealt.packer != repr(planner.pack)):
        raise InputError(f"{name} has a pack level, but the case is dealt already; leave the pack level out.")


def _line(name: str, planner: Planner, posed: Problem, shared: Comparison, *, homes_moved: bool) -> tuple[dict[str, Any], Plan]:
    """Returns the figures of a planner that plans all rows, and its plan."""
    history_LE = shared.history_LE
    rows_alone = replace(planner, home=Keep())
    progress = None if shared.progress is None else functools.partial(shared.progress, name)
    plan, summary = rows_alone.plan(posed, history_LE=history_LE, progress=progress)
    static_s = stage_seconds(shared.static)[0]
    line = plan_figures(name, posed, plan, static_s=static_s, trainer=shared.trainer)
    # Measures only solvers and their splits, on one thread. The kernels are compiled already.
    _, timed = rows_alone.plan(posed, history_LE=history_LE, num_threads=1)
    line["plan_us_per_layer"] = 1e6 * sum(level.cpu_s for level in timed.levels) / posed.N
    notes = list(summary.warnings)
    if homes_moved:
        notes.append(f"homes by {planner.home!r}; moving them counts only in the simulated stage")
    notes += no_history(planner, posed, history_LE)
    return line | ({"note": "; ".join(notes)} if notes else {}), plan


def _with_homes(home: HomeSolver, problem: Problem) -> Problem:
    """Returns the problem with homes chosen by a home level. It is the same object if no expert moves."""
    home_LE = home.solve(problem)
    return problem if np.array_equal(home_LE, problem.home_LE) else replace(problem, home_LE=home_LE)


def no_history(planner: Planner, problem: Problem, history_LE: Array | None) -> list[str]:
    """Returns a note if the planner needs history for the first micro-step and there is none."""
    if planner.foresight != "previous" or history_LE is not None:
        return []
    if problem.M == 1:
        return ["one micro-step and no history: nothing is foreseen, so this is static placement"]
    return [NO_HISTORY]
