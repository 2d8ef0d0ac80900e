"""Compares kinds of foresight by the gain and the overhead of one planner, with both kinds of dispatch.

    python -m bench.knowledge [--out bench/results/knowledge_HARDWARE_DATE.md]

Stages are simulated with the constants of the cluster preset (uncalibrated). Planning time is the CPU time of one thread of this
machine.
"""

from __future__ import annotations

import sys

from bench.output import command_line, emit, hardware
from bench.systems import synthetic_groups
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.problem.foresight import Foresight, Noisy, Rerouted
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate_foresight

VIEWS: dict[str, Foresight | None] = {
    "exact": "exact", "rerouted=0.1": Rerouted(0.1), "rerouted=1": Rerouted(1.0), "noisy=0.3": Noisy(0.3),
    "previous": "previous", "step": "step", "none": None,
}  # fmt: skip
# Regime, EP ranks, tokens per rank of a micro-step.
CASES = tuple((regime, ep, tokens) for regime in ("mild", "mid") for ep in (8, 16, 64) for tokens in (1024, 8192))
HEAD = "| what is known | skew | stage ms | x static | planning CPU ms | exposed ms | x static with it |"


def table(problem: Problem) -> str:
    """Markdown of one load; its first micro-step is history."""
    lines = [HEAD, "|" + " --- |" * 7]
    for row in simulate_foresight([problem[1:]], VIEWS, history_LE=[problem.load_MLE[0]]):
        lines.append(
            f"| {row['foresight']} | {row['skew_mean']:.3f} | {row['simulated_stage_s'] * 1e3:.1f} |"
            f" {row['speedup_vs_static']:.3f} | {row['plan_cpu_s'] * 1e3:.1f} | {row['plan_exposed_s'] * 1e3:.1f} |"
            f" {row['net_speedup_vs_static']:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--micro-steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    sections = []
    for dispatch in DISPATCHES:
        for regime, ep, tokens in CASES:
            title = f"{args.model}, EP {ep} of 8xh100, {tokens} tokens per rank, regime {regime}, dispatch {dispatch}"
            print(title, file=sys.stderr, flush=True)
            (problem,) = synthetic_groups(
                args.model, num_ranks=ep, ep=ep, tokens_per_rank=tokens, micro_steps=args.micro_steps + 1, regime=regime,
                num_layers=args.layers, cluster=Cluster.preset("8xh100", num_ranks=ep, dispatch=dispatch),
            )  # fmt: skip
            sections.append(f"## {title}\n\n{table(problem)}")
    head = (
        f"# Which knowledge pays (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.knowledge"
        f" --model {args.model} --micro-steps {args.micro_steps} --layers {args.layers}`. Simulated, uncalibrated, synthetic."
        f" Update stage of {args.micro_steps} micro-steps x {args.layers} layers, R = 1, default planner, homes in"
        " place; a micro-step before the stage is history. Skew as served on the load that comes. rerouted: a share of the"
        " (token, layer) choices has one expert swapped, served by the remap law. noisy: spread of log load. Planning is CPU"
        " time of one thread of this machine, which is shared; exposed is what of it runs under no micro-step"
        " (docs/simulator.md, Which knowledge pays).\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
