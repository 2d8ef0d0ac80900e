"""Measures the gap between lower bounds and the best known placement for each case, and the time per row to compute the bounds.

    python -m bench.bounds [--layers 4] [--out bench/results/bounds_HARDWARE_DATE.md]

Loads come from `synthetic_workload`, and nodes have 8 ranks. The best known placement of a row is the cheapest of those of static
homes, `Search`, the start of `Search`, `Quota`, `Greedy`, `LeastLoaded` and `Lplb`. The gap is the excess of its cost over the
bound. A gap therefore contains both the looseness of the bound and what the search misses.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.problem.bounds import load_bound, settled_load_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import row_objective
from foremoe.problem.problem import Problem
from foremoe.solvers import Greedy, LeastLoaded, Lplb, Quota, Search
from foremoe.synthetic.counts import synthetic_workload

# Letters: N rows.

BALANCE = (
    ("mixtral-8x7b", 8), ("gpt-oss-20b", 8), ("gpt-oss-20b", 16), ("deepseek-v2-lite", 8), ("deepseek-v2-lite", 16),
    ("qwen3-30b-a3b", 8), ("qwen3-30b-a3b", 16),
)  # fmt: skip
REGIMES = ("mild", "mid", "skew", "gpt-oss-like")
WITHIN = 0.005
MICRO_STEPS = 32


@dataclasses.dataclass(frozen=True)
class Line:
    """Rows of one case: gaps to the bound, and seconds per row of it."""

    labels: tuple[str, ...]
    gap_N: Array
    bound_s: float

    def cells(self, within: float) -> str:
        """Markdown."""
        figures = [*spread(self.gap_N, within), f"{self.bound_s * 1e6:.1f}"]
        return "| " + " | ".join([*self.labels, *figures]) + " |"


def spread(gap_N: Array, within: float) -> list[str]:
    """Median and worst gap, and the share of rows that are `within`."""
    return [f"{np.median(gap_N):.2%}", f"{gap_N.max():.2%}", f"{np.mean(gap_N <= within):.0%}"]


def best_known(problem: Problem) -> Placement:
    """Row by row the smallest objective that any solver here reaches."""
    start = best = problem.static()
    solvers = (Search(effort=0), Search(), Quota(), Greedy(), LeastLoaded(min_pairs=0, threshold=1.0), Lplb())
    for placement in (solver.solve(problem, start) for solver in solvers):
        best = placement.where(row_objective(problem, placement) < row_objective(problem, best), best)
    return best


def per_row_s(problem: Problem, bound: Callable[[Problem], object]) -> float:
    """Least of five CPU seconds per row of a bound."""
    took = []
    for _ in range(5):
        fresh = dataclasses.replace(problem)
        load_bound(fresh)
        fresh.counts()
        begin_s = time.process_time()
        bound(fresh)
        took.append(time.process_time() - begin_s)
    return min(took) / problem.N


def balance(layers: int) -> Iterator[Line]:
    """Objective balance: the bound, settled where it can be."""
    for (model, ranks), regime, redundant in itertools.product(BALANCE, REGIMES, (1, 2)):
        work = synthetic_workload(
            model, num_ranks=ranks, tokens_per_rank=8192, micro_steps=MICRO_STEPS, num_layers=layers, regime=regime, seed=11
        )
        problem = Problem.of(work, Cluster.preset("8xh100", ranks), redundant=redundant, cost=CostModel(objective="balance"))
        best_N = row_objective(problem, best_known(problem))
        took_s = per_row_s(problem, lambda p, best_N=best_N: settled_load_bound(p, best_N))  # type: ignore[misc]
        bound_N = settled_load_bound(problem, best_N)
        yield Line((f"{model} EP{ranks}", regime, str(redundant)), best_N / bound_N - 1, took_s)


def table(lines: Iterator[Line]) -> str:
    """Markdown; each line is printed to stderr as it is done."""
    made = []
    for line in lines:
        made.append(line)
        print(line.cells(WITHIN), file=sys.stderr, flush=True)
    gap_N = np.concatenate([line.gap_N for line in made])
    verdict = (
        f"{gap_N.size} rows: gap median {np.median(gap_N):.2%}, worst {gap_N.max():.2%}; within {WITHIN:.1%}"
        f" {np.mean(gap_N <= WITHIN):.1%} of rows; closed {np.mean(gap_N <= 1e-9):.1%}."
    )
    columns = ["rows", "regime", "R", "median", "worst", f"within {WITHIN:.1%}", "us a row"]
    rows = [f"| {' | '.join(columns)} |", "|" + " --- |" * len(columns), *(line.cells(WITHIN) for line in made)]
    return f"## Objective balance\n\n{verdict}\n\n" + "\n".join(rows)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    text = (
        f"# Lower bounds against the best placement known\n\nMeasured on: {hardware()}. Command: `python -m bench.bounds --layers"
        f" {args.layers}`. Gap: the best known above the bound. Microseconds: of settling. Model, uncalibrated."
    )
    emit(f"{text}\n\n{table(balance(args.layers))}\n", args.out)


if __name__ == "__main__":
    main()
