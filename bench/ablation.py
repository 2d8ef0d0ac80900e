"""Measures the worth of every planner level by leaving it out, for several numbers of redundant slots and kinds of foresight.

    python -m bench.ablation [--out bench/results/ablation_HARDWARE_DATE.md]
    python -m bench.ablation --parts [--out bench/results/ablation-parts_HARDWARE_DATE.md]

The load is synthetic routing of tokens from mixed tasks, in runs of four domains. The benchmark plans the update stage of a step
with several mini-batches on 64 ranks, in nodes of 8 and in one of 72. Stages are simulated with both kinds of dispatch and with
the constants of the cluster preset (uncalibrated). Expert homes move once in the step. The time to move them is exposed and is
added to the stage. Planning time is the CPU time of one thread and includes the pack and home levels.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any, NamedTuple

import numpy as np

from bench import parts
from bench.output import command_line, emit, hardware
from foremoe.machine.cluster import DISPATCHES, Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.foresight import Noisy
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate import simulate
from foremoe.solvers import Anneal, AsGiven, BalancedTokens, ExpertAware, Greedy, Keep, PackSolver, Quota, Search
from foremoe.solvers.home.price import price_L
from foremoe.synthetic.tokens import synthetic_trace
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, Q sequences.

NUM_RANKS, TOKENS_PER_RANK, MINI_BATCHES = 64, 4096, 4
JOINT = "pack + home + rank"


class Variant(NamedTuple):
    """One row: a planner, R, and where replicas may be."""

    planner: Planner
    redundant: int = 1
    replicas: str = "any"


def packer(ranks_per_node: int, redundant: int = 1) -> ExpertAware:
    """The pack level, which knows the nodes and R."""
    return ExpertAware(skew_weight=0.1 if redundant else 1.0, redundant=redundant, ranks_per_node=ranks_per_node)


def variants(ranks_per_node: int) -> dict[str, Variant]:
    """Name -> variant; gains are over the first."""
    full = Planner(pack=packer(ranks_per_node), home=Anneal())
    change = lambda **levels: dataclasses.replace(full, **levels)  # noqa: E731
    kept = change(pack=packer(ranks_per_node), home=Keep())
    given = ExpertAware(redundant=0, ranks_per_node=ranks_per_node)
    out = {
        "nothing": Variant(Planner(rank=())),
        JOINT: Variant(full),
        "pack + rank": Variant(kept),
        "home + rank": Variant(change(pack=AsGiven())),
        "pack + home": Variant(change(pack=packer(ranks_per_node, 0), rank=()), 0),
        "rank": Variant(Planner()),
        "home": Variant(Planner(home=Anneal(), rank=()), 0),
        "pack": Variant(Planner(pack=packer(ranks_per_node, 0), rank=()), 0),
        "balanced tokens + rank": Variant(Planner(pack=BalancedTokens())),
        "balanced tokens + home + rank": Variant(change(pack=BalancedTokens())),
        "pack for given homes + rank": Variant(Planner(pack=given)),
        "greedy for rank": Variant(change(rank=(Greedy(),))),
        "quota for rank": Variant(change(rank=(Quota(),))),
        "replicas inside nodes": Variant(full, replicas="node"),
        "replicas inside nodes, without home": Variant(kept, replicas="node"),
    }
    for redundant in (0, 2):
        out[f"R = {redundant}"] = Variant(change(pack=packer(ranks_per_node, redundant)), redundant)
        out[f"R = {redundant}, without home"] = Variant(Planner(pack=packer(ranks_per_node, redundant)), redundant)
        out[f"R = {redundant}, without pack"] = Variant(change(pack=AsGiven()), redundant)
    for name, view in (("step", "step"), ("previous", "previous"), ("noisy 0.3", Noisy(0.3))):
        out[f"foresight {name}"] = Variant(change(foresight=view))
        out[f"foresight {name}, without home"] = Variant(dataclasses.replace(kept, foresight=view))
        # A micro-step that is not seen before it runs cannot be packed for either.
        out[f"foresight {name}, rank alone"] = Variant(Planner(foresight=view))
    return out


class Packed(NamedTuple):
    """A workload, and CPU seconds of dealing and counting it."""

    work: Workload
    seconds: float


def measure(variant: Variant, cluster: Cluster, packed: Packed) -> dict[str, Any]:
    """Figures of one variant: best planning time of two runs."""
    planner, homes_s, plan_s = variant.planner, [], []
    problem = Problem.of(packed.work, cluster, redundant=variant.redundant, replicas=variant.replicas)
    for _ in range(2):
        begin_s = time.process_time()
        there = dataclasses.replace(problem, home_LE=planner.homes(problem))
        decided_s = time.process_time()
        plan, _ = planner.plan(there, num_threads=1)
        homes_s.append(decided_s - begin_s)
        plan_s.append(time.process_time() - decided_s)
    simulation = simulate(there, plan)
    parts = simulation.parts
    # The weights, fp32 master weights and two moments of every expert that moves.
    moves_s = float(price_L(problem, there.home_LE, Anneal().state_bytes).sum())
    base = problem.B
    return {
        "stage_s": simulation.total_s + moves_s,
        "dispatch_s": parts.dispatch_s + parts.combine_s,
        "exposed_s": parts.transfer_s + parts.gradient_s,
        "moves_s": moves_s,
        "moved": float((there.home_LE // base != problem.home_LE // base).sum(axis=1).mean()),
        "skew": float(plan.skew_ML.mean()),
        "replicas": plan.num_replicas / (problem.N * NUM_RANKS),
        "plan_s": (packed.seconds, min(homes_s), min(plan_s)),
    }


def deal(trace: RoutingTrace, pack: PackSolver) -> Packed:
    """The step's micro-steps; none mixes two mini-batches."""
    group_Q = np.arange(trace.Q) * MINI_BATCHES // trace.Q
    begin_s = time.process_time()
    work = Planner(pack=pack).workload(trace, num_ranks=NUM_RANKS, tokens_per_rank=TOKENS_PER_RANK, sample_group_Q=group_Q)
    return Packed(work, time.process_time() - begin_s)


