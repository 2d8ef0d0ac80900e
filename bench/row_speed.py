"""Compares the CPU time per row of the default planner in this checkout and in another one, alternated in one run.

    python -m bench.row_speed --against PATH [--times 21] [--out bench/results/row_speed_HARDWARE_DATE.md]

Each checkout plans in its own process. The processes take turns, so that both run under the same conditions. They use one core,
because two threads of a core would be charged for waiting for each other. The first plan may compile kernels and is not counted.
A ratio below 1 means that this checkout is faster.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path

from bench.output import command_line, emit, hardware

# Model, ranks, micro-steps, layers, objective: some tenths of a second per plan.
CASES = tuple(
    (*case, objective)
    for case in (
        ("gpt-oss-20b", 8, 32, 24),
        ("gpt-oss-20b", 16, 32, 24),
        ("qwen3-30b-a3b", 16, 16, 48),
        ("qwen3-30b-a3b", 64, 8, 48),
        ("deepseek-v3", 256, 4, 24),
    )
    for objective in ("time", "balance")
)
PLANS = 3  # of a process
# Runs in either checkout: names that both have. Prints CPU microseconds per row for every line that it reads.
WORKER = """
import dataclasses, os, sys, time
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
import foremoe
from foremoe import Cluster, Planner, Problem
model, ranks, micro_steps, layers, objective = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
sizes = dict(num_ranks=ranks, tokens_per_rank=4096, micro_steps=micro_steps, num_layers=layers)
work = foremoe.synthetic_workload(model, **sizes)
problem = Problem.of(work, Cluster.preset("8xh100", num_ranks=ranks), redundant=1, cost=foremoe.CostModel(objective=objective))
Planner().plan(problem)
print("ready", flush=True)
for line in sys.stdin:
    again = dataclasses.replace(problem)  # what a problem works out once is part of a plan's time
    start = time.process_time()
    Planner().plan(again)
    print((time.process_time() - start) / problem.N * 1e6, flush=True)
"""


class Planning:
    """A process that plans one case in a checkout."""

    def __init__(self, checkout: Path, case: tuple[object, ...]) -> None:
        command = [sys.executable, "-c", WORKER, *map(str, case)]
        self._process = subprocess.Popen(command, cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"planning ended with code {self._process.wait()}")
        return line

    def row_us(self) -> float:
        """CPU microseconds per row of one more plan."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate()


def compare(this: Path, other: Path, case: tuple[object, ...], times: int) -> tuple[float, float, float]:
    """Median microseconds per row here and there, and the median of the ratios of neighbouring plans.

    Every few plans come from new processes: where machine code and arrays lie makes one up to a fifth slower than the next.
    """
    pairs = []
    for _ in range(0, times, PLANS):
        here, there = Planning(this, case), Planning(other, case)
        for i in range(PLANS):
            first, second = (here, there) if i % 2 == 0 else (there, here)
            a, b = first.row_us(), second.row_us()
            pairs.append((a, b) if i % 2 == 0 else (b, a))
        here.close()
        there.close()
    here_us, there_us = (statistics.median(side) for side in zip(*pairs, strict=True))
    return here_us, there_us, statistics.median(a / b for a, b in pairs)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--against", type=Path, required=True, help="another checkout of foremoe")
    parser.add_argument("--times", type=int, default=21, help="plans of each checkout per case")
    arguments = parser.parse_args()
    this, other = Path(__file__).resolve().parents[1], arguments.against.resolve()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=other, capture_output=True, text=True, check=False)
    lines = [
        "# CPU time of the default planner per row", "", f"{hardware()}; against commit {commit.stdout.strip() or 'unknown'}.",
        f"Medians of {arguments.times} plans each, alternated, {PLANS} of a process; the ratio is the median of neighbours.", "",
        "| model | ranks | rows | objective | here us | there us | ratio |", "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for case in CASES:
        model, ranks, micro_steps, layers, objective = case
        here_us, there_us, ratio = compare(this, other, case, arguments.times)
        lines.append(
            f"| {model} | {ranks} | {micro_steps * layers} | {objective} | {here_us:.0f} | {there_us:.0f} | {ratio:.3f} |"
        )
    emit("\n".join(lines) + "\n", arguments.out)


if __name__ == "__main__":
    main()
