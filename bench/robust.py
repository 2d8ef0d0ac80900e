"""Compares plans without exact foresight, for several kinds of foresight, values of R and planners, with equal numbers of slots.

    python -m bench.robust [--out bench/results/robust_HARDWARE_DATE.md]

Skew is computed from quotas on the real load. Times are simulated with the constants of the cluster preset (uncalibrated).
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np

from bench.cases import ESFT
from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES, under
from bench.systems import group_problems, recorded_workload, synthetic_groups
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import STRATEGIES
from foremoe.problem.foresight import Foresight, Noisy
from foremoe.problem.problem import Problem
from foremoe.simulate import System, simulate_systems
from foremoe.solvers import Robust, Search

SLOTS = (1, 2, 4)
VIEWS: tuple[Foresight, ...] = ("previous", "step", Noisy(0.3))


def planners() -> dict[tuple[str, str], Planner]:
    """(what is foreseen, planner) -> planner."""
    out = {("exact", "Search"): Planner()}
    for view in VIEWS:
        out[str(view), "Search"] = Planner(rank=(Search(),), foresight=view)
        out[str(view), "Robust"] = Planner(rank=(Robust(),), foresight=view)
    for name in ("eplb-history", "laer", "eplb-step"):
        out[str(STRATEGIES[name].foresight), name] = STRATEGIES[name]
    return out


def posed(problem: Problem, redundant: int, objective: str) -> Problem:
    """The problem with other slots under another objective."""
    return dataclasses.replace(problem, redundant=redundant, cost=dataclasses.replace(problem.cost, objective=objective))


def counted(problem: Problem, planner: Planner) -> tuple[float, float, float]:
    """Mean skew and redundant slots in use per rank, by slots and quotas, and CPU microseconds per row; but for micro-step 0."""
    history_LE = problem.load_MLE[0]
    planner.plan(problem[1:2], history_LE=history_LE)  # compiles
    plan, summary = planner.plan(problem[1:], history_LE=history_LE, num_threads=1)
    load_NG = plan.quota_NGS.sum(axis=2)
    skew = (load_NG.max(axis=1) / np.maximum(load_NG.mean(axis=1), 1e-300)).mean()
    copies = (plan.expert_NGS[..., problem.B :] >= 0).sum() / plan.N / problem.G
    return float(skew), float(copies), 1e6 * sum(level.cpu_s for level in summary.levels) / plan.N


def table(problem: Problem) -> str:
    """Markdown of one load: skew under both objectives, and stage time over static under both dispatches."""
    lines = ["| foreseen | planner | R | skew, balance | skew, time | slots used, time | us, time | x static, pairs | node |"]
    lines.append("| --- " * 9 + "|")
    for redundant in SLOTS:
        systems = {"static": System(planner=Planner(rank=()))}
        systems |= {f"{view}, {name}": System(planner=planner) for (view, name), planner in planners().items()}
        gains = []
        for dispatch in DISPATCHES:
            group = under(dispatch, [posed(problem, redundant, "time")])
            simulated = simulate_systems([p[1:] for p in group], systems, history_LE=[problem.load_MLE[0]])
            gains.append({row["solver"]: row["speedup_vs_static"] for row in simulated})
        for (view, name), planner in planners().items():
            level = counted(posed(problem, redundant, "balance"), planner)[0]
            skew, copies, micros = counted(posed(problem, redundant, "time"), planner)
            cells = " | ".join(f"{gain[f'{view}, {name}']:.3f}" for gain in gains)
            used = "-" if not planner.keeps_homes else f"{copies:.2f}"
            lines.append(f"| {view} | {name} | {redundant} | {level:.4f} | {skew:.4f} | {used} | {micros:.0f} | {cells} |")
    return "\n".join(lines)


def loads(micro_steps: int, layers: int) -> dict[str, Problem | None]:
    """Title -> the one EP group; None where recordings are not at hand."""
    out: dict[str, Problem | None] = {}
    for tokens in (8192, 1024):
        out[f"Qwen3-30B-A3B, EP 64 of 8xh100, {tokens} tokens per rank (synthetic, mid)"] = synthetic_groups(
            "qwen3-30b-a3b", num_ranks=64, ep=64, tokens_per_rank=tokens, micro_steps=micro_steps + 1, num_layers=layers,
            regime="mid",
        )[0]  # fmt: skip
    recorded: dict[str, tuple[tuple[str, ...], str, int]] = {}
    recorded["gpt-oss-20b, 11 data sets"] = (("gpt_oss_20b_decode.npz",), "gpt-oss-20b", 1024)
    recorded |= {f"DeepSeek-V2-Lite, {file.removesuffix('.npz')}": ((file,), "deepseek-v2-lite", 256) for file in ESFT}
    recorded["DeepSeek-V2-Lite, four tasks one after the other"] = (ESFT, "deepseek-v2-lite", 256)
    for name, (files, model, tokens) in recorded.items():
        work = recorded_workload(files, model, 16, tokens)
        title = f"{name}, EP 16 of 8xh100, {tokens} tokens per rank (recorded)"
        short = work is not None and work.M < 3
        out[title] = None if work is None or short else group_problems(work, model, 16, 8, None, 1)[0]
    return out


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8, help="layers of the synthetic loads")
    args = parser.parse_args()
    sections = []
    for title, problem in loads(args.micro_steps, args.layers).items():
        print(title, file=sys.stderr, flush=True)
        if problem is None:
            sections.append(f"## {title}\n\nSkipped: the recordings are not at hand, or hold fewer than three micro-steps.")
            continue
        sections.append(f"## {title}\n\n{problem.M - 1} micro-steps x {problem.L} layers.\n\n{table(problem)}")
    head = (
        f"# Plans without exact foresight (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.robust"
        f" --micro-steps {args.micro_steps} --layers {args.layers}`. Update stage, homes in order; micro-step 0 is history of the"
        " others. Skew is counted from slots and quotas, which are split on the real load; eplb and laer split evenly. All copies"
        " that were made count, also where the real load does not need them. Times are simulated, uncalibrated, under the"
        " objective time, with the weights that eplb and laer move. us: CPU time per row, one thread, compiled."
        f" {BOTH}\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
