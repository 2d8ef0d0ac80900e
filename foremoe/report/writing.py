"""`write_report`: one HTML file of a plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foremoe.base.errors import InputError, file_errors
from foremoe.base.version import __version__
from foremoe.machine.trainer import Trainer
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.planner.summary import PlanSummary
from foremoe.problem.objective import price_rows
from foremoe.problem.problem import Problem
from foremoe.report.contents import headline, links, memory, parts, planning
from foremoe.report.lanes import pack_simulation, pack_timelines
from foremoe.report.packing import Packer
from foremoe.report.rows import link_bytes, pack_rows, require_belongs
from foremoe.report.strategy_table import strategy_table
from foremoe.report.template import page

if TYPE_CHECKING:
    from foremoe.transfer.timeline import Timeline


def write_report(
    path: str | os.PathLike[str], problem: Problem, plan: Plan, *, planner_report: PlanSummary | None = None,
    simulation: Any = None, timelines: Sequence[Timeline] | None = None, strategies: Sequence[Mapping[str, Any]] | None = None,
    what_if: Sequence[Mapping[str, Any]] | None = None, source: str = "", date: str = "", posed: Problem | None = None,
    moves_s: float = 0.0, trainer: Trainer | None = None,
) -> None:  # fmt: skip
    """Writes a plan's report as one HTML page that opens from disk and asks nothing of any network.

    The same arguments give the same bytes.

    Args:
        plan: A plan of `problem`.
        planner_report: Summary that `Planner.plan` returned with the plan.
        simulation: A `Simulation` of the plan, or None.
        timelines: What engines measured, one `Timeline` per rank, or None.
        strategies: Rows of `foremoe.compare`.
        what_if: Rows of `foremoe.report.what_if`.
        source: Where the load comes from, in a few words.
        date: As it shall stand on the page; default: none.
        posed: `problem` with the homes from before a home level moved some; what is static speaks of it. Default: `problem`.
        moves_s: Seconds that moving those homes takes before the stage.
        trainer: As for `rank_memory`.

    Raises:
        InputError: The plan is not of this problem, both timelines are given, or the file cannot be written.
    """
    require_belongs(problem, plan)
    if simulation is not None and timelines:
        raise InputError("a report shows a simulated or a measured timeline; give simulation= or timelines=, not both.")
    packer, head, posed = Packer(), plan.header, posed or problem
    replicas, static = Replicas.of(plan), price_rows(posed, posed.static()).reshape(plan.M, plan.L)
    bytes_by_link = link_bytes(problem, plan, replicas)
    pack_rows(packer, plan, replicas, static)
    moved = int((posed.home_LE // plan.B != plan.home_LE // plan.B).sum())
    if moved:
        packer.add("posed_rank_LE", posed.home_LE // plan.B, "uint16")
    timeline = None
    if simulation is not None:
        timeline = pack_simulation(packer, plan, replicas, simulation)
    elif timelines:
        timeline = pack_timelines(packer, plan, timelines)
    facts = {
        "version": __version__, "source": source, "date": date, "model": head.model.name, "cluster": head.cluster.name,
        "cluster_source": head.cluster.source, "standing": head.cluster.standing, "memory_bytes": head.cluster.memory_bytes,
        "stage": head.key.stage, "M": plan.M, "L": plan.L, "G": plan.G, "E": plan.E, "R": head.redundant, "S": plan.S,
        "num_nodes": head.cluster.num_nodes, "node_of_rank_G": head.cluster.node_of_rank_G.tolist(),
        "moe_layer_L": head.moe_layer_L.tolist(), "slots": repr(head.slots), "planner": head.planner,
        "objective": head.cost.objective, "executable": plan.executable, "expert_bytes": head.model.expert_bytes,
        "headline": headline(posed, plan, static.total_s, bytes_by_link),
        "moves": {"experts": moved, "seconds": moves_s} if moved else None,
        "parts": parts(plan, static.parts()),
        "links": links(bytes_by_link, simulation),
        "memory": memory(problem, plan, trainer),
        "planning": planning(planner_report),
        "simulated": None if simulation is None else {"total_s": simulation.total_s, "parts": simulation.parts.to_dict()},
        "static_simulated_s": next((row.get("simulated_stage_s") for row in strategies or () if row["solver"] == "static"), None),
        "strategies": strategy_table(strategies) if strategies else None,
        "what_if": [dict(row) for row in what_if] if what_if else None,
        "timeline": timeline,
        "arrays": packer.contents,
    }  # fmt: skip
    with file_errors(path, "write", "choose another place"):
        Path(path).write_text(page(facts, packer.text()), encoding="utf-8", newline="\n")
