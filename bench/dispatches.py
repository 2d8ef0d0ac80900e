"""Share of force-balanced and stage gain of a few systems under either dispatch and two regimes.

    python -m bench.dispatches [--out bench/results/dispatches_HARDWARE_DATE.md]

64 GPUs in nodes of 8, one table for every dispatch and regime; `bench.throughput` has all systems and the parts of their time.
Simulated, constants of the cluster preset (uncalibrated), synthetic load.
"""

from __future__ import annotations

import sys
from typing import Any

from bench.output import command_line, emit, hardware
from bench.settings import peak
from bench.systems import mean_skew, step_trainer, synthetic_groups, systems
from bench.throughput import MODELS, NUM_RANKS, overview
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.simulate import simulate_systems

REGIMES, SIZES = ("mild", "mid"), (8, 16, 32, 64)
SHOWN = (
    "static", "eplb-step", "LAER-like", "UltraEP-like", "FEPLB-like", "MoonEP-like", "ECHO-like", "LLEP", "ReLibra-like",
    "foremoe", "force-balanced",
)  # fmt: skip


Found = dict[tuple[str, int], dict[str, dict[str, Any]]]
# The table that README shows: one model, a small and a large EP group, eight systems.
SHORT, SHORT_SIZES = "qwen3-235b-a22b", (16, 64)
SHORT_SHOWN = tuple(name for name in SHOWN if name not in ("LAER-like", "FEPLB-like", "LLEP"))


def short(found: dict[tuple[str, str], Found]) -> str:
    """Speed-up over static of one model at two sizes, under both dispatches and regimes, with slots per rank."""
    heads = [f"{dispatch}, {regime}" for dispatch, regime in found]
    lines = ["| x static, EP16 / EP64 | slots per rank | " + " | ".join(heads) + " |", "|" + " --- |" * (2 + len(heads))]
    for name in SHORT_SHOWN:
        rows = [[of[SHORT, ep][name] for ep in SHORT_SIZES] for of in found.values()]
        slots = " / ".join("-" if row["slots_per_rank"] is None else str(row["slots_per_rank"]) for row in rows[0])
        if len(set(slots.split(" / "))) == 1:
            slots = slots.split(" / ")[0]
        cells = [
            " / ".join("-" if row["speedup_vs_static"] is None else f"{row['speedup_vs_static']:.2f}" for row in sizes)
            for sizes in rows
        ]  # fmt: skip
        lines.append(f"| {name} | {slots} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens-per-rank", type=int, default=8192)
    args = parser.parse_args()
    sections, everything = [], {}
    for dispatch in DISPATCHES:
        for regime in REGIMES:
            found: Found = {}
            everything[dispatch, regime] = found
            skews = []
            for model in MODELS:
                for ep in SIZES:
                    print(dispatch, regime, model, ep, file=sys.stderr, flush=True)
                    groups = synthetic_groups(
                        model, num_ranks=NUM_RANKS, ep=ep, micro_steps=args.micro_steps + 1, regime=regime,
                        num_layers=args.layers, tokens_per_rank=args.tokens_per_rank,
                        cluster=Cluster.preset("8xh100", ep, dispatch=dispatch),
                    )  # fmt: skip
                    # The first micro-step is only history.
                    problems, history = [group[1:] for group in groups], [group.load_MLE[0] for group in groups]
                    named = systems(problems[0].B)
                    shown = {name: named[name] for name in SHOWN}
                    rows = simulate_systems(problems, shown, history_LE=history, trainer=step_trainer(problems))
                    found[model, ep] = {row["solver"]: row for row in rows}
                    skews.append(mean_skew(problems))
            planned = [row for rows in found.values() for row in rows.values() if row["n_solved"]]
            fullest = max(planned, key=lambda row: row["peak_bytes"])
            span = f"skew at home {min(skews):.2f} to {max(skews):.2f}; peak memory of all rows: {peak(fullest)} GB"
            sections.append(f"## Dispatch {dispatch}, regime {regime}\n\n{span}.\n\n{overview(found)}")
    head = (
        f"# Stage gain under either dispatch (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m"
        f" bench.dispatches --micro-steps {args.micro_steps} --layers {args.layers} --tokens-per-rank {args.tokens_per_rank}`."
        f" Constants of preset 8xh100, uncalibrated. Update stage, {NUM_RANKS} GPUs in nodes of 8, R = 1, {args.tokens_per_rank}"
        f" tokens per GPU and micro-step, {args.micro_steps} micro-steps x {args.layers} layers; moves of homes are paid once per"
        " step, a recompute and an update stage of these micro-steps. eplb-step and LAER-like move weights for nothing;"
        " UltraEP-like, FEPLB-like (at most 16 ranks), MoonEP-like and ReLibra-like keep replicas inside nodes. Slots:"
        " redundant, per rank; MB: weights and gradients per rank, layer and micro-step, from the smallest to the"
        " largest of the columns. `python -m bench.throughput` says what the systems are.\n\n"
    )
    sections.insert(0, f"## {SHORT}\n\n{short(everything)}")
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
