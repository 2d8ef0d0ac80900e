"""The eight workloads of Megatron-LM's token-imbalance benchmark (pull request 7488), for every planner and both dispatches.

    python -m bench.imbalance [--out bench/results/imbalance_HARDWARE_DATE.md]

Simulated, constants of the cluster preset (uncalibrated); counts of foremoe.synthetic.imbalance_workload.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

from bench.output import command_line, emit, hardware
from bench.systems import group_problems
from foremoe.base.errors import InputError
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.problem import Problem
from foremoe.simulate import System, simulate_systems
from foremoe.solvers import Keep
from foremoe.synthetic import IMBALANCES, imbalance_workload

# Hours at this size: a program per row.
TOO_LONG = ("exact",)
Row = dict[str, Any]


def systems(second_set: int) -> dict[str, System]:
    """Line -> system: every strategy, those that keep homes with a second set of experts too, foremoe, and even routing."""
    planners = {name: planner for name, planner in STRATEGIES.items() if name not in TOO_LONG}
    lines = {name: System(planner=planner) for name, planner in planners.items()}
    for name, planner in planners.items():
        if planner.keeps_homes and planner.rank:
            lines[f"{name}, R = {second_set}"] = System(planner=planner, changes={"redundant": second_set})
    return {**lines, "force-balanced": System(even=True)}


def simulated(problem: Problem, history: Problem) -> tuple[list[Row], dict[str, str]]:
    """The rows of all systems that plan this problem, and why others do not."""
    lines, refused = systems(problem.B), {}
    for name, system in systems(problem.B).items():
        try:
            dataclasses.replace(system.planner, home=Keep()).plan(problem[:1].layers([0]))
        except InputError as error:
            refused[name] = str(error)
            del lines[name]
    rows = simulate_systems([problem], lines, history_LE=[history.load_MLE[0]])
    refused |= {row["solver"]: row["note"] for row in rows if not row["n_solved"]}
    return [row for row in rows if row["n_solved"]], refused


def table(columns: Mapping[str, list[Row]], cell: Callable[[Row], str], corner: str) -> str:
    """Markdown with a line per system and a column per workload."""
    lines = [f"| {corner} | slots | " + " | ".join(columns) + " |", "|" + " --- |" * (len(columns) + 2)]
    rows = {name: {row["solver"]: row for row in found} for name, found in columns.items()}
    for name in dict.fromkeys(line for found in rows.values() for line in found):
        cells = [cell(found[name]) if name in found else "-" for found in rows.values()]
        slots = max(found[name]["slots_per_rank"] for found in rows.values() if name in found)
        lines.append(f"| {name} | {slots} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def section(model: str, ep: int, dispatch: str, tokens: int, micro_steps: int, layers: int) -> str:
    """The tables of one size under one dispatch."""
    columns: dict[str, list[Row]] = {}
    left_out: dict[str, str] = {}
    for number, name in enumerate(IMBALANCES):
        print(f"{model} EP{ep} {dispatch}: {name}", file=sys.stderr, flush=True)
        work = imbalance_workload(
            model, name, num_ranks=ep, tokens_per_rank=tokens, micro_steps=micro_steps + 1, num_layers=layers
        )
        cluster = Cluster.preset("8xh100", num_ranks=ep, dispatch=dispatch)
        (problem,) = group_problems(work, model, ep, 8, cluster, 1)
        columns[f"W{number} {name}"], refused = simulated(problem[1:], problem[:1])
        left_out |= refused
    speed = table(columns, lambda row: f"{row['speedup_vs_static']:.2f} ({row['share_of_balanced']:.1%})", "x static (share)")
    balance = table(
        columns,
        lambda row: f"{row['skew_mean']:.3f}, {row['replicas_per_layer'] / ep:.2f}, {row['bytes_per_layer'] / 1e6:.0f}",
        "skew, replicas per rank, MB per row",
    )
    notes = "".join(f"\n\n{name}: left out, {reason}" for name, reason in left_out.items())
    return f"## {model}, EP {ep} of 8xh100, dispatch {dispatch}\n\n{speed}\n\n{balance}{notes}"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    sections = [
        section("qwen3-30b-a3b", ep, dispatch, args.tokens, args.micro_steps, args.layers)
        for ep in (8, 16, 64)
        for dispatch in DISPATCHES
    ]
    head = (
        f"# Eight imbalances (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.imbalance"
        f" --micro-steps {args.micro_steps} --layers {args.layers} --tokens {args.tokens}`. Simulated, uncalibrated. Workloads W0"
        " to W7 of Megatron-LM pull request 7488 as counts (foremoe/synthetic/imbalance.py says which of its figures are kept)."
        f" Update stage of {args.micro_steps} micro-steps x {args.layers} layers, {args.tokens} tokens per rank, R = 1, and again"
        " with a second set of experts (R = E/G) where homes stay. All plan ahead; a micro-step before the stage is history."
        " x static: speed-up of the simulated stage; share: stage of even routing over this one. Skew: mean of largest over mean"
        " rank load. MB: weights of every pass and gradients, per layer and micro-step. slots: redundant slots per rank that some"
        " workload needs. Moves of EPLB and of homes are charged to this stage. Left out, hours at this size:"
        f" {', '.join(TOO_LONG)}.\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
