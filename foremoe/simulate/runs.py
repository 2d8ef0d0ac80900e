"""Gains of a plan, computed from simulations of a stage with static placement, with even routing and with the plan."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from foremoe.base.arrays import Array
from foremoe.base.shown import seconds_words, table
from foremoe.machine.trainer import Trainer
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate.pipeline import PipelineRank, simulate_pipeline
from foremoe.simulate.result import Simulation
from foremoe.simulate.stage import even_routing, force_balanced, simulate
from foremoe.simulate.step import against, head_seconds, optimizer_seconds, reduction_seconds, replacement_seconds
from foremoe.solvers.home.anneal import Anneal
from foremoe.solvers.home.price import price_L


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Gain of a plan, as shown in summaries, tables and pages.

    Attributes:
        static_s: Length in seconds of the simulated stage with every expert at home.
        planned_s: Length in seconds of the stage with the plan, including moves of homes.
        balanced_s: Length in seconds of the stage with even routing, which is the time of perfect balance.
        standing: Text that says whether the cluster's constants are calibrated (`Cluster.standing`).
    """

    static_s: float
    planned_s: float
    balanced_s: float
    standing: str

    @property
    def speedup(self) -> float:
        """Speed-up of the stage over static placement."""
        return self.static_s / self.planned_s

    @property
    def share_of_balanced(self) -> float:
        """Throughput with the plan, as a share of the throughput with even routing."""
        return self.balanced_s / self.planned_s

    def _repr_html_(self) -> str:
        runs = {"at home": self.static_s, "planned": self.planned_s, "even routing": self.balanced_s}
        shown = {name: seconds_words(stage_s) for name, stage_s in runs.items()}
        gains = {"speed-up": f"{self.speedup:.2f}x", "of even routing": f"{self.share_of_balanced:.0%}"}
        return table(f"Gain ({self.standing})", {**shown, **gains})

    def __str__(self) -> str:
        digits = max(0, 2 - math.floor(math.log10(max(self.static_s, 1e-9))))  # three significant ones of the largest
        static, planned, even = (f"{stage_s:.{digits}f} s" for stage_s in (self.static_s, self.planned_s, self.balanced_s))
        seconds = f"{static} at home, {planned} with the plan, {even} with even routing"
        return f"simulated stage: {self.speedup:.2f}x ({seconds}; {self.standing})"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRuns:
    """Three simulations of one stage of one EP group with the same tokens.

    Attributes:
        static: Simulation with every expert at home.
        planned: Simulation with the plan.
        balanced: Simulation with even routing.
        ends_s: Seconds by part that are spent at the end of the stage. They are the same for every plan.
        moves_s: Time in seconds to move homes before the planned stage.
        trainer: Optimizer, number of EP groups and time outside the stage.
    """

    static: Simulation
    planned: Simulation
    balanced: Simulation
    ends_s: dict[str, float]
    moves_s: float = 0.0
    trainer: Trainer = field(default_factory=Trainer)

    def parts(self) -> dict[str, dict[str, float]]:
        """Returns the seconds by part of the three simulations. The parts of each one add up to the length of its stage."""
        runs = {"static": self.static, "planned": self.planned, "balanced": self.balanced}
        parts = {name: {**run.parts.to_dict(), **self.ends_s} for name, run in runs.items()}
        parts["planned"]["moves_s"] = self.moves_s
        return parts

    def gains(self) -> dict[str, Any]:
        """Returns stage seconds and the plan's gains in the stage, in a whole step, and against even routing."""
        static_s, planned_s, balanced_s = (sum(parts.values()) for parts in self.parts().values())
        return stage_gains(static_s, planned_s, balanced_s, self.trainer)

    def gain(self, standing: str) -> Gain:
        """Returns the gain of the plan in the stage. `standing` is the cluster's `Cluster.standing`."""
        gains = self.gains()
        return Gain(**{name: gains[name] for name in ("static_s", "planned_s", "balanced_s")}, standing=standing)


def stage_gains(static_s: float, planned_s: float, balanced_s: float, trainer: Trainer) -> dict[str, Any]:
    """Returns stage seconds and the plan's gains in the stage, in a whole step, and against even routing."""
    outside_s = trainer.outside_s(static_s)
    share = None if outside_s is None else outside_s / (outside_s + static_s)
    seconds = {"static_s": static_s, "planned_s": planned_s, "balanced_s": balanced_s, "outside_share": share}
    return seconds | against(planned_s, static_s, balanced_s, trainer)


