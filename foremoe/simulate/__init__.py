"""Simulation of a stage on a cluster. The result is a timeline of events on ranks, links and copy engines."""

from foremoe.simulate.knowledge import exposed_planning, simulate_foresight
from foremoe.simulate.pipeline import PipelineRank, pipeline_problems, simulate_pipeline
from foremoe.simulate.result import LINKS, PARTS, Parts, Simulation
from foremoe.simulate.runs import Gain, Judge, StageRuns, gain, run_stage
from foremoe.simulate.stage import StageRun, even_routing, force_balanced, simulate
from foremoe.simulate.step import head_seconds, optimizer_seconds, reduction_seconds, replacement_seconds
from foremoe.simulate.systems import System, ep_groups, simulate_systems
from foremoe.simulate.trace import trace

__all__ = [
    "LINKS", "PARTS", "Gain", "Judge", "Parts", "PipelineRank", "Simulation", "StageRun", "StageRuns", "System", "ep_groups",
    "even_routing", "exposed_planning", "force_balanced", "gain", "head_seconds", "optimizer_seconds",
    "pipeline_problems", "reduction_seconds", "replacement_seconds", "run_stage", "simulate",
    "simulate_foresight", "simulate_pipeline", "simulate_systems", "trace",
]  # fmt: skip
