"""Measures what host stores gain in the simulator, including the time to fill them, for random stages on two nodes of every kind.

    python -m bench.host_store [--cases 100] [--out bench/results/host-store_HARDWARE_DATE.md]

Every case draws a model, EP 8 to 32, a regime, 2 to 8 micro-steps of 256 to 8192 tokens per rank, a stage, a dispatch and R. The
default planner plans the case for a cluster with host stores and for the same cluster without host stores. All times are those of
the model, uncalibrated.
"""

from __future__ import annotations

import sys

import numpy as np

import foremoe
from bench.closed_form import MODELS, REGIMES
from bench.output import command_line, emit, hardware
from foremoe import Cluster, Planner, Problem
from foremoe.machine.cluster import DISPATCHES
from foremoe.plan.transfers import Link
from foremoe.simulate import simulate


def problem_of(seed: int, kind: str, host_store: bool) -> tuple[str, Problem]:
    """A random stage on two nodes and its name."""
    rng = np.random.default_rng(seed)
    model, regime, stage = str(rng.choice(MODELS)), str(rng.choice(REGIMES)), str(rng.choice(["update", "recompute"]))
    num_experts = foremoe.Model.preset(model).num_experts
    num_ranks = int(rng.choice([size for size in (8, 16, 32) if num_experts % size == 0]))
    tokens, micro_steps = int(rng.choice([256, 512, 1024, 4096, 8192])), int(rng.choice([2, 4, 8]))
    dispatch, redundant = str(rng.choice(DISPATCHES)), int(rng.integers(1, 3))
    work = foremoe.synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=tokens, micro_steps=micro_steps, num_layers=6, regime=regime, seed=seed,
        stage=stage,
    )  # fmt: skip
    cluster = Cluster.preset(kind, num_ranks, num_ranks // 2, dispatch=dispatch, host_store=host_store)
    name = f"{model} EP{num_ranks} {regime} {micro_steps} x {tokens} tokens, {stage}, {dispatch}, R={redundant}"
    return name, Problem.of(work, cluster, redundant=redundant)


def line(kind: str, num_cases: int) -> str:
    """One kind of node."""
    chosen, used, copies, names = [], [], [], []
    for seed in range(num_cases):
        name, without = problem_of(seed, kind, False)
        having = problem_of(seed, kind, True)[1]
        plan = Planner().plan(having)[0]
        chosen.append(simulate(having, plan).total_s / simulate(without, Planner().plan(without)[0]).total_s)
        used.append(int((plan.transfers.link_C == Link.HOST).sum()))
        copies.append(len(plan.transfers))
        names.append(name)
    best = int(np.argmin(chosen))
    share = sum(used) / max(1, sum(copies))
    return (
        f"| {kind} | {np.mean(np.array(used) > 0):.0%} | {share:.2%} | {np.mean(np.array(chosen) > 1.0):.0%} | {max(chosen):.4f} "
        f"| {np.exp(np.mean(np.log(chosen))):.4f} | {chosen[best]:.4f} | {names[best] if chosen[best] < 1.0 else ''} |"
    )


def main() -> None:
    """Writes the table."""
    parser = command_line(__doc__)
    parser.add_argument("--cases", type=int, default=100)
    args = parser.parse_args()
    heads = ["kind of node", "cases that use it", "copies by host", "cases slower", "worst", "mean", "best", "where"]
    lines = [
        "# Host stores on the simulated timeline", "",
        f"{hardware()}. `python -m bench.host_store --cases {args.cases}`; seconds of the stage with host stores over those"
        " without, over two nodes; mean: geometric. Simulated, uncalibrated.", "",
        "| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads),
    ]  # fmt: skip
    for kind in Cluster.preset_names():
        print(kind, file=sys.stderr, flush=True)
        lines.append(line(kind, args.cases))
    emit("\n".join([*lines, ""]), args.out)


if __name__ == "__main__":
    main()
