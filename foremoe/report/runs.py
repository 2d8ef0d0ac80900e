"""Simulates the stage three times, with experts at home, as planned, and with even routing, for the verdict."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foremoe.base.arrays import Array
from foremoe.machine.trainer import Trainer, step_speedups
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import PipelineRank, simulate_pipeline
from foremoe.simulate.result import Simulation
from foremoe.simulate.stage import even_routing, force_balanced, simulate
from foremoe.simulate.step import head_seconds, optimizer_seconds, reduction_seconds

# Letters: U uses, G ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns:
    """One stage of one EP group, simulated three times on the same tokens.

    Attributes:
        static: The stage with every expert at home.
        planned: The stage with the plan.
        balanced: The stage with even routing: perfect balance alone.
        ends_s: Seconds by part at the end of every stage, whatever its plan.
        moves_s: Seconds of moving homes before the planned stage.
        trainer: Optimizer, EP groups and time outside the stage.
    """

    static: Simulation
    planned: Simulation
    balanced: Simulation
    ends_s: dict[str, float]
    moves_s: float = 0.0
    trainer: Trainer = field(default_factory=Trainer)

    def parts(self) -> dict[str, dict[str, float]]:
        """Seconds by part of the three runs; each run's parts sum to its stage."""
        runs = {"static": self.static, "planned": self.planned, "balanced": self.balanced}
        parts = {name: {**run.parts.to_dict(), **self.ends_s} for name, run in runs.items()}
        parts["planned"]["moves_s"] = self.moves_s
        return parts

    def gains(self) -> dict[str, Any]:
        """Returns stage seconds and the plan's gains: of the stage, of a whole step, and relative to even routing."""
        static_s, planned_s, balanced_s = (sum(parts.values()) for parts in self.parts().values())
        return stage_gains(static_s, planned_s, balanced_s, self.trainer)


def stage_gains(static_s: float, planned_s: float, balanced_s: float, trainer: Trainer) -> dict[str, Any]:
    """Returns stage seconds and the plan's gains: of the stage, of a whole step, and relative to even routing."""
    outside_s = trainer.outside_s(static_s)
    return {
        "static_s": static_s, "planned_s": planned_s, "balanced_s": balanced_s, "speedup": static_s / planned_s,
        "step_speedup": trainer.step_speedup(planned_s, static_s), "step_speedup_at": step_speedups(planned_s, static_s),
        "share_of_balanced": balanced_s / planned_s,
        "outside_share": None if outside_s is None else outside_s / (outside_s + static_s),
    }  # fmt: skip


def run_stage(
    problem: Problem, plan: Plan, *, posed: Problem | None = None, moves_s: float = 0.0, trainer: Trainer | None = None
) -> StageRuns:
    """Simulates a plan's stage, the same stage with experts at home, and with even routing.

    Args:
        plan: A plan of `problem`.
        posed: `problem` with the homes before a home level moved any. Default: `problem`.
        moves_s: Seconds of moving those homes, once per step; the stage bears its share.
        trainer: Optimizer, EP groups and time outside the stage. Default: ``Trainer()``.

    Raises:
        InputError: As for `simulate`.
    """
    posed, trainer, head_s_MG = posed or problem, trainer or Trainer(), head_seconds(problem)
    return StageRuns(
        static=simulate(posed, Planner(rank=()).plan(posed)[0], outside_s_MG=head_s_MG),
        planned=simulate(problem, plan, outside_s_MG=head_s_MG), balanced=force_balanced(posed, outside_s_MG=head_s_MG),
        ends_s=end_seconds(problem, trainer),
        moves_s=moves_s * trainer.share_of_step(problem.M), trainer=trainer,
    )  # fmt: skip


def run_pipeline(ranks: Sequence[PipelineRank], *, outside_s_MG: Array | None, trainer: Trainer) -> list[StageRuns]:
    """Like `run_stage`, for all pipeline ranks of one EP group, including their waits for each other."""

    def without_copies(problems: Sequence[Problem]) -> list[Simulation]:
        still = [PipelineRank(problem=problem, plan=Planner(rank=()).plan(problem)[0]) for problem in problems]
        return simulate_pipeline(still, outside_s_MG=outside_s_MG)

    problems = [rank.problem for rank in ranks]
    static, balanced = without_copies(problems), without_copies([even_routing(problem) for problem in problems])
    planned = simulate_pipeline(ranks, outside_s_MG=outside_s_MG)
    ends = [end_seconds(problem, trainer) for problem in problems]
    ends_s = {name: max(end[name] for end in ends) for name in ends[0]}
    return [
        StageRuns(static=static[s], planned=planned[s], balanced=balanced[s], ends_s=ends_s, trainer=trainer)
        for s in range(len(ranks))
    ]


def late_seconds(simulation: Simulation, num_ranks: int) -> Array:
    """float64 [G]: seconds that the other ranks wait on average because this rank's experts compute longest."""
    compute_UG = simulation.compute_UG.astype(np.float64)
    waited_s_U = compute_UG.max(axis=1) - compute_UG.mean(axis=1)
    return np.bincount(compute_UG.argmax(axis=1), waited_s_U, num_ranks)


def end_seconds(problem: Problem, trainer: Trainer) -> dict[str, float]:
    """Seconds by part at the end of a stage, whatever its plan."""
    return {"reduction_s": reduction_seconds(problem, trainer), "optimizer_s": optimizer_seconds(problem, trainer)}
