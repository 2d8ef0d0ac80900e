"""When a hint pays: plans made from rollout's routing, where training routes a share of the choices otherwise.

    python -m bench.rerouting [--out bench/results/rerouting_HARDWARE_DATE.md]

Simulated, constants of the cluster preset (uncalibrated), synthetic loads.
"""

from __future__ import annotations

import sys

from bench.output import command_line, emit, hardware
from bench.systems import ULTRAEP_S, synthetic_groups
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Rerouted
from foremoe.problem.problem import Problem
from foremoe.simulate import System, simulate_systems

SHARES, HOWS = (0.0, 0.02, 0.1, 0.3, 1.0), ("swap", "redraw")
# Model, EP ranks, tokens per rank of a micro-step.
CASES = tuple(
    (model, ep, tokens)
    for model in ("qwen3-30b-a3b", "gpt-oss-120b", "deepseek-v3")
    for ep in (16, 64)
    for tokens in (1024, 8192)
)
HEAD = (
    "| choices that differ | how | skew as served | p99 | stage ms | x static | static: skew | stage ms |"
    " on line: skew | stage ms |"
)


def table(problems: list[Problem]) -> str:
    """Markdown of one load."""
    hints = {
        f"{share:.0%} | {how if share else '-'}": System(planner=Planner(foresight=Rerouted(share, how)))
        for share in SHARES for how in (HOWS if share else HOWS[:1])
    }  # fmt: skip
    beside = {"static": System(planner=Planner(rank=())), "on line": System(known="router", plan_s=ULTRAEP_S)}
    static, on_line, *rows = simulate_systems(problems, beside | hints)
    rest = " | ".join(f"{row['skew_mean']:.3f} | {row['simulated_stage_s'] * 1e3:.1f}" for row in (static, on_line))
    lines = [HEAD, "|" + " --- |" * 10]
    for row in rows:
        lines.append(
            f"| {row['solver']} | {row['skew_mean']:.3f} | {row['skew_p99']:.3f} | {row['simulated_stage_s'] * 1e3:.1f} |"
            f" {row['speedup_vs_static']:.3f} | {rest} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    sections = []
    for model, ep, tokens in CASES:
        title = f"{model}, EP {ep} of 8xh100, {tokens} tokens per rank"
        print(title, file=sys.stderr, flush=True)
        problems = synthetic_groups(
            model, num_ranks=ep, ep=ep, tokens_per_rank=tokens, micro_steps=args.micro_steps, num_layers=args.layers
        )
        sections.append(f"## {title}\n\n{table(problems)}")
    head = (
        f"# Plans from routing that is only a hint (simulated)\n\nPlanned and simulated on: {hardware()}. Command: "
        f"`python -m bench.rerouting --micro-steps {args.micro_steps} --layers {args.layers}`. Simulated, "
        f"uncalibrated, synthetic load (regime mid). Update stage of {args.micro_steps} micro-steps x {args.layers} "
        "layers, R = 1, default planner. The share is that of (token, layer) choices: "
        "swap, one expert of such a choice is another, drawn by load; redraw, all are. Plans are made from the "
        "changed routing and served on the real one by the runtime's remap law; static and on line (the exact load "
        f"after each layer's router, {ULTRAEP_S * 1e6:.0f} us of planning and forward's copies exposed) are beside "
        "each row. Exchanges of served plans are priced by the split law, which is a little kinder than remap to "
        "pairs that go home.\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
