"""Copies against simulated time: how few are enough, under either dispatch.

    python -m bench.fewer_copies [--seeds 2] [--out bench/results/fewer-copies_HARDWARE_DATE.md]

`Chain` under ``"time"``, then `Prune` with a growing limit. Copies are counted here, from the plans alone; seconds are those of
the simulator on the preset's constants (uncalibrated), update stage, over those of `Chain` alone.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase
from foremoe.simulate import simulate
from foremoe.solvers import Chain, Prune
from foremoe.synthetic.counts import synthetic_workload

# Letters: C copies.

CASES = tuple(
    (model, ranks, tokens)
    for model in ("qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b")
    for ranks in (16, 32, 64)
    for tokens in (1024, 8192)
    if (model, ranks) != ("gpt-oss-20b", 64)  # 32 experts
)
WITHIN = (0.0, 0.002, 0.005, 0.01, 0.02, 0.05)
# What the time may rise by for copies to be called needless.
EQUAL = 1.005


class Counted(NamedTuple):
    """Seconds of a stage; copies of a row's forward pass from other nodes and from the same; the most that leave one rank."""

    stage_s: float
    far: float
    near: float
    fan_out: int


def counted(problem: Problem, plan: Plan) -> Counted:
    """A plan's figures."""
    t = plan.transfers.take(plan.transfers.phase_C != Phase.BACKWARD)
    node_G, home_C = problem.cluster.node_of_rank_G, problem.home_LE[t.layer_C, t.expert_C] // problem.B
    far_C = node_G[home_C] != node_G[t.dst_C]
    row_C = t.micro_step_C.astype(np.int64) * problem.L + t.layer_C
    most = np.unique(row_C * problem.G + home_C, return_counts=True)[1].max(initial=0)
    return Counted(simulate(problem, plan).total_s, far_C.sum() / problem.N, (~far_C).sum() / problem.N, int(most))


def curve(problem: Problem) -> list[Counted]:
    """Figures of every limit."""
    ranks = [(Chain(), Prune(within)) if within else (Chain(),) for within in WITHIN]
    return [counted(problem, Planner(rank=rank, guard=False).plan(problem)[0]) for rank in ranks]


def line(name: str, curves: list[list[Counted]]) -> tuple[str, float, float]:
    """A table's line over seeds; the share of copies across nodes left at equal time, and the time of the usual limit."""
    mean = np.array([[[*found] for found in of_seed] for of_seed in curves]).mean(axis=0)
    time_s, far, near, fan = mean.T
    ratio = time_s / time_s[0]
    cells = [f"{r:.4f}: {f:.1f} + {n:.1f}, {k:.0f}" for r, f, n, k in zip(ratio, far, near, fan, strict=True)]
    enough = int(np.flatnonzero(ratio <= EQUAL)[-1])
    saved = far[enough] / far[0] if far[0] else 1.0
    cells.append(f"{WITHIN[enough]:g}: {1.0 - saved:.0%} fewer")
    return f"| {name} | " + " | ".join(cells) + " |", float(saved), float(ratio[WITHIN.index(Prune().within)])


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    sections = []
    for dispatch in DISPATCHES:
        heads = ["load", "Chain", *(f"Prune({within:g})" for within in WITHIN[1:]), "fewest at equal time"]
        lines, saved, usual = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)], [], []
        for model, ranks, tokens in CASES:
            print(dispatch, model, ranks, tokens, file=sys.stderr, flush=True)
            curves = []
            for seed in range(args.seeds):
                work = synthetic_workload(model, num_ranks=ranks, tokens_per_rank=tokens, micro_steps=2, num_layers=6, seed=seed)
                cluster = Cluster.preset("8xh100", ranks, dispatch=dispatch)
                curves.append(curve(Problem.of(work, cluster, redundant=1)))
            text, left, time = line(f"{model} EP{ranks}, {tokens} tokens", curves)
            lines.append(text)
            saved.append(1.0 - left)
            usual.append(time)
        summary = (
            f"At equal time (at most {EQUAL - 1.0:.1%} longer) {np.mean(saved):.0%} fewer copies across nodes on average;"
            f" `Prune()` alone: stage {np.mean(usual) - 1.0:+.2%} on average, {min(usual) - 1.0:+.2%} to {max(usual) - 1.0:+.2%}."
        )
        sections.append(f"## Dispatch {dispatch}\n\n{summary}\n\n" + "\n".join(lines))
    head = (
        f"# How few copies are enough (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m"
        f" bench.fewer_copies --seeds {args.seeds}`. Constants of preset 8xh100, uncalibrated; synthetic load, regime mid,"
        " 2 micro-steps x 6 layers, R = 1, tokens per rank. Cells: stage time over `Chain`'s: copies of a layer's forward"
        " from other nodes + from the same one, and the most of one layer that leave one rank.\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
