"""What homes do to the floor that node loads set, and what rank-level solvers make of it, inside nodes and nearly so.

    python -m bench.homes [--seeds 3] [--layers 12] [--regime mid] [--out bench/results/homes_HARDWARE_DATE.md]

Qwen3-30B-A3B, 64 ranks in nodes of 8, 8192 tokens per rank, R = 1, objective balance; then a whole Qwen3-235B-A22B update stage,
timed. Floors and skews are counted here from experts and quotas, not taken from plans.
"""

from __future__ import annotations

import dataclasses
import sys
import time

import numpy as np

from bench.evaluator import copies_N3, skew_N
from bench.output import command_line, emit, hardware
from foremoe.base.arrays import Array
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.solvers import Anneal, HomeSolver, Keep, Lpt, Search
from foremoe.synthetic.counts import synthetic_workload

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots per rank, V nodes, E experts.

SOLVERS: tuple[HomeSolver, ...] = (Keep(), Lpt(), Anneal())


def floor_N(problem: Problem, home_LE: Array) -> Array:
    """Largest node load per rank over the mean rank load, every expert served at home."""
    node_LE = problem.cluster.node_of_rank_G[home_LE // problem.B]
    size_V = np.bincount(problem.cluster.node_of_rank_G)
    out = []
    for n, load_E in enumerate(problem.load_NE):
        load_V = np.bincount(node_LE[n % problem.L], load_E, len(size_V))
        out.append((load_V / size_V).max() / (load_V.sum() / problem.G))
    return np.array(out)


def measure(micro_steps: int, seed: int, num_layers: int, regime: str) -> list[dict[str, float]]:
    """The figures of every home solver for one workload."""
    work = synthetic_workload(
        "qwen3-30b-a3b",
        num_ranks=64,
        tokens_per_rank=8192,
        micro_steps=micro_steps,
        num_layers=num_layers,
        regime=regime,
        seed=seed,
    )  # fmt: skip
    cluster = Cluster.preset("8xh100", num_ranks=64)
    problem = Problem.of(work, cluster, cost=CostModel(objective="balance"))
    rows = []
    for solver in SOLVERS:
        began = time.process_time()
        home_LE = solver.solve(problem)
        cpu_s = time.process_time() - began
        with row_runner(2):
            began = time.perf_counter()
            again_LE = solver.solve(problem)
            wall_s = time.perf_counter() - began
        assert (again_LE == home_LE).all()
        there = dataclasses.replace(problem, home_LE=home_LE)
        plan, _ = Planner().plan(dataclasses.replace(there, replicas="node"))
        inside = skew_N(there, Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS))
        placement = Search().solve(there, there.static())
        anywhere, cross = skew_N(there, placement), copies_N3(there, placement)[:, 1]
        old_LE, new_LE = problem.home_LE // problem.B, home_LE // problem.B
        node_G = cluster.node_of_rank_G
        rows.append(
            {
                "floor": floor_N(problem, home_LE).mean(), "inside": inside.mean(),
                "anywhere": anywhere.mean(), "anywhere p99": np.quantile(anywhere, 0.99),
                "cross": cross.mean() / 64, "cross max": cross.max() / 64,
                "moved": (old_LE != new_LE).sum(axis=1).mean(),
                "left node": (node_G[old_LE] != node_G[new_LE]).sum(axis=1).mean(),
                "cpu ms": cpu_s * 1e3 / num_layers, "wall ms": wall_s * 1e3 / num_layers,
            }
        )  # fmt: skip
    return rows


HEAD = (
    "| M | homes | node floor | skew, replicas inside nodes | skew, anywhere | its p99 | across per rank, mean (max) | experts"
    " moved (to another node) | ms per layer, one thread CPU | two threads wall |"
)


def quality(seeds: int, num_layers: int, regime: str) -> str:
    """One line per number of micro-steps and home solver, means over seeds and layers."""
    lines = [HEAD, "|" + " --- |" * (HEAD.count("|") - 1)]
    for micro_steps in (4, 8, 16, 32):
        print(f"M = {micro_steps} ...", file=sys.stderr, flush=True)
        runs = [measure(micro_steps, seed, num_layers, regime) for seed in range(seeds)]
        for i, solver in enumerate(SOLVERS):
            of = {name: float(np.mean([run[i][name] for run in runs])) for name in runs[0][i]}
            of["cross max"] = max(run[i]["cross max"] for run in runs)
            lines.append(
                f"| {micro_steps} | {type(solver).__name__} | {of['floor']:.4f} | {of['inside']:.4f} | {of['anywhere']:.4f} |"
                f" {of['anywhere p99']:.3f} | {of['cross']:.3f} ({of['cross max']:.3f}) |"
                f" {of['moved']:.0f} ({of['left node']:.0f}) | {of['cpu ms']:.2f} | {of['wall ms']:.2f} |"
            )
    return "\n".join(lines)


def stage() -> str:
    """Seconds of the home level for a whole update stage, and what it does."""
    lines = ["| objective | replicas | M | CPU s | wall s, two threads | layers changed | experts moved per layer |"]
    lines.append("|" + " --- |" * 7)
    cluster = Cluster.preset("8xh100", num_ranks=64)
    for micro_steps in (4, 32):
        work = synthetic_workload("qwen3-235b-a22b", num_ranks=64, tokens_per_rank=8192, micro_steps=micro_steps)
        for objective in ("balance", "time"):
            for replicas in ("node", "any"):
                problem = Problem.of(work, cluster, cost=CostModel(objective=objective), replicas=replicas)
                wall, cpu = [], []
                for _ in range(3):
                    with row_runner(2):
                        began, cpu_began = time.perf_counter(), time.process_time()
                        home_LE = Anneal().solve(problem)
                        wall.append(time.perf_counter() - began)
                        cpu.append(time.process_time() - cpu_began)
                moved_L = (home_LE // problem.B != problem.home_LE // problem.B).sum(axis=1)
                lines.append(
                    f"| {objective} | {replicas} | {micro_steps} | {min(cpu):.2f} | {min(wall):.2f} | {(moved_L > 0).sum()} of"
                    f" {problem.L} | {moved_L.mean():.0f} |"
                )
    return "\n".join(lines)


def warm_up() -> None:
    """Compiles what is timed."""
    work = synthetic_workload("qwen3-30b-a3b", num_ranks=64, tokens_per_rank=64, micro_steps=2, num_layers=1)
    for objective in ("balance", "time"):
        problem = Problem.of(work, Cluster.preset("8xh100", num_ranks=64), cost=CostModel(objective=objective), replicas="node")
        for solver in SOLVERS:
            solver.solve(problem)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--regime", default="mid")
    args = parser.parse_args()
    warm_up()
    text = (
        f"# Homes\n\nMeasured on: {hardware()}. Command: `python -m bench.homes --seeds {args.seeds} --layers {args.layers}"
        f" --regime {args.regime}`.\n\nQwen3-30B-A3B, 64 ranks in nodes of 8, 8192 tokens per rank, regime {args.regime}, R = 1,"
        f" {args.layers} layers x {args.seeds} seeds, objective balance. Floor: largest node load per rank over the mean rank"
        f" load, every expert at home. Anywhere: replicas may leave the node of their home. Means over"
        f" rows.\n\n{quality(args.seeds, args.layers, args.regime)}\n\n## The home level on an update stage\n\n"
        f"Qwen3-235B-A22B, 94 layers, 64 ranks, regime mid, `{Anneal()!r}`, best of 3; times of the cost model are"
        f" uncalibrated.\n\n{stage()}\n"
    )
    emit(text, args.out)


if __name__ == "__main__":
    main()
