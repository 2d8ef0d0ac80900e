"""Compares replica strategies with proven optima on instances drawn at run time, and prints markdown.

    python -m bench.optimality [--instances N] [--out bench/results/optimality_HARDWARE_DATE.md]

Loads come from `synthetic_workload`. Optima come from `Exact`, started from `foremoe`; an instance that it does not close
in its time counts against the bound it has proven. Loads are recomputed here, from slots and quotas alone: the planner's kernels
do not judge the planner.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.evaluator import rank_loads
from bench.output import command_line, emit, hardware
from foremoe.base.parallel import row_runner
from foremoe.machine.cluster import Cluster
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement, Stop
from foremoe.problem.problem import Problem
from foremoe.solvers import Exact
from foremoe.synthetic.counts import synthetic_workload

# Letters: N rows, G ranks, S slots per rank, E experts.

NAMES = ("static", "lplb", "quota", "least_loaded", "greedy", "foremoe")
SEEDS = range(1, 6)
MICRO_STEPS = 4
MODEL = "qwen3-30b-a3b"
WORST = 3


@dataclass
class Group:
    """The instances of one table: objective over optimum for every strategy, and where each instance comes from."""

    title: str
    over: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in NAMES})
    origin: list[str] = field(default_factory=list)
    open: int = 0

    def table(self) -> str:
        """Markdown."""
        lines = ["| strategy | mean | p99 | max |", "|" + " --- |" * 4]
        for name in NAMES:
            over = np.array(self.over[name])
            lines.append(f"| {name} | {over.mean():.5f} | {np.quantile(over, 0.99):.4f} | {over.max():.4f} |")
        ours = np.array(self.over["foremoe"])
        worst = [f"{ours[i]:.4f} ({self.origin[i]})" for i in np.argsort(-ours, kind="stable")[:WORST] if ours[i] > 1.0]
        said = f"{len(ours)} instances, {self.open} not closed." + (f" Worst of `foremoe`: {'; '.join(worst)}." * bool(worst))
        return f"### {self.title}\n\n" + "\n".join(lines) + f"\n\n{said}"


def largest_load(problem: Problem, placement: Placement, n: int) -> float:
    """What objective balance counts of row `n`."""
    return float(rank_loads(problem, placement, n).max())


def judge(group: Group, problem: Problem, origin: str, limit_s: float) -> None:
    """Adds every row of `problem` to `group`."""
    made: dict[str, Placement] = {}
    for name in NAMES:
        plan, _ = STRATEGIES[name].plan(problem)
        made[name] = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    with row_runner():
        found = Exact(node_limit=2**31 - 1, time_limit_s=limit_s).solve(problem, made["foremoe"])
    assert found.bound_N is not None and found.stop_N is not None
    for n in range(problem.N):
        closed = found.stop_N[n] == Stop.OPTIMAL
        best = largest_load(problem, found, n) if closed else float(found.bound_N[n])
        group.open += not closed
        group.origin.append(f"{origin}, micro-step {n // problem.L}, layer {n % problem.L}")
        for name, placement in made.items():
            group.over[name].append(largest_load(problem, placement, n) / best)


def balance(instances: int, limit_s: float) -> Iterator[Group]:
    """Objective balance, 128 experts: `instances` of regime mid with one slot, fewer of the others."""
    for redundant, regime, wanted in (
        (1, "mid", instances),
        (1, "mild", instances // 4),
        (1, "skew", instances // 4),
        (2, "mid", instances // 4),
        (2, "mild", instances // 8),
        (2, "skew", instances // 8),
    ):
        for num_ranks in (8, 16):
            group = Group(f"Balance, R = {redundant}, regime {regime}, 128 experts on {num_ranks} ranks")
            layers = max(1, round(wanted / 2 / len(SEEDS) / MICRO_STEPS + 0.49))
            for seed in SEEDS:
                work = synthetic_workload(
                    MODEL, num_ranks=num_ranks, tokens_per_rank=8192, micro_steps=MICRO_STEPS, num_layers=layers,
                    regime=regime, seed=seed,
                )  # fmt: skip
                cluster, cost = Cluster.preset("8xh100", num_ranks=num_ranks), CostModel(objective="balance")
                problem = Problem.of(work, cluster, redundant=redundant, cost=cost)
                judge(group, problem, f"seed {seed}", limit_s)
            yield group


def report(groups: Iterable[Group], command: str) -> str:
    """All tables, each printed to stderr as it is done."""
    sections = []
    for group in groups:
        sections.append(group.table())
        print(sections[-1] + "\n", file=sys.stderr, flush=True)
    head = (
        f"# Strategies over proven optima\n\nMeasured on: {hardware()}. Command: `{command}`. Objective of a strategy divided by "
        "the optimum of its row, or by its proven bound where it was not closed; homes contiguous and kept."
    )
    return "\n\n".join([head, *sections]) + "\n"


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--instances", type=int, default=320, help="of balance, R = 1, regime mid; the rest scales (default 320)")
    parser.add_argument("--limit", type=float, default=30.0, metavar="S", help="seconds for an instance (default 30)")
    args = parser.parse_args()
    if args.instances < 1 or not args.limit > 0.0:
        parser.error(f"--instances and --limit must be above 0; got {args.instances} and {args.limit}")

    began = time.perf_counter()
    text = report(
        balance(args.instances, args.limit), f"python -m bench.optimality --instances {args.instances} --limit {args.limit:g}"
    )
    emit(text, args.out)
    print(f"{time.perf_counter() - began:.0f} s in all", file=sys.stderr)


if __name__ == "__main__":
    main()