HEAD = (
    "| levels | stage ms, moves included | x nothing | dispatch ms | exposed: copies + moves, ms | experts moved | skew |"
    " replicas per rank | pack + home + rank CPU ms |"
)


def table(trace: RoutingTrace, ranks_per_node: int, dispatch: str, packed: dict[PackSolver, Packed]) -> str:
    """All variants on one node size, and what pack, home and rank together are against every subset; adds to `packed`."""
    cluster = Cluster.preset("8xh100", num_ranks=NUM_RANKS, ranks_per_node=ranks_per_node, dispatch=dispatch)
    lines, stage_s = [HEAD, "|" + " --- |" * 9], {}
    deal(trace, packer(ranks_per_node))  # compiles
    for name, variant in variants(ranks_per_node).items():
        print(f"{ranks_per_node}, {dispatch}: {name}", file=sys.stderr, flush=True)
        pack = variant.planner.pack
        if pack not in packed:
            packed[pack] = deal(trace, pack)
        found = measure(variant, cluster, packed[pack])
        stage_s[name] = found["stage_s"]
        planning = " + ".join(f"{seconds * 1e3:.0f}" for seconds in found["plan_s"])
        lines.append(
            f"| {name} | {found['stage_s'] * 1e3:.1f} | {stage_s['nothing'] / found['stage_s']:.3f} |"
            f" {found['dispatch_s'] * 1e3:.1f} | {found['exposed_s'] * 1e3:.1f} + {found['moves_s'] * 1e3:.1f} |"
            f" {found['moved']:.0f} | {found['skew']:.4f} | {found['replicas']:.2f} | {planning} |"
        )
    return "\n".join([*lines, "", verdict(stage_s)])


def verdict(stage_s: dict[str, float]) -> str:
    """One sentence: the joint levels against the best of their subsets."""
    subsets = ("pack + rank", "home + rank", "pack + home", "rank", "home", "pack", "nothing", "pack for given homes + rank")
    best = min(subsets, key=lambda name: stage_s[name])
    ratio = stage_s[JOINT] / stage_s[best]
    says = "beats every subset" if ratio < 1.0 else "equals its best subset" if ratio == 1.0 else "is worse than a subset"
    return f"Pack + home + rank {says}: {ratio:.4f} of the stage of {best}."


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--parts", action="store_true", help="the parts of Search instead: see bench.parts")
    parser.add_argument("--cases", type=int, default=50, help="stages for each dispatch, of --parts")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--regime", default="mid")
    args = parser.parse_args()
    if args.parts:
        parts.main(args.cases, args.out)
        return
    trace = synthetic_trace(
        "qwen3-30b-a3b", num_sequences=4096, mean_length=1500.0, num_layers=args.layers, regime=args.regime, seed=0
    )
    sections = [
        f"# Ablation\n\nMeasured on: {hardware()}. Command: `python -m bench.ablation --layers {args.layers} --regime"
        f" {args.regime}`. {np.sum(trace.seq_len_Q)} tokens in {trace.Q} sequences of four domains, {MINI_BATCHES} mini-batches,"
        f" {args.layers} layers of Qwen3-30B-A3B, {NUM_RANKS} ranks, {TOKENS_PER_RANK} tokens per rank and micro-step, update"
        " stage; R = 1, replicas anywhere and exact foresight unless the row says otherwise. Simulated, uncalibrated. Moves:"
        " weights and optimizer state, once in the step. Pack and home see the whole step in all rows that have them. Planning:"
        f" process CPU time of one thread, dealing and counting in pack; `{Search()!r}`."
    ]
    for size in (8, 72):
        packed: dict[PackSolver, Packed] = {}
        for dispatch in DISPATCHES:
            sections.append(f"## Nodes of {size} ranks, dispatch {dispatch}\n\n{table(trace, size, dispatch, packed)}")
    text = "\n\n".join(sections) + "\n"
    emit(text, args.out)


if __name__ == "__main__":
    main()
