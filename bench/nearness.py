"""Seconds of search, and how much they still find in a row: `Chain` and what is in it, against `Polish` that goes on for long.

    python -m bench.nearness [--seconds 10] [--rows 3] [--out bench/results/nearness_HARDWARE_DATE.md]

Objective time, R = 1, update stage, nodes of 8 H100. `Polish` starts from `Chain` and gets as many steps as fit into the time,
per row and on one thread; a few of its steps are arms of their own. Costs over those of the long search: by the closed form, row
by row, and simulated, all rows of a case as the layers of a stage of eight equal micro-steps: in one alone, the first layer's
copies have nothing to hide under, which no longer stage sees.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from dataclasses import dataclass

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.base.arrays import Array
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.objective import price_rows
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.simulate import simulate
from foremoe.solvers import Chain, Polish, RankSolver
from foremoe.synthetic.counts import synthetic_workload

# Letters: N rows.

CASES = (("gpt-oss-20b", 16), ("deepseek-v2-lite", 16), ("qwen3-30b-a3b", 16), ("qwen3-30b-a3b", 32))
REGIMES, TOKENS = ("mild", "mid"), 4096
REPEATS = 8
ARMS: dict[str, tuple[RankSolver, ...]] = {
    "Chain(portfolio=0)": (Chain(portfolio=0),),
    "Chain()": (Chain(),),
    "Polish(3)": (Chain(), Polish(steps=3)),
    "Polish(10)": (Chain(), Polish(steps=10)),
    "Polish(30)": (Chain(), Polish(steps=30)),
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


def timed(solvers: tuple[RankSolver, ...], problem: Problem, start: Placement) -> tuple[Placement, float]:
    """Placement of solvers, one after the other, and CPU seconds per row."""
    begin_s = time.process_time()
    for solver in solvers:
        start = solver.solve(problem, start)
    return start, (time.process_time() - begin_s) / problem.N


def polished(problem: Problem, start: Placement, seconds: float) -> tuple[Placement, float]:
    """`Polish` for about so many seconds per row."""
    few = 50
    timed((Polish(steps=1),), problem, start)
    per_step_s = timed((Polish(steps=few),), problem, start)[1] / few
    return timed((Polish(steps=max(few, int(seconds / per_step_s))),), problem, start)


def stage_seconds(problem: Problem, placement: Placement) -> float:
    """Simulated seconds of a stage that runs the rows as its layers, `REPEATS` times."""
    schedule = Schedule.plain(problem.stage, REPEATS)
    longer = dataclasses.replace(problem, schedule=schedule, **Problem.join_arrays([problem] * REPEATS, "M"))
    rows = np.tile(np.arange(problem.N), REPEATS)
    plan, _ = Planner(rank=(Given(placement.cut(N=rows)),), guard=False).plan(longer)
    return simulate(longer, plan).total_s


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rows", type=int, default=4)
    args = parser.parse_args()
    heads = [f"{name}: closed form, worst row, simulated, us" for name in ARMS]
    lines = ["| rows | " + " | ".join(heads) + " | search s per row |", "|" + " --- |" * (len(ARMS) + 2)]
    ratios: dict[str, list[tuple[Array, float, float]]] = {name: [] for name in ARMS}
    for (model, num_ranks), dispatch, regime in itertools.product(CASES, DISPATCHES, REGIMES):
        print(model, num_ranks, dispatch, regime, file=sys.stderr, flush=True)
        problem = posed(model, num_ranks, dispatch, regime, args.rows)
        # Timings need more rows than a long search can afford.
        many, cells = posed(model, num_ranks, dispatch, regime, 24), []
        best, search_s = polished(problem, Chain().solve(problem, problem.static()), args.seconds)
        best_N, best_s = price_rows(problem, best).total_s, stage_seconds(problem, best)
        for name, solvers in ARMS.items():
            found, _ = timed(solvers, problem, problem.static())
            over_N, over = price_rows(problem, found).total_s / best_N, stage_seconds(problem, found) / best_s
            row_s = min(timed(solvers, many, many.static())[1] for _ in range(5))
            cells.append(f"{over_N.mean():.4f}, {over_N.max():.4f}, {over:.4f}, {row_s * 1e6:.0f}")
            ratios[name].append((over_N, over, row_s))
        lines.append(f"| {model} EP{num_ranks}, {dispatch}, {regime} | " + " | ".join(cells) + f" | {search_s:.1f} |")
    verdict = "| planner | rows | mean | worst | within 2 % | stages, simulated: mean | worst | us per row, mean |\n"
    verdict += "| --- " * 8 + "|"
    for name, cases in ratios.items():
        row_N, stage = np.concatenate([over_N for over_N, _, _ in cases]), np.array([over for _, over, _ in cases])
        verdict += (
            f"\n| {name} | {row_N.size} | {row_N.mean():.4f} | {row_N.max():.4f} | {np.mean(row_N <= 1.02):.0%}"
            f" | {stage.mean():.4f} | {stage.max():.4f} | {1e6 * np.mean([row_s for _, _, row_s in cases]):.0f} |"
        )
    text = (
        f"# What a long search still finds\n\nMeasured on: {hardware()}. Command: `python -m bench.nearness --seconds"
        f" {args.seconds:g} --rows {args.rows}`. {TOKENS} tokens per rank; costs over those of the search; `Polish(n)`:"
        f" n of its steps after `Chain()`; times: best of five over 24 rows, one thread. Model, uncalibrated.\n\n{verdict}\n\n"
    )
    emit(text + "\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
