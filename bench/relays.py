"""What relays save: when the copies of a use are in place, by list scheduling, and how often one expert crosses one link.

    python -m bench.relays [--ranks 64] [--redundant 1] [--layers 4] [--micro-steps 8] [--objective time] [--out FILE]

Synthetic Qwen3-30B-A3B in 8-rank nodes. Every plan is checked; its copies are then scheduled again, in the order of the plan,
over the links that they name: seconds are those of `Deadline`'s links, no measurement. The engine starts a relay one use after
the copy that it passes on, so a plan with relays wants that many uses of prefetch more to hide its copies.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from bench.output import command_line, emit, hardware
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.plan.links import choose_links
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.synthetic.counts import synthetic_workload

# Letters: C copies, G ranks, U uses with copies.

COLUMNS = (
    "ways", "copies per use", "relayed", "by RDMA", "by host", "mean us", "p99 us", "largest us", "largest egress", "RDMA egress",
    "same expert, same node",
)  # fmt: skip


def in_place_s(plan: Plan, transfers: TransferList) -> Array:
    """Seconds until the copies of every use are in place, [U]: each waits for its source's copy and for both ends of its link."""
    t, seconds = transfers, plan.header.cluster.copy_seconds(plan.header.model.expert_bytes)
    found = []
    for need in np.unique(t.need_C):
        free: dict[tuple[str, int, int], float] = {}
        there: dict[tuple[int, int, int], float] = {}
        # Deadline schedules in this order, so what a relay waits for comes before it.
        for c in np.flatnonzero(t.need_C == need).tolist():
            path, src, dst = int(t.link_C[c]), int(t.src_C[c]), int(t.dst_C[c])
            what = int(t.layer_C[c]), int(t.expert_C[c])
            ends = [("in", path, dst)] if path == Link.HOST else [("in", path, dst), ("out", path, src)]
            end = max(there.get((src, *what), 0.0), *(free.get(link, 0.0) for link in ends)) + seconds[path]
            free.update(dict.fromkeys(ends, end))
            there[dst, *what] = end
        found.append(max(there.values()))
    return np.array(found)


def fan_out(transfers: TransferList, mask_C: Array) -> int:
    """The most copies of one use that leave one rank by one class of links."""
    t = transfers.take(mask_C & (transfers.src_C >= 0))
    return int(np.unique(np.stack([t.need_C, t.src_C, t.link_C]), axis=1, return_counts=True)[1].max(initial=0))


def crossings(plan: Plan, transfers: TransferList) -> int:
    """The most copies of one expert into one node by RDMA, in one use."""
    t = transfers.take(transfers.link_C == Link.RDMA)
    node_C = plan.header.cluster.node_of_rank_G[t.dst_C]
    return int(np.unique(np.stack([t.need_C, t.expert_C, node_C]), axis=1, return_counts=True)[1].max(initial=0))


def row(name: str, plan: Plan, transfers: TransferList) -> str:
    """One line of the table."""
    t = transfers
    dataclasses.replace(plan, transfers=t).check()
    home_C = plan.home_LE[t.layer_C, t.expert_C] // plan.B
    relayed_C = (t.src_C >= 0) & (t.src_C != home_C)
    seconds_U = in_place_s(plan, t) * 1e6
    cells = [name, f"{len(t) / len(seconds_U):.1f}", f"{relayed_C.mean():.1%}", f"{(t.link_C == Link.RDMA).mean():.1%}"]
    cells += [f"{(t.link_C == Link.HOST).mean():.1%}", f"{seconds_U.mean():.0f}", f"{np.quantile(seconds_U, 0.99):.0f}"]
    cells += [f"{seconds_U.max():.0f}", str(fan_out(t, t.link_C >= 0)), str(fan_out(t, t.link_C == Link.RDMA))]
    return "| " + " | ".join([*cells, str(crossings(plan, t))]) + " |"


def table(problem: Problem) -> str:
    """One line per set of ways."""
    plan, _ = Planner().plan(problem)
    links = (Link.PEER, Link.RDMA)
    ways: dict[str, tuple[tuple[Link, ...], int]] = {
        "home": (links, 0), "home, host": (tuple(Link), 0), "home, relay=1": (links, 1), "home, relay=9": (links, 9),
        "home, host, relay=1": (tuple(Link), 1), "home, host, relay=9": (tuple(Link), 9),
    }  # fmt: skip
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    for name, (allowed, relay) in ways.items():
        bytes_ = problem.model.expert_bytes
        chosen = choose_links(plan.transfers, plan.home_LE, problem.cluster, bytes_, allowed, relay=relay)
        lines.append(row(name, plan, chosen))
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--redundant", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--micro-steps", type=int, default=8)
    parser.add_argument("--objective", choices=("time", "balance"), default="time")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    work = synthetic_workload(
        "qwen3-30b-a3b", num_ranks=args.ranks, tokens_per_rank=8192, micro_steps=args.micro_steps, num_layers=args.layers,
        seed=args.seed,
    )  # fmt: skip
    problem = Problem.of(
        work, Cluster.preset("8xh100", num_ranks=args.ranks), redundant=args.redundant, cost=CostModel(objective=args.objective)
    )  # fmt: skip
    options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in vars(args).items() if name != "out")
    command = f"python -m bench.relays {options}"
    text = f"# Relays\n\nMeasured on: {hardware()}. Command: `{command}`. Seconds of list scheduling.\n\n{table(problem)}\n"
    emit(text, args.out)


if __name__ == "__main__":
    main()
