"""Worth of every option of `Chain`: each off or changed, in the cost model's seconds and in CPU time per row.

    python -m bench.chain_options [--out bench/results/chain_options_HARDWARE_DATE.md]

Update stage, one redundant slot per rank, nodes of 8 H100. Costs are relative to `Chain` as it is; below 1 is cheaper. Under
balance the cost is the largest rank load. Times are model, uncalibrated.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.machine.cluster import Cluster
from foremoe.problem.cost import CostModel
from foremoe.problem.objective import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import Chain, NodeChain, Polish, RankSolver
from foremoe.synthetic.counts import synthetic_workload

# Model, ranks, tokens per rank, micro-steps, layers.
CASES = (
    ("mixtral-8x7b", 8, 4096, 8, 8), ("gpt-oss-20b", 16, 4096, 8, 8), ("gpt-oss-20b", 16, 512, 8, 8),
    ("qwen3-235b-a22b", 64, 4096, 8, 8),
)  # fmt: skip
# Experts times ranks up to which a line with `Polish` is measured: its time grows with their square.
POLISHED = 128

VARIANTS: dict[str, tuple[RankSolver, ...]] = {
    "Chain": (Chain(),),
    "tries=1": (Chain(tries=1),),
    "tries=64": (Chain(tries=64),),
    "spread=0": (Chain(spread=0.0),),
    "slack=0.01": (Chain(slack=0.01),),
    "relay=False": (Chain(relay=False),),
    "portfolio=0": (Chain(portfolio=0),),
    "NodeChain(0.25), inside=True": (NodeChain(max_per_rank=0.25), Chain(inside=True)),
    "and Polish": (Chain(), Polish()),
}


def solve(problem: Problem, solvers: tuple[RankSolver, ...]) -> tuple[float, float, float]:
    """Cost, replicas across nodes per row and CPU microseconds per row; the best time of three runs."""
    best_s = float("inf")
    for _ in range(3):
        begin_s, placement = time.process_time(), problem.static()
        for solver in solvers:
            placement = solver.solve(problem, placement)
        best_s = min(best_s, time.process_time() - begin_s)
    node_G, expert_NGR = problem.cluster.node_of_rank_G, placement.expert_NGS[:, :, problem.B :]
    home_NE = problem.home_LE[np.arange(problem.N) % problem.L] // problem.B
    far = 0
    for n in range(problem.N):
        held_GR = expert_NGR[n]
        far += int(((node_G[home_NE[n][held_GR]] != node_G[:, None]) & (held_GR >= 0)).sum())
    return float(row_objective(problem, placement).sum()), far / problem.N, best_s / problem.N * 1e6


def table(objective: str, dispatch: str) -> str:
    """One line per option, one column per case."""
    heads = [f"{model} EP{ranks}, {tokens} tokens" for model, ranks, tokens, _, _ in CASES]
    lines = ["| options | " + " | ".join(heads) + " |", "|" + " --- |" * (len(CASES) + 1)]
    rows: dict[str, list[str]] = {name: [] for name in VARIANTS}
    for model, ranks, tokens, micro_steps, layers in CASES:
        print(f"{objective}, {dispatch}: {model} EP{ranks}", file=sys.stderr, flush=True)
        work = synthetic_workload(
            model, num_ranks=ranks, tokens_per_rank=tokens, micro_steps=micro_steps, num_layers=layers, seed=0
        )
        cluster, cost = Cluster.preset("8xh100", num_ranks=ranks, dispatch=dispatch), CostModel(objective=objective)
        problem, first = Problem.of(work, cluster, redundant=1, cost=cost), 0.0
        for name, solvers in VARIANTS.items():
            if Polish() in solvers and (objective == "balance" or problem.E * ranks > POLISHED):
                rows[name].append("-")
                continue
            value, far, row_us = solve(problem, solvers)
            first = first or value
            rows[name].append(f"{value / first:.5f}, {far:.1f} far, {row_us:.1f} us")
    return "\n".join(lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items()])


def main() -> None:
    """Command line."""
    args = command_line(__doc__).parse_args()
    text = (
        f"# Options of Chain\n\nMeasured on: {hardware()}. Command: `python -m bench.chain_options`. Each cell: cost relative to"
        " the first line, replicas across nodes per row, CPU time per row (best of three runs, one thread). Update stage, R = 1,"
        " synthetic routing. `Polish` is measured where experts times ranks are at most"
        f" {POLISHED}; `inside` follows `NodeChain` and does not price copies. Times: model, uncalibrated.\n\n"
    )
    cases = (("time", "pairs"), ("time", "node"), ("balance", "pairs"))
    text += "\n\n".join(f"## Objective {of}, dispatch {dispatch}\n\n{table(of, dispatch)}" for of, dispatch in cases) + "\n"
    emit(text, args.out)


if __name__ == "__main__":
    main()
