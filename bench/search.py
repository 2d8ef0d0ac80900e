"""What `Search` finds beyond the default planner: simulated stages by the moves tried in a row, and what those cost.

    python -m bench.search [--efforts 0,500,2000,10000] [--out bench/results/search_HARDWARE_DATE.md]

Every stage is an update of four micro-steps and eight layers on synthetic routing of the regime mid, planned on one thread. The
first figure is the simulated stage over the default planner's, the second the processor's milliseconds for a row's search.
"""

from __future__ import annotations

import time

import numpy as np

import foremoe
from bench.output import command_line, emit, hardware
from foremoe.simulate import simulate
from foremoe.solvers import Search

# Model, ranks, tokens per rank and micro-step, redundant slots, nodes, dispatch.
CASES = (
    ("qwen3-30b-a3b", 8, 4096, 1, "8xh100", "pairs"),
    ("qwen3-30b-a3b", 16, 4096, 1, "8xh100", "pairs"),
    ("qwen3-30b-a3b", 16, 4096, 2, "8xh100", "pairs"),
    ("qwen3-30b-a3b", 64, 4096, 1, "8xh100", "pairs"),
    ("qwen3-30b-a3b", 64, 4096, 2, "8xh100", "pairs"),
    ("gpt-oss-20b", 16, 4096, 1, "8xh100", "pairs"),
    ("gpt-oss-20b", 16, 1024, 1, "8xa100", "pairs"),
    ("qwen3-235b-a22b", 64, 2048, 1, "8xh100", "pairs"),
    ("qwen3-235b-a22b", 32, 8192, 2, "8xh100", "pairs"),
    ("deepseek-v3", 64, 2048, 1, "8xh100", "pairs"),
    ("qwen3-30b-a3b", 16, 2048, 1, "8xpcie", "pairs"),
    ("qwen3-30b-a3b", 32, 4096, 2, "8xpcie", "pairs"),
    ("qwen3-30b-a3b", 16, 4096, 1, "8xh100", "node"),
    ("qwen3-235b-a22b", 64, 2048, 1, "8xh100", "node"),
)


def line(case: tuple[str, int, int, int, str, str], efforts: list[int]) -> tuple[str, list[float]]:
    """One row of the table, and the shares of the default planner's stage."""
    model, num_ranks, tokens, redundant, kind, dispatch = case
    work = foremoe.synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=4, num_layers=8, regime="mid", seed=1
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset(kind, num_ranks, dispatch=dispatch), redundant=redundant)
    plan, _ = foremoe.Planner().plan(problem, num_threads=1)
    static, _ = foremoe.resolve("static").plan(problem)
    start = foremoe.Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    default_s = simulate(problem, plan).total_s
    cells, shares = [], []
    for effort in efforts:
        solver = Search(effort)
        solver.solve(problem[:1], start.cut(N=slice(0, problem.L)))  # compiles
        begin = time.process_time()
        found, _ = foremoe.Planner(rank=(solver,), guard=False).plan(problem, start, num_threads=1)
        spent_ms = (time.process_time() - begin) / problem.N * 1e3
        shares.append(simulate(problem, found).total_s / default_s)
        cells.append(f"{shares[-1]:.3f}; {spent_ms:.1f} ms")
    name = f"{model} EP{num_ranks} {kind} {dispatch}, {tokens} tokens, R = {redundant}"
    return f"| {name} | {simulate(problem, static).total_s / default_s:.2f} | {' | '.join(cells)} |", shares


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--efforts", default="500,2000,10000", help="moves tried in a row, with commas")
    args = parser.parse_args()
    efforts = [int(effort) for effort in args.efforts.split(",")]
    lines = [
        "# Search on the price of rows", "", f"{hardware()}. Simulated stages over the default planner's; uncalibrated.", "",
        f"| stage | experts at home | {' | '.join(f'{effort} moves' for effort in efforts)} |",
        "| --- " * (2 + len(efforts)) + "|",
    ]  # fmt: skip
    shares_CF = []
    for case in CASES:
        text, shares = line(case, efforts)
        lines.append(text)
        shares_CF.append(shares)
    means = [f"{np.exp(np.log(share_C).mean()):.3f}" for share_C in np.array(shares_CF).T]
    lines.append(f"| geometric mean | | {' | '.join(means)} |")
    emit("\n".join([*lines, ""]), args.out)


if __name__ == "__main__":
    main()
