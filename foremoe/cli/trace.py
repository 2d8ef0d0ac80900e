"""``--trace`` of ``foremoe simulate``: writes timelines of a stage for Perfetto, one with static placement and one planned."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import PipelineRank, on_pipeline, simulate_pipeline
from foremoe.simulate.result import Simulation
from foremoe.simulate.step import head_seconds
from foremoe.simulate.systems import System
from foremoe.simulate.trace import trace

PREFERRED = "foremoe"


def write_trace(
    path: str, problem: Problem, history_LE: Array | None, systems: Mapping[str, System], pp: int = 1, vpp: int = 1
) -> str:
    """Writes the trace of one EP group and returns a line that describes it.

    Args:
        systems: Systems to choose from. The trace shows foremoe if it is among them, else the first system that plans.
        pp: Number of pipeline ranks. The trace shows each of them.
        vpp: Number of chunks per pipeline rank.

    Raises:
        InputError: No strategy can be shown, or the file cannot be written.
    """
    planned = {name: system for name, system in systems.items() if name != "static" and not system.even}
    if not planned:
        raise InputError("--trace needs a strategy other than static to show; add one to --planners.")
    name = PREFERRED if PREFERRED in planned else next(iter(planned))
    reason = planned[name].planner.refusal(problem)
    if reason is not None:
        raise InputError(f"--trace cannot show {name}: {reason}.")
    runs: dict[str, tuple[Plan, Simulation]] = {}
    for title, system in (("static", System(planner=Planner(rank=()))), (name, planned[name])):
        found = _runs(system, problem, history_LE, pp, vpp)
        runs |= {title if pp == 1 else f"{title}, pipeline rank {rank}": run for rank, run in enumerate(found)}
    trace(runs).save(path)
    whole = "" if pp == 1 else f" on {pp} pipeline ranks"
    return f"trace: static and {name} of the first EP group{whole}; open it at ui.perfetto.dev"


def _runs(system: System, problem: Problem, history_LE: Array | None, pp: int, vpp: int) -> list[tuple[Plan, Simulation]]:
    """Plans and simulates all pipeline ranks together."""
    moved = dataclasses.replace(problem, **system.changes, home_LE=system.planner.homes(problem))
    ranks = []
    for one in on_pipeline(moved, pp, vpp):
        seen_LE = None if history_LE is None else history_LE[np.isin(problem.moe_layer_L, one.moe_layer_L)]
        ranks.append(PipelineRank(problem=one, plan=system.planner.plan(one, history_LE=seen_LE)[0]))
    simulations = simulate_pipeline(ranks, prefetch=system.prefetch, outside_s_MG=head_seconds(problem))
    return [(rank.plan, simulation) for rank, simulation in zip(ranks, simulations, strict=True)]
