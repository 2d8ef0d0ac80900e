"""Planning, plan size, predicted gain and memory up to 4096 GPUs, as EP groups that each plan their own load.

    python -m bench.scaling [--out bench/results/scaling_HARDWARE_DATE.md]

One EP group after the other on this machine; on a cluster every group plans on its own hosts. Stage times are simulated with the
constants of the cluster preset (uncalibrated).
"""

from __future__ import annotations

import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.output import command_line, emit, hardware
from bench.systems import synthetic_groups
from foremoe.plan.figures import plan_fit
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.simulate import force_balanced, simulate

CASES = (
    ("qwen3-30b-a3b", 64, 64), ("qwen3-30b-a3b", 1024, 64), ("qwen3-30b-a3b", 4096, 64), ("qwen3-235b-a22b", 1024, 64),
    ("qwen3-235b-a22b", 1024, 128), ("deepseek-v3", 1024, 256), ("deepseek-v3", 4096, 256),
)  # fmt: skip
HEAD = (
    "| model | GPUs | EP | groups | planned groups | plan s per group, 1 thread | plan wall s per group, all threads |"
    " simulated s per group | plan MB per group | x static | share of force-balanced | skew | peak GB per GPU | peak RSS"
    " of this process GB |"
)


class Group(NamedTuple):
    """One EP group, planned and simulated."""

    plan_cpu_s: float
    wall_s: float
    simulate_s: float
    plan_bytes: int
    static_s: float
    stage_s: float
    balanced_s: float
    skew: float
    peak_bytes: int


def measured(problem: Problem) -> Group:
    """Plans the group twice (CPU time of one thread, then wall time of all), saves the plan and simulates three placements."""
    begin_s = time.process_time()
    Planner().plan(problem, num_threads=1)
    plan_cpu_s, wall_s = time.process_time() - begin_s, time.perf_counter()
    plan, _ = Planner().plan(problem)
    wall_s = time.perf_counter() - wall_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.safetensors"
        plan.save(path)
        num_bytes = path.stat().st_size
    static = Planner(rank=()).plan(problem)[0]
    begin_s = time.perf_counter()
    ours = simulate(problem, plan)
    simulate_s = time.perf_counter() - begin_s
    static_s, balanced_s = simulate(problem, static).total_s, force_balanced(problem).total_s
    return Group(
        plan_cpu_s, wall_s, simulate_s, num_bytes, static_s, ours.total_s, balanced_s, float(plan.skew_ML.mean()),
        plan_fit(problem, plan).peak_bytes,
    )  # fmt: skip


def row(model: str, num_ranks: int, ep: int, micro_steps: int, most: int) -> str:
    """One line: every group its own load, at most `most` of them planned here."""
    groups = num_ranks // ep
    found = []
    for group in range(min(groups, most)):
        print(f"{model}, {num_ranks} GPUs, EP {ep}: group {group + 1}", file=sys.stderr, flush=True)
        problem = synthetic_groups(model, num_ranks=ep, ep=ep, micro_steps=micro_steps, seed=group)[0]
        found.append(measured(problem))
    median = lambda values: float(np.median(list(values)))  # noqa: E731
    # Groups meet at the end of the stage: the slowest one is its length.
    static_s, stage_s, balanced_s = (max(getattr(g, name) for g in found) for name in ("static_s", "stage_s", "balanced_s"))
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (
        f"| {model} | {num_ranks} | {ep} | {groups} | {len(found)} | {median(g.plan_cpu_s for g in found):.2f} |"
        f" {median(g.wall_s for g in found):.2f} | {median(g.simulate_s for g in found):.2f} |"
        f" {median(g.plan_bytes for g in found) / 1e6:.1f} | {static_s / stage_s:.3f} | {balanced_s / stage_s:.1%} |"
        f" {np.mean([g.skew for g in found]):.4f} | {max(g.peak_bytes for g in found) / 1e9:.1f} | {rss / 1e9:.1f} |"
    )


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=16, help="plan at most so many groups of each case")
    args = parser.parse_args()
    measured(synthetic_groups("qwen3-30b-a3b", num_ranks=8, ep=8, micro_steps=1, num_layers=2)[0])  # compiles
    rows = [row(*case, args.micro_steps, args.groups) for case in CASES]
    text = (
        f"# Scaling (planning measured, stages simulated)\n\nMeasured on: {hardware()}. Command: `python -m bench.scaling"
        f" --micro-steps {args.micro_steps} --groups {args.groups}`. Update stage, {args.micro_steps} micro-steps of 8192 tokens"
        " per GPU, synthetic load (regime mid), nodes of 8 (8xh100, uncalibrated), R = 1, every group its own load; one"
        " group after"
        " the other here, the slowest of the planned groups is the stage (seeds are group numbers: cases with more"
        " groups than were planned repeat those of smaller ones)."
        " Plan: every row checked, transfers derived.\n\n"
    )
    emit(text + "\n".join([HEAD, "|" + " --- |" * 14, *rows]) + "\n", args.out)


if __name__ == "__main__":
    main()
