"""Contents of the page about one plan: figures and sentences, as plain values."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer
from foremoe.plan.figures import host_bytes, memory_figures, stage_seconds
from foremoe.plan.plan import Plan
from foremoe.planner.summary import PlanSummary
from foremoe.problem.memory import fit, rank_memory
from foremoe.problem.problem import Problem
from foremoe.simulate.result import LINKS, Simulation
from foremoe.simulate.runs import StageRuns
from foremoe.workload.skew import mean_skew, skew

# Letters: M micro-steps, L layers, U uses, G ranks, K link classes and directions.


def headline(posed: Problem, plan: Plan, static_s_ML: Array, bytes_by_link: Mapping[str, Array]) -> dict[str, Any]:
    """Returns the most important figures of the plan, which are shown at the top of the page."""
    return {
        "before": _spread(posed.static().load_NG()), "after": _spread(plan.load_NG),
        "replicas_per_rank": plan.num_replicas / (plan.N * plan.G) if plan.executable else None,
        "static_s": float(static_s_ML.sum()), "planned_s": stage_seconds(plan)[0],
        "bytes": {name: float(bytes_by_link[f"{name} in"].sum()) for name in ("peer", "rdma", "host")},
        "gap_mean": float(plan.load_gap_ML.mean()), "gap_max": float(plan.load_gap_ML.max()),
    }  # fmt: skip


def _spread(load_NG: Array) -> dict[str, float]:
    skew_N = skew(load_NG)
    return {"mean": mean_skew(load_NG), "p99": float(np.quantile(skew_N, 0.99)), "max": float(skew_N.max())}


def parts(plan: Plan, static: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """Returns the predicted time in seconds of each part of the stage, with static placement and with the plan."""
    planned = {name: float(part.sum()) for name, part in plan.cost_ML.parts().items()}
    if not plan.executable:
        planned["transfer_s"] = planned["gradient_s"] = 0.0
    return {"static": {name: float(part.sum()) for name, part in static.items()}, "planned": planned}


def simulated(runs: StageRuns | None) -> dict[str, Any] | None:
    """Returns the parts and gains of the simulated stage, or None if it was not simulated."""
    return None if runs is None else {"parts": runs.parts(), "gains": runs.gains()}


def late(posed: Problem, plan: Plan, runs: StageRuns | None) -> dict[str, Any]:
    """Returns the delay that every rank causes, with static placement and with the plan.

    The delay is given in simulated seconds or, without a simulation, in pairs above the mean.
    """
    if runs is not None:
        static_G, planned_G = (late_seconds(run, plan.G) for run in (runs.static, runs.planned))
        return {"unit": "s", "static_G": static_G.tolist(), "planned_G": planned_G.tolist()}
    static_G, planned_G = (_late_pairs(load_NG) for load_NG in (posed.static().load_NG(), plan.load_NG))
    return {"unit": "pairs", "static_G": static_G.tolist(), "planned_G": planned_G.tolist()}


def late_seconds(simulation: Simulation, num_ranks: int) -> Array:
    """Returns the mean time in seconds that ranks wait for a rank while its experts take the longest, float64 [G]."""
    compute_UG = simulation.compute_UG.astype(np.float64)
    waited_s_U = compute_UG.max(axis=1) - compute_UG.mean(axis=1)
    return np.bincount(compute_UG.argmax(axis=1), waited_s_U, num_ranks)


def _late_pairs(load_NG: Array) -> Array:
    above_N = load_NG.max(axis=1) - load_NG.mean(axis=1)
    return np.bincount(load_NG.argmax(axis=1), above_N, load_NG.shape[1])


def links(bytes_by_link: Mapping[str, Array], runs: StageRuns | None) -> dict[str, Any]:
    """Returns the bytes that the plan moves for each rank and kind of link, and the simulated busy times in seconds."""
    busy_s_KG = None if runs is None else runs.planned.link_busy_WG.tolist()
    return {"names": LINKS, "bytes_KG": [bytes_by_link[name].tolist() for name in LINKS], "busy_s_KG": busy_s_KG}


def memory(problem: Problem, plan: Plan, trainer: Trainer | None) -> dict[str, Any]:
    """Returns the memory of every rank, the parts of the memory on the fullest rank, and whether the memory suffices."""
    held = rank_memory(problem, plan.placement, trainer=trainer)
    verdict = fit(problem, plan.placement, trainer=trainer)
    return {
        "peak_bytes_G": held.peak_G.tolist(), "parts": held.parts(), "host_bytes": host_bytes(problem, plan),
        "verdict": verdict.text(), **memory_figures(verdict),
    }  # fmt: skip


def planning(report: PlanSummary | None) -> dict[str, Any] | None:
    """Returns the statistics of planning, level by level, or None without a summary."""
    if report is None:
        return None
    return {
        "plan_s": report.plan_s, "rows": report.rows, "kept_at_start": report.rows_kept_at_start, "stops": report.stops,
        "warnings": report.warnings, "levels": [dataclasses.asdict(level) for level in report.levels],
    }  # fmt: skip
