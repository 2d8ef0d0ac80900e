"""`write_report` and `write_job_report`, which write an HTML page about a plan or a job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foremoe.advice.changes import Advice
from foremoe.base.files import write_file
from foremoe.base.version import __version__
from foremoe.machine.trainer import Trainer
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.planner.strategies import STRATEGIES
from foremoe.planner.summary import PlanSummary
from foremoe.problem.pricing import price
from foremoe.problem.problem import Problem
from foremoe.report.contents import headline, late, links, memory, parts, planning, simulated
from foremoe.report.job import JobPart, job_facts, job_gains, slowest_words
from foremoe.report.packing import Packer
from foremoe.report.reasons import best_copies
from foremoe.report.rows import link_bytes, pack_reasons, pack_rows, require_belongs
from foremoe.report.strategy_table import strategy_table
from foremoe.report.template import Block, page
from foremoe.report.verdict import verdict
from foremoe.simulate.runs import StageRuns
from foremoe.workload.packing import AsGiven

if TYPE_CHECKING:
    from foremoe.transfer.timeline import Timeline


def write_report(
    path: str | os.PathLike[str], problem: Problem, plan: Plan, *, planner_report: PlanSummary | None = None,
    runs: StageRuns | None = None, timelines: Sequence[Timeline] | None = None,
    strategies: Sequence[Mapping[str, Any]] | None = None, advice: Advice | None = None, source: str = "", date: str = "",
    command: str = "", posed: Problem | None = None, moves_s: float = 0.0, trainer: Trainer | None = None,
) -> None:  # fmt: skip
    """Writes a report about a plan as a single HTML page, which can be opened from disk and needs no network.

    Equal arguments give equal bytes.

    Args:
        path: The HTML file to write.
        problem: The problem for which the plan was made.
        plan: Plan of `problem`.
        planner_report: Summary that `Planner.plan` returned with the plan.
        runs: Simulated stage, as returned by `run_stage` for the plan, or None.
        timelines: Measured timelines, one `Timeline` per rank, or None. The page shows how long ranks waited for copies.
        strategies: Rows of the table of strategies, as returned by `foremoe.compare`.
        advice: Result of `foremoe.advise` for the original problem.
        source: Short description of the origin of the load.
        date: Date to show on the page. By default, the page shows no date.
        command: Command that writes the page again, to show on the page. By default, the page shows no command.
        posed: The problem before a home level moved any experts. The page computes the figures of static placement from it.
            Defaults to `problem`.
        moves_s: Time in seconds to move experts to their new homes before the stage.
        trainer: Settings of the training around the stage, as in `rank_memory`.

    Raises:
        InputError: The plan does not belong to the problem, or the file cannot be written.
    """
    strategies_shown = strategy_table(strategies) if strategies else None
    block = _block(problem, plan, planner_report, runs, trainer=trainer, timelines=timelines, posed=posed, moves_s=moves_s)
    told = {} if advice is None else {"advice": str(advice), "changes": advice.rows()}
    block.facts.update(source=source, date=date, command=command, strategies=strategies_shown, **told)
    block.facts["verdict"] = verdict(block.facts, plan.header.cluster)
    write_file(path, page([block]))


def write_job_report(
    path: str | os.PathLike[str], parts: Sequence[JobPart], *, strategies: Sequence[Mapping[str, Any]] | None = None,
    source: str = "", date: str = "", command: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Writes a report about several EP groups and pipeline ranks as a single HTML page. The page shows the slowest part first.

    Args:
        path: The HTML file to write.
        parts: Parts of the job, as returned by `plan_job`.
        strategies: Rows of the table of strategies, as returned by `simulate_systems` for the same EP groups.
        source: Origin of the load, as in `write_report`.
        date: Date to show, as in `write_report`.
        command: Command to show, as in `write_report`.

    Returns:
        Dict with the verdict on the job: texts in ``gain``, ``details`` and ``sure``, and bools in ``gains`` and ``fits``.

    Raises:
        InputError: The file cannot be written.
    """
    strategies_shown = strategy_table(strategies) if strategies else None
    blocks = [_block(part.problem, part.plan, part.summary, part.runs, trainer=part.runs.trainer) for part in parts]
    job = job_facts(parts)
    slowest = blocks[job["slowest"]].facts
    memory = max((block.facts["memory"] for block in blocks), key=lambda held: max(held["peak_bytes_G"]))
    told = verdict(
        {**slowest, "memory": memory, "simulated": {**slowest["simulated"], "gains": job_gains(parts)}},
        parts[job["slowest"]].plan.header.cluster,
    )
    told["details"].append(slowest_words(parts, job["slowest"]))
    for block in blocks:
        block.facts.update(source=source, date=date, command=command, strategies=strategies_shown, verdict=told)
    write_file(path, page(blocks, job))
    return told


def _block(
    problem: Problem, plan: Plan, planner_report: PlanSummary | None, runs: StageRuns | None, *, trainer: Trainer | None,
    timelines: Sequence[Timeline] | None = None, posed: Problem | None = None, moves_s: float = 0.0,
) -> Block:  # fmt: skip
    """Returns the data that the page shows about one plan. The arguments are those of `write_report`."""
    posed = posed or problem
    require_belongs(problem, plan)
    packer, head = Packer(), plan.header
    replicas, static = Replicas.of(plan), price(posed, posed.static()).reshape(plan.M, plan.L)
    bytes_by_link = link_bytes(problem, plan, replicas)
    pack_rows(packer, plan, replicas, static)
    pack_reasons(packer, best_copies(problem, plan))
    moved = int((posed.home_LE // plan.B != plan.home_LE // plan.B).sum())
    if moved:
        packer.add("posed_rank_LE", posed.home_LE // plan.B, "uint16")
    facts = {
        "version": __version__, "model": head.model.name,
        "cluster": head.cluster.name, "cluster_source": head.cluster.source, "standing": head.cluster.standing,
        "memory_bytes": head.cluster.memory_bytes, "stage": head.key.stage, "M": plan.M, "L": plan.L, "G": plan.G, "E": plan.E,
        "R": head.redundant, "S": plan.S, "num_nodes": head.cluster.num_nodes,
        "node_of_rank_G": head.cluster.node_of_rank_G.tolist(), "moe_layer_L": head.moe_layer_L.tolist(),
        "slot_depth": head.slot_depth, "planner": _planner_name(head.planner), "objective": head.cost.objective,
        "executable": plan.executable,
        "expert_bytes": head.model.expert_bytes,
        "headline": headline(posed, plan, static.total_s, bytes_by_link),
        "moves": {"experts": moved, "seconds": moves_s} if moved else None,
        "parts": parts(plan, static.parts()),
        "late": late(posed, plan, runs),
        "links": links(bytes_by_link, runs),
        "memory": memory(problem, plan, trainer),
        "planning": planning(planner_report),
        "simulated": simulated(runs),
        "waited_s": max(timeline.exposed_s for timeline in timelines) if timelines else None,
        "arrays": packer.contents,
    }  # fmt: skip
    return Block(facts, packer.text())


def _planner_name(text: str) -> str:
    """Returns the name of the strategy with this repr, which is shorter, or the repr itself if no strategy has it."""
    names = {repr(planner): name for name, planner in STRATEGIES.items()}
    shuffled = {repr(planner.using(AsGiven(shuffle=True))): f"{name}, sequences shuffled" for name, planner in STRATEGIES.items()}
    return (shuffled | names).get(text, text)
