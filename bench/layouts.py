"""Compares layouts of jobs: the same tokens on the same GPUs, in EP groups side by side or with pipeline ranks.

    python -m bench.layouts [--out bench/results/layouts_HARDWARE_DATE.md]

Stages are simulated with all layers and all waits of the pipeline. The table shows them beside the estimates of `advise`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import foremoe
from bench.output import command_line, emit, hardware
from foremoe.advice.changes import Case, stage_seconds
from foremoe.base.parallel import row_runner
from foremoe.simulate import System, ep_groups, simulate_systems

# Model, regime, GPUs, tokens a rank and micro-step, micro-steps without a pipeline, dispatch.
JOBS = (
    ("qwen3-30b-a3b", "qwen3-like", 16, 8192, 8, "pairs"), ("qwen3-235b-a22b", "qwen3-like", 64, 4096, 8, "node"),
    ("deepseek-v3", "r1-like", 128, 2048, 8, "node"),
)  # fmt: skip
LAYOUTS = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8))  # EP groups, pipeline ranks


def layout_lines() -> Iterator[str]:
    """Rows of the table."""
    for model, regime, num_gpus, tokens, micro_steps, dispatch in JOBS:
        rows, name = list[tuple[list[str], tuple[float, float, float]]](), f"{model} {regime}, {num_gpus} GPUs, {dispatch}"
        for groups, pp in LAYOUTS:
            ep, trainer = num_gpus // (groups * pp), foremoe.Trainer(optimizer_bytes=0.0, data_parallel=groups)
            work = foremoe.synthetic_workload(
                model, num_ranks=ep * groups, tokens_per_rank=tokens, micro_steps=micro_steps * pp, regime=regime, seed=0
            )
            cluster, schedule = foremoe.Cluster.preset("8xh100", ep, dispatch=dispatch), foremoe.Schedule.accumulate(work.M, True)
            posed = [foremoe.Problem.of(group, cluster, schedule=schedule) for group in ep_groups(work, ep)]
            redundant = foremoe.choose_slots(posed[0], trainer=trainer, pp=pp).redundant
            posed = [dataclasses.replace(problem, redundant=redundant) for problem in posed]
            case = Case(posed[0], trainer, pp)
            systems = {"static": System(planner=foremoe.resolve("static")), "foremoe": System(planner=foremoe.Planner())}
            static, planned = simulate_systems(posed, systems, pp=pp, trainer=trainer)
            seconds = static["simulated_stage_s"], planned["simulated_stage_s"], stage_seconds(case, case)
            rows.append(([f"{ep} x {groups} x {pp}", f"{redundant}", f"{planned['peak_bytes'] / 1e9:.0f}"], seconds))
        _, first_s, first_told_s = rows[0][1]
        for cells, (static_s, planned_s, told_s) in rows:
            whole, told = first_s / planned_s, first_told_s / told_s
            figures = [f"{static_s:.2f}", f"{planned_s:.2f}", f"{whole:.3f}", f"{told:.3f}", f"{told / whole - 1.0:+.1%}"]
            yield f"| {' | '.join([name, *cells, *figures])} |"


def main() -> None:
    """Command line."""
    options = command_line(__doc__).parse_args()
    with row_runner(1):
        rows = list(layout_lines())
    text = [
        "# Layouts of a job (simulated)", "",
        f"Planned and simulated on: {hardware()}. Command: `python -m bench.layouts`. Simulated, uncalibrated: update stages on"
        " 8xh100 with all layers, activation recomputation and an offloaded optimizer. Throughput is relative to the first"
        " layout, as simulated with all waits of the pipeline, and as `advise` estimates it.", "",
        "| job | EP x DP x PP | R | peak GB | s at home | s planned | throughput | estimated | off |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |", *rows,
    ]  # fmt: skip
    emit("\n".join(text) + "\n", options.out)


if __name__ == "__main__":
    main()