@dataclass(frozen=True, slots=True)
class Judge:
    """Simulates plans of one problem and returns their gain. Pass it as `judge` to `foremoe.compare`.

    Attributes:
        problem: Original problem, before home levels move any expert.
        unplanned: Simulations of the stage of `problem` without a plan, with every expert at home.
    """

    FIGURES: ClassVar = ("simulated_stage_s", "speedup_vs_static", "step_speedup", "step_speedup_at", "share_of_balanced")

    problem: Problem
    unplanned: StageRuns

    @classmethod
    def of(cls, problem: Problem, trainer: Trainer | None = None) -> "Judge":
        """Creates the judge of a problem. The problem must have counts by source rank."""
        trainer, head_s_MG = trainer or Trainer(), head_seconds(problem)
        static = simulate(problem, Planner(rank=()).plan(problem)[0], outside_s_MG=head_s_MG)
        balanced = force_balanced(problem, outside_s_MG=head_s_MG)
        ends_s = _end_seconds(problem, trainer)
        return cls(problem, StageRuns(static=static, planned=static, balanced=balanced, ends_s=ends_s, trainer=trainer))

    @property
    def static_s(self) -> float:
        """Length in seconds of the stage with every expert at home."""
        return float(self.unplanned.gains()["static_s"])

    @property
    def balanced_s(self) -> float:
        """Length in seconds of the stage with even routing."""
        return float(self.unplanned.gains()["balanced_s"])

    def run(self, posed: Problem, plan: Plan, moves_s: float | None = None) -> StageRuns:
        """Simulates a plan of `posed`, which is the judge's problem with the homes of the plan.

        The time includes the stage's share of moving homes (`Trainer.micro_steps`). For a plan that moves homes between
        micro-steps, it includes `replacement_seconds`.

        Args:
            moves_s: Time in seconds to move homes once per step. Defaults to the time to move experts with all their state.
        """
        if moves_s is None:
            moves_s = float(price_L(self.problem, posed.home_LE, Anneal().state_bytes).sum())
        moves_s = moves_s * self.unplanned.trainer.share_of_step(posed.M) + replacement_seconds(posed, plan)
        planned = simulate(posed, plan, outside_s_MG=head_seconds(posed))
        return dataclasses.replace(self.unplanned, planned=planned, moves_s=moves_s)

    def __call__(self, posed: Problem, plan: Plan) -> Mapping[str, Any]:
        """Returns `FIGURES` of a plan, simulated by `run`."""
        gains = self.run(posed, plan).gains()
        return {name: gains["planned_s" if name == "simulated_stage_s" else name] for name in self.FIGURES}


def run_stage(
    problem: Problem, plan: Plan, *, posed: Problem | None = None, moves_s: float | None = None, trainer: Trainer | None = None
) -> StageRuns:
    """Simulates a stage with a plan, with static placement, and with even routing.

    Args:
        plan: Plan of `problem`.
        posed: The problem before the home level moved any experts. Defaults to `problem`.
        moves_s: Time in seconds to move homes (see `Judge.run`).
        trainer: Optimizer, number of EP groups and time outside the stage. Defaults to ``Trainer()``.

    Raises:
        InputError: The problem and the plan do not match (see `simulate`).
    """
    return Judge.of(posed or problem, trainer).run(problem, plan, moves_s)


def gain(problem: Problem, plan: Plan, *, posed: Problem | None = None, trainer: Trainer | None = None) -> Gain:
    """Simulates the whole stage with static placement, with the plan, and with even routing.

    The simulated stage includes MoE layers, attention, head, gradient reduction, optimizer, and moves of homes.

    Args:
        plan: Plan of `problem`.
        posed: The problem before the home level moved any experts. Defaults to `problem`.
        trainer: Optimizer, number of EP groups and time outside the stage. Defaults to ``Trainer()``.

    Raises:
        InputError: The problem and the plan do not match (see `simulate`).

    Example:
        >>> found = foremoe.gain(problem, plan)
        >>> f"{found.speedup:.2f}"
        '1.40'
    """
    return run_stage(problem, plan, posed=posed, trainer=trainer).gain(problem.cluster.standing)


def run_pipeline(ranks: Sequence[PipelineRank], *, outside_s_MG: Array | None, trainer: Trainer) -> list[StageRuns]:
    """Returns the result of `run_stage` for all pipeline ranks of one EP group, including their waits for each other."""

    def without_copies(problems: Sequence[Problem]) -> list[Simulation]:
        still = [PipelineRank(problem=problem, plan=Planner(rank=()).plan(problem)[0]) for problem in problems]
        return simulate_pipeline(still, outside_s_MG=outside_s_MG)

    problems = [rank.problem for rank in ranks]
    static, balanced = without_copies(problems), without_copies([even_routing(problem) for problem in problems])
    planned = simulate_pipeline(ranks, outside_s_MG=outside_s_MG)
    ends = [_end_seconds(problem, trainer) for problem in problems]
    ends_s = {name: max(end[name] for end in ends) for name in ends[0]}
    return [
        StageRuns(static=static[s], planned=planned[s], balanced=balanced[s], ends_s=ends_s, trainer=trainer)
        for s in range(len(ranks))
    ]


def _end_seconds(problem: Problem, trainer: Trainer) -> dict[str, float]:
    """Returns the seconds by part at the end of a stage, which do not depend on the plan."""
    return {"reduction_s": reduction_seconds(problem, trainer), "optimizer_s": optimizer_seconds(problem, trainer)}
