"""Simulated stages and milliseconds a row by the effort of `Search`, the moves tried in a row.

    python -m bench.search [--efforts 0,200,2000,10000] [--long 50000] [--out bench/results/search_HARDWARE_DATE.md]

Every stage is an update of four micro-steps and six layers on synthetic routing, planned on one thread. The first figure is the
simulated stage over that of the start alone (no moves), the second the processor's milliseconds a row. The long search stands for
the best known. Model, uncalibrated.
"""

from __future__ import annotations

import sys
import time

import numpy as np

import foremoe
from bench.output import command_line, emit, hardware
from foremoe.simulate import simulate
from foremoe.solvers import Search

# Model, ranks, tokens per rank and micro-step, redundant slots, nodes, dispatch, regime.
CASES = (
    ("qwen3-30b-a3b", 8, 8192, 1, "8xh100", "pairs", "mid"),
    ("qwen3-30b-a3b", 8, 1024, 2, "8xpcie", "pairs", "mid"),
    ("qwen3-30b-a3b", 16, 1024, 1, "8xh100", "pairs", "mid"),
    ("qwen3-30b-a3b", 16, 8192, 2, "8xh100", "pairs", "mild"),
    ("qwen3-30b-a3b", 64, 8192, 1, "8xh100", "pairs", "mid"),
    ("qwen3-30b-a3b", 64, 1024, 2, "8xh100", "pairs", "mild"),
    ("gpt-oss-20b", 16, 8192, 1, "8xh100", "pairs", "mid"),
    ("gpt-oss-20b", 16, 1024, 1, "8xa100", "pairs", "mid"),
    ("qwen3-235b-a22b", 64, 1024, 1, "8xh100", "pairs", "mid"),
    ("qwen3-235b-a22b", 64, 8192, 2, "8xh100", "pairs", "mild"),
    ("deepseek-v3", 64, 1024, 1, "8xh100", "pairs", "mid"),
    ("qwen3-30b-a3b", 16, 8192, 1, "8xpcie", "pairs", "mid"),
    ("qwen3-30b-a3b", 16, 8192, 1, "8xh100", "node", "mid"),
    ("gpt-oss-20b", 16, 1024, 2, "8xh100", "node", "mid"),
    ("qwen3-235b-a22b", 64, 1024, 1, "8xh100", "node", "mid"),
    ("deepseek-v3", 64, 8192, 1, "8xh100", "node", "mild"),
    ("gpt-oss-20b", 16, 1024, 1, "8xpcie", "node", "mild"),
)


def line(case: tuple[str, int, int, int, str, str, str], efforts: list[int | None]) -> tuple[str, list[float], list[float]]:
    """One row of the table, the shares of the start's stage, and the milliseconds a row."""
    model, num_ranks, tokens, redundant, kind, dispatch, regime = case
    work = foremoe.synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=4, num_layers=6, regime=regime, seed=3
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset(kind, num_ranks, dispatch=dispatch), redundant=redundant)
    static, _ = foremoe.resolve("static").plan(problem)
    cells, stages_s, spent_ms = [], [], []
    for effort in efforts:
        planner = foremoe.Planner(rank=(Search(effort),), guard=False)
        planner.plan(problem[:1])  # compiles
        plan, how = planner.plan(problem, num_threads=1)
        stages_s.append(simulate(problem, plan).total_s)
        spent_ms.append(sum(level.cpu_s for level in how.levels) / problem.N * 1e3)
        cells.append(f"{stages_s[-1] / stages_s[0]:.3f}; {spent_ms[-1]:.2f} ms")
    name = f"{model} EP{num_ranks} {kind} {dispatch}, {regime}, {tokens} tokens, R = {redundant}"
    shares = [stage_s / stages_s[0] for stage_s in stages_s]
    return f"| {name} | {simulate(problem, static).total_s / stages_s[0]:.2f} | {' | '.join(cells)} |", shares, spent_ms


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--efforts", default="0,200,2000,10000", help="moves tried in a row, with commas; the first is the base")
    parser.add_argument("--long", type=int, default=50_000, help="moves of the long search")
    args = parser.parse_args()
    few = [int(effort) for effort in args.efforts.split(",")]
    efforts: list[int | None] = [*few, args.long, None]
    names = [*(f"{effort:,} moves" for effort in few), f"{args.long:,} moves", "default"]
    lines = [
        "# What the effort of Search buys", "", f"Measured on: {hardware()}. Command: `python -m bench.search --efforts"
        f" {args.efforts} --long {args.long}`. Simulated stages over the start's, and milliseconds a row on one thread;"
        " uncalibrated.", "", f"| stage | experts at home | {' | '.join(names)} |", "| --- " * (2 + len(names)) + "|",
    ]  # fmt: skip
    shares_CF, spent_CF, kinds_C = [], [], []
    for case in CASES:
        print(*case, time.strftime("%H:%M:%S"), file=sys.stderr, flush=True)
        text, shares, spent = line(case, efforts)
        lines.append(text)
        shares_CF.append(shares)
        spent_CF.append(spent)
        kinds_C.append("one node" if case[1] == 8 else case[5])
    for kind in ("pairs", "node", "one node"):
        of_C = np.array(kinds_C) == kind
        means = np.exp(np.log(np.array(shares_CF)[of_C]).mean(axis=0))
        cells = [f"{mean:.3f}; {ms:.2f} ms" for mean, ms in zip(means, np.array(spent_CF)[of_C].mean(axis=0), strict=True)]
        lines.append(f"| geometric mean, {kind} | | {' | '.join(cells)} |")
    emit("\n".join([*lines, ""]), args.out)


if __name__ == "__main__":
    main()
