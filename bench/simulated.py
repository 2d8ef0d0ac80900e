"""What levels, redundant slots, slot policies and paths are worth on the simulated timeline.

    python -m bench.simulated [--out bench/results/simulated_HARDWARE_DATE.md]

The closed form of `bench.ablation` leaves out what couples rows: buffers that are not free yet, links that copies and exchanges
share, gradients on their way home. This is where they show. Simulated, constants of the cluster preset (uncalibrated).
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from bench.output import command_line, emit, hardware
from bench.settings import BOTH, DISPATCHES, peak, under
from bench.systems import mb_per_rank, step_trainer, synthetic_groups
from foremoe.levels import PathSolver
from foremoe.machine.cluster import Cluster
from foremoe.plan.links import choose_links
from foremoe.plan.transfers import Link, TransferList
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.simulate import System, simulate_systems
from foremoe.solvers import Anneal

PATHS = {
    "GPU-direct only": (Link.PEER, Link.RDMA),
    "CPU-assisted only": (Link.HOST,),
    "both": tuple(Link),
}
HEAD = (
    "| variant | slots | MB | stage ms | x static | share of force-balanced | waits for weights ms | for gradients ms | skew |"
    " replicas per rank | peak GB |"
)


@dataclass(frozen=True)
class Only(PathSolver):
    """`Deadline` with some of the paths."""

    paths: tuple[int, ...]

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """See `PathSolver.solve`."""
        allowed = [Link(path) for path in self.paths]
        return choose_links(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, allowed)


def only(paths: tuple[Link, ...], **levels: Any) -> Planner:
    """The default planner with some of the paths."""
    return Planner(path=Only(tuple(int(path) for path in paths)), **levels)


def variants() -> dict[str, dict[str, System]]:
    """Section -> variant -> system; all have a row of static placement and one of even routing."""
    plain, homes = Planner(), Planner(home=Anneal())
    return {
        "Levels": {
            "rank": System(planner=plain),
            "home + rank": System(planner=homes),
            "home": System(planner=Planner(home=Anneal(), rank=())),
            "rank, replicas inside nodes": System(planner=plain, changes={"replicas": "node"}),
            "home + rank, replicas inside nodes": System(planner=homes, changes={"replicas": "node"}),
        },
        "Redundant slots": {f"R = {r}": System(planner=plain, changes={"redundant": r}) for r in (0, 1, 2, 4)},
        "Slot depths": {f"ring of {depth}": System(planner=plain, changes={"slot_depth": depth}) for depth in (1, 2, 3, 6)},
        "Paths": {name: System(planner=only(paths)) for name, paths in PATHS.items()},
        "When the plan is known": {
            "before the stage, 2 uses ahead": System(planner=plain),
            "before the stage, 8 uses ahead": System(planner=plain, prefetch=8),
            "before the stage, no use ahead": System(planner=plain, prefetch=0),
            "after the router, no planning time": System(planner=plain, known="router"),
            "after the router, 75 us of planning": System(planner=plain, known="router", plan_s=75e-6),
        },
    }


def table(problems: list[Problem], systems: dict[str, System]) -> str:
    """Markdown of one section on one load."""
    bounds = {"static": System(planner=Planner(rank=())), "force-balanced": System(even=True)}
    rows = simulate_systems(problems, {**bounds, **systems}, trainer=step_trainer(problems))
    lines = [HEAD, "|" + " --- |" * 11]
    for row in rows:
        lines.append(
            f"| {row['solver']} | {row['slots_per_rank']} | {mb_per_rank(row, problems[0].G)} |"
            f" {row['simulated_stage_s'] * 1e3:.1f} | {row['speedup_vs_static']:.3f} |"
            f" {row['share_of_balanced']:.1%} | {row['transfer_s'] * 1e3:.1f} | {row['gradient_s'] * 1e3:.1f} |"
            f" {row['skew_mean']:.3f} | {row['replicas_per_layer'] / problems[0].G:.2f} |"
            f" {peak(row)} |"
        )
    return "\n".join(lines)


def stages(micro_steps: int) -> dict[str, list[Problem]]:
    """The loads: an update and a recompute stage on 64 H100, and the update on boxes without a fast link."""
    update = synthetic_groups("qwen3-30b-a3b", num_ranks=64, ep=64, micro_steps=micro_steps)
    forward = Schedule.forward_only(micro_steps)
    recompute = [dataclasses.replace(problem, stage="recompute", schedule=forward) for problem in update]
    box = Cluster.preset("8xpcie", num_ranks=64)
    return {
        "update, 8xh100": update,
        "recompute, 8xh100": recompute,
        "update, 8xpcie": [dataclasses.replace(problem, cluster=box) for problem in update],
    }


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--micro-steps", type=int, default=4)
    args = parser.parse_args()
    loads = stages(args.micro_steps)
    sections = []
    for title, systems in variants().items():
        parts = []
        for name, problems in loads.items():
            for dispatch in DISPATCHES:
                print(f"{title}: {name}, {dispatch}", file=sys.stderr, flush=True)
                parts.append(f"### {name}, dispatch {dispatch}\n\n{table(under(dispatch, problems), systems)}")
        sections.append(f"## {title}\n\n" + "\n\n".join(parts))
    head = (
        f"# Levels, slots and paths (simulated)\n\nPlanned and simulated on: {hardware()}. Command: `python -m bench.simulated"
        f" --micro-steps {args.micro_steps}`. Simulated, uncalibrated. Synthetic load (regime mid), Qwen3-30B-A3B, EP 64 in nodes"
        f" of 8, {args.micro_steps} micro-steps of 8192 tokens per rank; R = 1, ring of 3, both paths, 2 uses ahead unless the"
        " row says otherwise. Moves of homes are paid once per step, a recompute and an update stage of these micro-steps. Slots:"
        f" redundant, per rank; MB: weights and gradients per rank, layer and micro-step. {BOTH}\n\n"
    )
    emit(head + "\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
