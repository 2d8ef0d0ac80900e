"""Measures every part of `Search`, by planning random stages without the part and with all parts.

    python -m bench.ablation --parts [--cases 50] [--out bench/results/ablation-parts_HARDWARE_DATE.md]

The stages are the first ones of `bench.closed_form`, on several ranks, with both kinds of dispatch. The table has one line for
each of `foremoe.solvers.search.parts.PARTS`. A figure is the simulated time of a stage without the part divided by the time with
all parts. A figure above 1 means that the part makes stages shorter. The price of a row at home determines the number of moves in
the default effort, so that the effort is the same in all lines.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import foremoe
from bench.closed_form import problem_of
from bench.output import emit, hardware
from foremoe.base.arrays import Array
from foremoe.machine.cluster import DISPATCHES
from foremoe.simulate import simulate
from foremoe.solvers import Search
from foremoe.solvers.search.parts import PARTS

HEAD = "| part | pairs: mean | worst | node: mean | worst | planning |"


def stage(problem: foremoe.Problem, search: Search) -> tuple[float, float]:
    """Simulated seconds of a stage, and CPU seconds of planning it."""
    planner = foremoe.Planner(rank=(search,), guard=False)
    planner.plan(problem[:1].layers([0]))  # compiles
    plan, how = planner.plan(problem, num_threads=1)
    return simulate(problem, plan).total_s, sum(level.cpu_s for level in how.levels)


def ratios(dispatch: str, num_cases: int) -> tuple[Array, Array]:
    """float64 [cases, parts] each: stages and planning without a part over those with all."""
    stage_CP, planning_CP = np.ones((2, num_cases, len(PARTS)))
    for case in range(num_cases):
        name, problem = problem_of(case, dispatch)
        print(dispatch, case, name, time.strftime("%H:%M:%S"), file=sys.stderr, flush=True)
        whole_s, planning_s = stage(problem, Search())
        for p, part in enumerate(PARTS):
            found_s, took_s = stage(problem, Search(without=(part,)))
            stage_CP[case, p], planning_CP[case, p] = found_s / whole_s, took_s / planning_s
    return stage_CP, planning_CP


def main(num_cases: int, out: Path | None) -> None:
    """Writes the table."""
    found = [ratios(dispatch, num_cases) for dispatch in DISPATCHES]
    planning_P = np.exp(np.log(np.concatenate([planning for _, planning in found])).mean(axis=0))
    lines = [
        "# What the parts of Search are worth",
        "",
        f"{hardware()}. Command: `python -m bench.ablation --parts --cases {num_cases}`."
        f" Simulated stages without a part over those with all, {num_cases} random stages for each dispatch: geometric means, and"
        " the stage that gains most by it. Planning: CPU time without it over that with all. Uncalibrated.", "",
        HEAD, "| --- " * 6 + "|",
    ]  # fmt: skip
    for p, part in enumerate(PARTS):
        cells = []
        for stage_CP, _ in found:
            cells += [f"{np.exp(np.log(stage_CP[:, p]).mean()):.4f}", f"{stage_CP[:, p].max():.3f}"]
        lines.append(f"| {part} | {' | '.join(cells)} | {planning_P[p]:.2f} |")
    emit("\n".join([*lines, ""]), out)
