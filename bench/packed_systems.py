"""Systems that form micro-steps themselves, on token-level traces: packing, homes and replicas on one simulator.

    python -m bench.packed_systems [--out bench/results/packed_HARDWARE_DATE.md]

Simulated with the constants of the cluster preset (uncalibrated), synthetic sequences.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import numpy as np

from bench.ablation import MINI_BATCHES, packer
from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES
from bench.systems import step_trainer
from foremoe.base.arrays import Array
from foremoe.levels import HomeSolver, RankSolver
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.routing.trace import RoutingTrace
from foremoe.simulate import System, simulate_systems
from foremoe.solvers import Anneal, AsGiven, BalancedTokens, ExpertAware, Greedy, Keep, Lpt, PackSolver, Search
from foremoe.solvers.home.price import price_L
from foremoe.synthetic.tokens import synthetic_trace
from foremoe.workload.workload import Workload

# Letters: L layers, E experts, Q sequences.

NUM_RANKS, TOKENS_PER_RANK = 64, 4096


class Packed(NamedTuple):
    """One row: how samples are dealt, homes decided and replicas made.

    `first`: homes are decided on samples as given and samples are dealt for them; else the other way round.
    """

    pack: PackSolver
    home: HomeSolver = Keep()
    rank: tuple[RankSolver, ...] = ()
    first: bool = False
    replicas: str = "any"
    even: bool = False


def rows(ranks_per_node: int) -> dict[str, Packed]:
    """Row name -> row."""
    loads = ExpertAware(ranks_per_node=ranks_per_node, redundant=0, skew_weight=1.0, locality=False)
    near = ExpertAware(ranks_per_node=ranks_per_node, redundant=0)
    return {
        "static": Packed(AsGiven()),
        "static, balanced tokens": Packed(BalancedTokens()),
        "RoutePack-like": Packed(loads, Lpt(), first=True),
        "ReLibra-like": Packed(near, Anneal(), (Greedy(),), first=True, replicas="node"),
        "foremoe, rank alone": Packed(AsGiven(), rank=(Search(),)),
        "foremoe": Packed(packer(ranks_per_node), Anneal(), (Search(),)),
        "force-balanced": Packed(BalancedTokens(), even=True),
    }


def dealt(trace: RoutingTrace, pack: PackSolver, home_LE: Array | None = None) -> Workload:
    """The step's micro-steps; none mixes two mini-batches."""
    limits: dict[str, Any] = {"num_ranks": NUM_RANKS, "tokens_per_rank": TOKENS_PER_RANK}
    limits["sample_group_Q"] = np.arange(trace.Q) * MINI_BATCHES // trace.Q
    if home_LE is None:
        return Planner(pack=pack).workload(trace, **limits)
    assert isinstance(pack, ExpertAware)
    micro_step_Q, rank_Q = pack.solve(trace, home_LE=home_LE, **limits)
    assign = np.repeat(micro_step_Q, trace.seq_len_Q), np.repeat(rank_Q, trace.seq_len_Q)
    return Workload.from_trace(trace, num_ranks=NUM_RANKS, assign=assign)


def simulated(trace: RoutingTrace, row: Packed, ranks_per_node: int, dispatch: str) -> dict[str, Any]:
    """Figures of one row, moves of homes included."""
    cluster = Cluster.preset("8xh100", num_ranks=NUM_RANKS, ranks_per_node=ranks_per_node, dispatch=dispatch)
    pose = lambda work: Problem.of(work, cluster, replicas=row.replicas)  # noqa: E731
    if row.first:
        given = pose(dealt(trace, AsGiven()))
        home_LE = row.home.solve(given)
        problem = pose(dealt(trace, row.pack, home_LE))
    else:
        problem = pose(dealt(trace, row.pack))
        home_LE = row.home.solve(problem)
    trainer = step_trainer([problem])
    # Made once for a recompute and an update stage.
    moves_s = float(price_L(problem, home_LE, Anneal().state_bytes).sum()) * trainer.share_of_step(problem.M)
    posed = dataclasses.replace(problem, home_LE=home_LE)
    system = System(planner=Planner(rank=row.rank, guard=row.rank == (Search(),)), even=row.even)
    found = simulate_systems([posed], {"row": system}, trainer=trainer)[0]
    return {**found, "moves_s": moves_s, "stage_s": found["simulated_stage_s"] + moves_s, "micro_steps": problem.M}


HEAD = (
    "| system | micro-steps | stage ms | x static | share of force-balanced | skew | attention ms | experts ms | exchange ms |"
    " weights ms | moves ms |"
)


def section(ranks_per_node: int, dispatch: str, num_layers: int = 4) -> str:
    """The table on one node size under one dispatch."""
    trace = synthetic_trace("qwen3-30b-a3b", num_sequences=4096, mean_length=1500.0, num_layers=num_layers, seed=0)
    found = {}
    for name, row in rows(ranks_per_node).items():
        print(f"traces, nodes of {ranks_per_node}, {dispatch}: {name}", file=sys.stderr, flush=True)
        found[name] = simulated(trace, row, ranks_per_node, dispatch)
    lines = [HEAD, "|" + " --- |" * 11]
    for name, of in found.items():
        parts = [of["window_s"], of["compute_s"], of["dispatch_s"] + of["combine_s"]]
        parts += [of["transfer_s"] + of["gradient_s"], of["moves_s"]]
        lines.append(
            f"| {name} | {of['micro_steps']} | {of['stage_s'] * 1e3:.1f} | {found['static']['stage_s'] / of['stage_s']:.3f} |"
            f" {found['force-balanced']['stage_s'] / of['stage_s']:.1%} | {of['skew_mean']:.3f} | "
            + " | ".join(f"{part * 1e3:.1f}" for part in parts)
            + " |"
        )
    about = (
        f"## Samples packed, nodes of {ranks_per_node}, dispatch {dispatch}\n\n"
        f"{int(trace.seq_len_Q.sum())} tokens in {trace.Q} synthetic sequences of"
        f" four domains, {MINI_BATCHES} mini-batches, {num_layers} layers of Qwen3-30B-A3B, EP {NUM_RANKS}, {TOKENS_PER_RANK}"
        " tokens per rank and micro-step, R = 1. RoutePack-like: LPT homes, then samples"
        " dealt by load; ReLibra-like: annealed homes, then samples dealt near them, greedy replicas in nodes;"
        " force-balanced: balanced"
        " tokens. Moves of homes: once for a recompute and an update stage, half of them here."
    )
    return f"{about}\n\n" + "\n".join(lines)


def main() -> None:
    """Command line."""
    args = command_line(__doc__).parse_args()
    head = (
        f"# Packed samples (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.packed_systems`."
        f" Simulated, uncalibrated. {BOTH}\n\n"
    )
    emit(head + "\n\n".join(section(size, dispatch) for size in (8, 72) for dispatch in DISPATCHES) + "\n", args.out)


if __name__ == "__main__":
    main()
