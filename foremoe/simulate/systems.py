"""`simulate_systems`: planners side by side on the EP groups of one stage, each with its own way to know and to move weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foremoe.arrays import Array
from foremoe.errors import InputError
from foremoe.placement import skew
from foremoe.plan import Plan
from foremoe.plan_figures import FIGURES, plan_figures, stage_seconds
from foremoe.planner import Planner
from foremoe.problem import Problem
from foremoe.simulate.pipeline import PipelineStage, pipeline_problems, simulate_pipeline
from foremoe.simulate.result import Simulation
from foremoe.simulate.stage import even_routing, simulate
from foremoe.solvers import Anneal, Keep
from foremoe.solvers.home_price import price_L

# Letters: M micro-steps, L layers, E experts, G ranks.

BALANCED = "force-balanced"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One row: how it plans, and what it knows when.

    Attributes:
        planner: with its home level; the pack level has no part, the groups are dealt already.
        known, plan_s, prefetch: as in `simulate`.
        changes: fields of the problem that this system poses otherwise (``replicas``, ``redundant``, ``slots``).
        even: routing is forced to be even; the planner has no part.
    """

    planner: Planner = field(default_factory=Planner)
    known: str = "rollout"
    plan_s: float = 0.0
    prefetch: int = 2
    changes: Mapping[str, Any] = field(default_factory=dict)
    even: bool = False


def foremoe_planner() -> Planner:
    """What the row ``foremoe`` stands for: the hierarchical planner with its home level."""
    return Planner(home=Anneal())


