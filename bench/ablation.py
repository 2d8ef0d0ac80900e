"""What every level of the planner is worth: each left out, by redundant slots, by foresight, in nodes of 8 and in one of 72.

    python -m bench.ablation [--out bench/results/ablation_HARDWARE_DATE.md]

A token-level synthetic load of four domains in runs (mixed tasks), 64 ranks. Stage times and exposed seconds are the cost
model's, uncalibrated; planning is CPU time of one thread, with the pack and home levels in it. What moving homes costs is in
the home level's decision and in no stage time.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.run import hardware
from foremoe.cluster import Cluster
from foremoe.planner import Planner
from foremoe.problem import Problem
from foremoe.routing import RoutingTrace
from foremoe.solvers import Anneal, AsGiven, Chain, ExpertAware, Greedy, Lpt, NodeChain, Quota

# Letters: M micro-steps, L layers.

NUM_RANKS, TOKENS_PER_RANK = 64, 4096


def variants(ranks_per_node: int) -> dict[str, tuple[Planner, int, str]]:
    """Name -> planner, R, where replicas may be."""
    pack = ExpertAware(ranks_per_node=None if ranks_per_node == 8 else ranks_per_node)
    full = Planner(pack=pack, home=Anneal())
    out = {
        "static": (Planner(pack=AsGiven(), rank=()), 1, "any"),
        "pack + home + rank": (full, 1, "any"),
        "without pack": (dataclasses.replace(full, pack=AsGiven()), 1, "any"),
        "without home": (Planner(pack=pack), 1, "any"),
        "without rank": (dataclasses.replace(full, rank=()), 1, "any"),
        "rank only": (Planner(), 1, "any"),
        "Lpt homes, moves free": (dataclasses.replace(full, home=Lpt()), 1, "any"),
        "NodeChain first": (dataclasses.replace(full, rank=(NodeChain(), Chain())), 1, "any"),
        "replicas inside nodes": (full, 1, "node"),
        "replicas inside nodes, without home": (Planner(pack=pack), 1, "node"),
        "greedy for rank": (dataclasses.replace(full, rank=(Greedy(),)), 1, "any"),
        "quota for rank": (dataclasses.replace(full, rank=(Quota(),)), 1, "any"),
    }
    out |= {f"R = {redundant}": (full, redundant, "any") for redundant in (0, 2, 4)}
    out |= {f"foresight {x}": (dataclasses.replace(full, foresight=x), 1, "any") for x in ("step", "previous")}  # type: ignore[arg-type]
    return out


def measure(trace: RoutingTrace, cluster: Cluster, planner: Planner, redundant: int, replicas: str) -> dict[str, Any]:
    """Figures of one variant: best planning time of two runs."""
    seconds = []
    for _ in range(2):
        begin_s = time.process_time()
        work = planner.workload(trace, num_ranks=NUM_RANKS, tokens_per_rank=TOKENS_PER_RANK)
        packed_s = time.process_time()
        problem = Problem.of(work, cluster, redundant=redundant, replicas=replicas)
        problem = dataclasses.replace(problem, home_LE=planner.homes(problem))
        homes_s = time.process_time()
        plan, _ = planner.plan(problem, num_threads=1)
        seconds.append((packed_s - begin_s, homes_s - packed_s, time.process_time() - homes_s))
    cost = plan.cost_ML.sum()
    return {
        "stage_s": float(cost.total_s),
        "exposed_s": float(cost.transfer_s + cost.gradient_s),
        "skew": float(plan.skew_ML.mean()),
        "replicas": plan.num_replicas / (work.M * work.L * NUM_RANKS),
        "plan_s": min(seconds),
        "M": work.M,
    }


def table(trace: RoutingTrace, ranks_per_node: int) -> str:
    """All variants on one node size."""
    cluster = Cluster.preset("8xh100", num_ranks=NUM_RANKS, ranks_per_node=ranks_per_node)
    lines = [
        "| variant | stage ms | x static | exposed ms | skew | replicas per rank | pack + home + rank CPU ms |",
        "|" + " --- |" * 7,
    ]
    static_s = 0.0
    for name, (planner, redundant, replicas) in variants(ranks_per_node).items():
        print(f"{ranks_per_node}: {name}", file=sys.stderr, flush=True)
        found = measure(trace, cluster, planner, redundant, replicas)
        static_s = static_s or found["stage_s"]
        planning = " + ".join(f"{seconds * 1e3:.0f}" for seconds in found["plan_s"])
        lines.append(
            f"| {name} | {found['stage_s'] * 1e3:.1f} | {static_s / found['stage_s']:.3f} | {found['exposed_s'] * 1e3:.1f} |"
            f" {found['skew']:.4f} | {found['replicas']:.2f} | {planning} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    trace = RoutingTrace.synthetic("qwen3-30b-a3b", num_sequences=1024, mean_length=1500.0, num_layers=8, regime="mid", seed=0)
    sections = [
        f"# Ablation\n\nMeasured on: {hardware()}. Command: `python -m bench.ablation`. {np.sum(trace.seq_len_Q)} tokens in"
        f" {trace.Q} sequences of four domains, 8 layers of Qwen3-30B-A3B, {NUM_RANKS} ranks, {TOKENS_PER_RANK} tokens per rank,"
        " R = 1 and exact foresight unless the row says otherwise. Stage times: model, uncalibrated."
    ]
    sections += [f"## Nodes of {size} ranks\n\n{table(trace, size)}" for size in (8, 72)]
    text = "\n\n".join(sections) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
