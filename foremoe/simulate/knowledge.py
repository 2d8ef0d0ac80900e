"""Comparison of kinds of foresight and their overhead. One planner is simulated with each kind on the real load."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.base.errors import InputError
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Foresight
from foremoe.problem.problem import Problem
from foremoe.simulate.result import PARTS
from foremoe.simulate.systems import System, simulate_systems
from foremoe.solvers.home.keep import Keep

# Letters: M micro-steps.

_STATIC = "static"


def simulate_foresight(
    groups: Sequence[Problem], views: Mapping[str, Foresight | None], system: System | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Plans the same EP groups with every kind of foresight and simulates the plans on the real load.

    MoE-GPS (arXiv 2506.07366) asks which prediction is worth its overhead. Here, the overhead is the CPU time of the planner. The
    exposed part of this time is added to the stage.

    Args:
        groups: EP groups of one stage, each with its own load.
        views: Kinds of foresight, keyed by name. None means static placement, which needs no plan.
        system: System to simulate. Each kind of foresight replaces that of its planner. Defaults to the default planner.
        options: Options of `simulate_systems`, except `num_threads`. Planning uses one thread, so that its CPU time is that of
            all planning.

    Returns:
        One dict per entry of `views`, with the figures of `simulate_systems` and:

        * ``foresight``: name of the entry,
        * ``copy_bytes``: bytes of the weights and gradients of replicas that one EP group sends in the stage,
        * ``plan_cpu_s``: CPU seconds for planning one group on this machine,
        * ``plan_exposed_s``: exposed seconds of planning (see `exposed_planning`),
        * ``net_speedup_vs_static``: speed-up of the stage over static placement if exposed planning is part of its time.

    Raises:
        InputError: The arguments are wrong for `simulate_systems`, or the planner cannot plan with one kind of foresight.
    """
    system = system or System()
    planner = system.planner
    systems = {_STATIC: System(planner=Planner(rank=()), prefetch=system.prefetch)}
    for name, view in views.items():
        if name == _STATIC and view is not None:
            raise InputError(f"{name!r} is static placement, not {view!r}; give this kind of foresight another name.")
        if view is not None:
            systems[name] = dataclasses.replace(system, planner=dataclasses.replace(planner, foresight=view))
    load_kernels(planner, groups)
    figures = {row["solver"]: row for row in simulate_systems(groups, systems, num_threads=1, **options)}
    static_s = figures[_STATIC]["simulated_stage_s"]
    rows = []
    for name, view in views.items():
        row = figures[_STATIC if view is None else name]
        if not row["n_solved"]:
            raise InputError(f"the planner does not plan these groups: {row['note']}")
        row = {"foresight": name, **row, **planning_figures(row, view, groups)}
        row["copy_bytes"] = row["bytes_per_layer"] * groups[0].N
        row["net_speedup_vs_static"] = static_s / (row["simulated_stage_s"] + row["plan_exposed_s"])
        rows.append(row)
    return rows


def load_kernels(planner: Planner, groups: Sequence[Problem]) -> None:
    """Plans one row, so that the time of loading compiled kernels does not count as planning time."""
    for problem in groups[:1]:
        with contextlib.suppress(InputError):  # the actual planning reports the error
            dataclasses.replace(planner, home=Keep()).plan(problem[:1].layers([0]), num_threads=1)


def planning_figures(row: Mapping[str, Any], view: Foresight | None, groups: Sequence[Problem]) -> dict[str, float]:
    """Returns ``plan_cpu_s`` and ``plan_exposed_s`` (see `simulate_foresight`) for one result of `simulate_systems`."""
    if view is None:
        return {"plan_cpu_s": 0.0, "plan_exposed_s": 0.0}
    cpu_s = 1e-6 * row["plan_us_per_layer"] * row["n_solved"] / len(groups)
    timeline_s = sum(row[part] for part in PARTS)
    return {"plan_cpu_s": cpu_s, "plan_exposed_s": exposed_planning(view, cpu_s, timeline_s, groups[0])}


def exposed_planning(view: Foresight, cpu_s: float, timeline_s: float, problem: Problem) -> float:
    """Returns how many seconds of planning do not overlap with execution. All micro-steps are assumed to take equally long.

    A micro-step is planned while the previous one runs. With foresight ``"previous"``, planning can begin only after the forward
    pass of the previous micro-step. Planning then overlaps only with the backward pass, and in the recompute stage it does not
    overlap at all. The first micro-step is planned before the stage. With other kinds of foresight, all loads are known after
    rollout, and planning of the first micro-step is exposed.
    """
    each_s, hides_s = cpu_s / problem.M, timeline_s / problem.M
    if view != "previous":
        return each_s + (problem.M - 1) * max(0.0, each_s - hides_s)
    ratio = problem.cluster.backward_ratio if problem.stage == "update" else 0.0
    return (problem.M - 1) * max(0.0, each_s - hides_s * ratio / (1.0 + ratio))