def simulate_systems(
    groups: Sequence[Problem],
    systems: Mapping[str, System],
    *,
    pp: int = 1,
    vpp: int = 1,
    history_LE: Array | None = None,
    num_threads: int | None = None,
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Plans and simulates every EP group with every system.

    Args:
        groups: the EP groups of one stage, each with its own load; they meet at its end (gradients are synchronised), so the
            slowest one is its length.
        pp, vpp: pipeline stages that the layers are split over, and chunks of each.
        history_LE: as in `compare`.   num_threads: of the planner.
        progress: called with (system, groups done, groups in all).

    Returns:
        One dict per system: ``solver``, `FIGURES` over all groups (skews over all rows, peaks over all ranks; other figures are
        means of groups; closed-form times are the slowest group's), ``stage_s`` (simulated, moves of homes included), the parts
        of the slowest group's stage, ``moves_s`` (experts that change their home, hidden under nothing), ``apart_s`` (weights
        of plans that move homes every micro-step: in no other figure), ``tokens_per_s_per_rank``, ``stage_speedup_vs_static``,
        ``share_of_balanced`` (stage time of even routing over this one's; None without that row) and ``groups``. Figures speak
        of all micro-steps: one without history is static.
    """
    if not groups:
        raise InputError("there are no EP groups to simulate.")
    rows = [_row(name, system, groups, pp, vpp, history_LE, num_threads, progress) for name, system in systems.items()]
    static_s = next((row["predicted_stage_s"] for row in rows if row["solver"] == "static"), None)
    balanced_s = next((row["stage_s"] for row in rows if systems[row["solver"]].even), None)
    for row in rows:
        row["share_of_balanced"] = None if balanced_s is None else balanced_s / row["stage_s"]
        row["speedup_vs_static"] = None if static_s is None else static_s / row["predicted_stage_s"]
    simulated_s = next((row["stage_s"] for row in rows if row["solver"] == "static"), None)
    for row in rows:
        row["stage_speedup_vs_static"] = None if simulated_s is None else simulated_s / row["stage_s"]
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One EP group, done."""

    stages: list[PipelineStage]
    simulations: list[Simulation]
    moves_s: float
    cpu_s: float

    @property
    def stage_s(self) -> float:
        return self.simulations[0].total_s + self.moves_s


def _row(
    name: str, system: System, groups: Sequence[Problem], pp: int, vpp: int, history_LE: Array | None, num_threads: int | None,
    progress: Progress | None,
) -> dict[str, Any]:  # fmt: skip
    done = []
    for i, problem in enumerate(groups):
        done.append(_run(system, problem, pp, vpp, history_LE, num_threads))
        if progress is not None:
            progress(name, i + 1, len(groups))
    slowest = max(done, key=lambda group: group.stage_s)
    # The stage of a pipeline that waits least is the one that the others wait for.
    parts = min((s.parts for s in slowest.simulations), key=lambda part: part.bubble_s)
    tokens = sum(int(p.tokens_MG.sum()) for p in groups if p.tokens_MG is not None)
    num_ranks = sum(p.G for p in groups) * pp
    apart = [0.0 if stage.plan.executable else stage_seconds(stage.plan)[1] for stage in slowest.stages]
    return {
        "solver": name,
        **_figures(name, done),
        "stage_s": slowest.stage_s,
        **parts.to_dict(),
        "moves_s": slowest.moves_s,
        "apart_s": float(sum(apart)),
        "tokens_per_s_per_rank": tokens / slowest.stage_s / num_ranks,
        "simulated_peak_bytes": max(int(s.peak_bytes_G.max()) for group in done for s in group.simulations),
        "groups": len(groups),
    }


def _run(system: System, problem: Problem, pp: int, vpp: int, history_LE: Array | None, num_threads: int | None) -> _Group:
    planner = Planner(rank=()) if system.even else system.planner
    posed = even_routing(problem) if system.even else dataclasses.replace(problem, **system.changes)
    home_LE = posed.home_LE if planner.home == Keep() else planner.homes(posed)
    moves_s = 0.0
    if (home_LE != posed.home_LE).any():
        moves_s = float(price_L(posed, home_LE, Anneal().state_bytes).sum()) / pp  # every stage moves its own layers
        posed = dataclasses.replace(posed, home_LE=home_LE)
    planner = dataclasses.replace(planner, home=Keep())
    stages, cpu_s = [], 0.0
    for one in [posed] if pp * vpp == 1 else pipeline_problems(posed, pp, vpp):
        seen_LE = None if history_LE is None else history_LE[np.isin(problem.moe_layer_L, one.moe_layer_L)]
        plan, report = planner.plan(one, history_LE=seen_LE, num_threads=num_threads)
        cpu_s += sum(level.cpu_s for level in report.levels)
        stages.append(PipelineStage(problem=one, plan=plan))
    options: dict[str, Any] = {"prefetch": system.prefetch, "known": system.known, "plan_s": system.plan_s}
    alone = pp * vpp == 1
    simulations = [simulate(posed, stages[0].plan, **options)] if alone else simulate_pipeline(stages, **options)
    return _Group(stages=stages, simulations=simulations, moves_s=moves_s, cpu_s=cpu_s)


def _figures(name: str, done: Sequence[_Group]) -> dict[str, Any]:
    """`FIGURES` over all groups and stages."""
    pairs: list[tuple[Problem, Plan]] = [(stage.problem, stage.plan) for group in done for stage in group.stages]
    rows = [plan_figures(name, problem, plan, first=0, static_s=0.0) for problem, plan in pairs]
    skew_N = np.concatenate([skew(plan.load_NG) for _, plan in pairs])
    mean = lambda key: float(np.mean([row[key] for row in rows]))  # noqa: E731
    per_group = [sum(stage_seconds(stage.plan)[0] for stage in group.stages) + group.moves_s for group in done]
    links = rows[0]["bytes_by_link"]
    found = {
        "skew_mean": float(skew_N.mean()),
        "skew_p99": float(np.quantile(skew_N, 0.99)),
        "skew_max": float(skew_N.max()),
        **{key: mean(key) for key in ("gap_mean", "replicas_per_layer", "moves_per_layer", "bytes_per_layer", "transfer_s")},
        "max_fanout": max(row["max_fanout"] for row in rows),
        "bytes_by_link": {link: float(np.mean([row["bytes_by_link"][link] for row in rows])) for link in links},
        "predicted_stage_s": max(per_group),
        "peak_bytes": max(row["peak_bytes"] for row in rows),
        "plan_us_per_layer": 1e6 * sum(group.cpu_s for group in done) / len(skew_N),
        "n_solved": len(skew_N),
    }
    assert set(FIGURES) <= {*found, "speedup_vs_static"}
    return found
