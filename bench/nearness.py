"""Seconds of search, and how much they still find in a row: `Chain` and what is in it, against `Polish` that goes on for long.

    python -m bench.nearness [--seconds 10] [--rows 3] [--out bench/results/nearness_HARDWARE_DATE.md]

Objective time, R = 1, update stage of one micro-step, nodes of 8 H100. `Polish` starts from `Chain` and gets as many steps as fit
into the time, per row and on one thread. Costs over those of `Polish`: by the closed form, row by row, and simulated, all rows
of a case as the layers of one stage.
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import dataclass

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.objective import price_rows
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.simulate import simulate
from foremoe.solvers import Chain, Polish, RankSolver
from foremoe.synthetic.counts import synthetic_workload

# Letters: N rows.

CASES = (("gpt-oss-20b", 16), ("deepseek-v2-lite", 16), ("qwen3-30b-a3b", 16), ("qwen3-30b-a3b", 32))
REGIMES, TOKENS = ("mild", "mid"), 4096
ARMS: dict[str, Chain] = {
    "Chain(tries=1, portfolio=0)": Chain(tries=1, portfolio=0),
    "Chain(portfolio=0)": Chain(portfolio=0),
    "Chain()": Chain(),
}


@dataclass(frozen=True)
class Given(RankSolver):
    """Gives the rows that it holds."""

    placement: Placement

    def solve(self, problem: Problem, start: Placement) -> Placement:
        """See `RankSolver`."""
        return self.placement


def posed(model: str, num_ranks: int, dispatch: str, regime: str, num_rows: int) -> Problem:
    """One micro-step of `num_rows` layers."""
    work = synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=TOKENS, micro_steps=1, num_layers=num_rows, regime=regime, seed=7
    )  # fmt: skip
    return Problem.of(work, Cluster.preset("8xh100", num_ranks, dispatch=dispatch), redundant=1)


def timed(solver: RankSolver, problem: Problem, start: Placement) -> tuple[Placement, float]:
    """Placement of the solver, and CPU seconds per row."""
    begin_s = time.process_time()
    found = solver.solve(problem, start)
    return found, (time.process_time() - begin_s) / problem.N


def polished(problem: Problem, start: Placement, seconds: float) -> tuple[Placement, float]:
    """`Polish` for about so many seconds per row."""
    few = 50
    timed(Polish(steps=1), problem, start)
    per_step_s = timed(Polish(steps=few), problem, start)[1] / few
    return timed(Polish(steps=max(few, int(seconds / per_step_s))), problem, start)


def stage_seconds(problem: Problem, placement: Placement) -> float:
    """Simulated seconds of the rows as one stage."""
    plan, _ = Planner(rank=(Given(placement),), guard=False).plan(problem)
    return simulate(problem, plan).total_s


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()
    heads = [f"{name}: closed form, worst row, simulated, us" for name in ARMS]
    lines = ["| rows | " + " | ".join(heads) + " | search s per row |", "|" + " --- |" * (len(ARMS) + 2)]
    ratios = []
    for (model, num_ranks), dispatch, regime in itertools.product(CASES, DISPATCHES, REGIMES):
        print(model, num_ranks, dispatch, regime, file=sys.stderr, flush=True)
        problem = posed(model, num_ranks, dispatch, regime, args.rows)
        # Timings need more rows than a long search can afford.
        many, cells = posed(model, num_ranks, dispatch, regime, 24), []
        best, search_s = polished(problem, Chain().solve(problem, problem.static()), args.seconds)
        best_N, best_s = price_rows(problem, best).total_s, stage_seconds(problem, best)
        for name, solver in ARMS.items():
            found = solver.solve(problem, problem.static())
            over_N, over = price_rows(problem, found).total_s / best_N, stage_seconds(problem, found) / best_s
            row_s = min(timed(solver, many, many.static())[1] for _ in range(5))
            cells.append(f"{over_N.mean():.4f}, {over_N.max():.4f}, {over:.4f}, {row_s * 1e6:.0f}")
            if name == "Chain()":
                ratios.append((over_N, over))
        lines.append(f"| {model} EP{num_ranks}, {dispatch}, {regime} | " + " | ".join(cells) + f" | {search_s:.1f} |")
    row_N = np.concatenate([over_N for over_N, _ in ratios])
    stage = np.array([over for _, over in ratios])
    verdict = (
        f"`Chain()` over the search, {row_N.size} rows: mean {row_N.mean():.4f}, worst {row_N.max():.4f}, within 2 %"
        f" {np.mean(row_N <= 1.02):.0%}; simulated, {stage.size} stages: mean {stage.mean():.4f}, worst {stage.max():.4f}."
    )
    text = (
        f"# What a long search still finds\n\nMeasured on: {hardware()}. Command: `python -m bench.nearness --seconds"
        f" {args.seconds:g} --rows {args.rows}`. {TOKENS} tokens per rank; costs over those of `Polish`; times: best of five runs"
        f" over 24 rows, one thread. Model, uncalibrated.\n\n{verdict}\n\n"
    )
    emit(text + "\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
