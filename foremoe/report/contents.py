"""What the page says: the figures and words of one plan as plain values, and its arrays packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.version import __version__
from foremoe.plan.figures import stage_seconds
from foremoe.plan.plan import Plan
from foremoe.problem.objective import peak_bytes
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.report.lanes import pack_simulation, pack_timelines
from foremoe.report.packing import Packer
from foremoe.report.rows import link_bytes, pack_rows, replicas_of, require_belongs, static_cost
from foremoe.report.strategy_table import strategy_table
from foremoe.simulate.result import LINKS
from foremoe.workload.skew import skew

if TYPE_CHECKING:
    from foremoe.planner.summary import PlanSummary
    from foremoe.transfer.timeline import Timeline

# Letters: M micro-steps, L layers, G ranks, K link classes and directions.


def contents(
    problem: Problem,
    plan: Plan,
    *,
    planner_report: PlanSummary | None = None,
    simulation: Any = None,
    timelines: Sequence[Timeline] | None = None,
    strategies: Sequence[Mapping[str, Any]] | None = None,
    what_if: Sequence[Mapping[str, Any]] | None = None,
    source: str = "",
    date: str = "",
    posed: Problem | None = None,
    moves_s: float = 0.0,
) -> tuple[dict[str, Any], str]:
    """The page's facts (plain JSON values) and its packed arrays; arguments as for `write_report`."""
    require_belongs(problem, plan)
    if simulation is not None and timelines:
        raise InputError("a report shows a simulated or a measured timeline; give simulation= or timelines=, not both.")
    packer = Packer()
    posed = posed or problem
    replicas, static = replicas_of(plan), static_cost(posed)
    pack_rows(packer, plan, replicas, static)
    moved = int((posed.home_LE // plan.B != plan.home_LE // plan.B).sum())
    if moved:
        packer.add("posed_rank_LE", posed.home_LE // plan.B, "uint16")
    timeline = None
    if simulation is not None:
        timeline = pack_simulation(packer, plan, replicas, simulation)
    elif timelines:
        timeline = pack_timelines(packer, plan, timelines)
    head = plan.header
    bytes_by_link = link_bytes(problem, plan, replicas)
    facts = {
        "version": __version__,
        "source": source,
        "date": date,
        "model": head.model.name,
        "cluster": head.cluster.name,
        "cluster_source": head.cluster.source,
        "calibrated": head.cluster.calibrated,
        "memory_bytes": head.cluster.memory_bytes,
        "stage": head.key.stage,
        "M": plan.M,
        "L": plan.L,
        "G": plan.G,
        "E": plan.E,
        "R": head.redundant,
        "S": plan.S,
        "num_nodes": head.cluster.num_nodes,
        "node_of_rank_G": head.cluster.node_of_rank_G.tolist(),
        "moe_layer_L": head.moe_layer_L.tolist(),
        "slots": repr(head.slots),
        "planner": head.planner,
        "objective": head.cost.objective,
        "executable": plan.executable,
        "expert_bytes": head.model.expert_bytes,
        "headline": headline(posed, plan, static.total_s, bytes_by_link),
        "moves": {"experts": moved, "seconds": moves_s} if moved else None,
        "parts": parts(plan, static.parts()),
        "links": links(bytes_by_link, simulation),
        "memory": memory(problem, plan, simulation),
        "planning": planning(planner_report),
        "simulated": simulated(simulation),
        "static_simulated_s": next((row.get("stage_s") for row in strategies or () if row["solver"] == "static"), None),
        "strategies": None if not strategies else strategy_table(strategies),
        "what_if": None if not what_if else [dict(row) for row in what_if],
        "timeline": timeline,
        "arrays": packer.contents,
    }
    return facts, packer.text()


def headline(posed: Problem, plan: Plan, static_s_ML: Array, bytes_by_link: Mapping[str, Array]) -> dict[str, Any]:
    """The numbers at the top of the page."""
    before_ML, after_ML = skew(posed.static().load_NG()).reshape(plan.M, plan.L), plan.skew_ML
    spread = lambda skew_ML: {  # noqa: E731
        "mean": float(skew_ML.mean()),
        "p99": float(np.quantile(skew_ML, 0.99)),
        "max": float(skew_ML.max()),
    }
    return {
        "before": spread(before_ML),
        "after": spread(after_ML),
        "replicas_per_rank": plan.num_replicas / (plan.N * plan.G) if plan.executable else None,
        "static_s": float(static_s_ML.sum()),
        "planned_s": stage_seconds(plan)[0],
        "bytes": {name: float(bytes_by_link[f"{name} in"].sum()) for name in ("peer", "rdma", "host")},
        "gap_mean": float(plan.load_gap_ML.mean()),
        "gap_max": float(plan.load_gap_ML.max()),
    }


def parts(plan: Plan, static: Mapping[str, Array]) -> dict[str, dict[str, float]]:
    """Predicted seconds of the stage by part, static and planned."""
    planned = {name: float(part.sum()) for name, part in plan.cost_ML.parts().items()}
    if not plan.executable:
        planned["transfer_s"] = planned["gradient_s"] = 0.0
    return {"static": {name: float(part.sum()) for name, part in static.items()}, "planned": planned}


def links(bytes_by_link: Mapping[str, Array], simulation: Any) -> dict[str, Any]:
    """Per rank and link class: bytes by the plan, and seconds busy by the simulation if there is one."""
    busy_WG = None if simulation is None else np.asarray(simulation.link_busy_WG, np.float64)
    return {
        "names": LINKS,
        "bytes_KG": [bytes_by_link[name].tolist() for name in LINKS],
        "busy_s_KG": None if busy_WG is None else busy_WG.tolist(),
    }


def memory(problem: Problem, plan: Plan, simulation: Any) -> dict[str, Any]:
    """Peak bytes of every rank."""
    if simulation is not None:
        return {"kind": "simulated", "peak_bytes_G": np.asarray(simulation.peak_bytes_G).tolist()}
    placement = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    return {"kind": "model", "peak_bytes_G": peak_bytes(problem, placement).tolist()}


def planning(report: PlanSummary | None) -> dict[str, Any] | None:
    """How planning went, level by level."""
    if report is None:
        return None
    return {
        "plan_s": report.plan_s,
        "rows": report.rows,
        "kept_at_start": report.rows_kept_at_start,
        "stops": dict(report.stops),
        "warnings": list(report.warnings),
        "levels": [
            {
                "solver": level.solver,
                "seconds": level.seconds,
                "cpu_s": level.cpu_s,
                "skew_mean": level.skew_mean,
                "objective_sum": level.objective_sum,
                "rows_improved": level.rows_improved,
            }
            for level in report.levels
        ],
    }


def simulated(simulation: Any) -> dict[str, Any] | None:
    """The simulated stage by part."""
    if simulation is None:
        return None
    return {"total_s": float(simulation.total_s), "parts": simulation.parts.to_dict()}
