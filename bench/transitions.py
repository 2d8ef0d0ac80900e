"""What resident slots save when micro-steps are planned as a sequence: their order, and replicas kept from one to the next.

    python -m bench.transitions [CASE ...] [--layers 4] [--out bench/results/transitions_HARDWARE_DATE.md]

Objective time, `ResidentSlots(1)`. Every plan is checked and priced as its weights are sent; seconds are the cost model's,
uncalibrated. Copies are counted from the plans' transfers.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable

import numpy as np

from bench.cases import CASES
from bench.evaluator import skew_N
from bench.output import command_line, emit, hardware
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.slots import ResidentSlots
from foremoe.solvers import Transitions
from foremoe.synthetic.counts import synthetic_workload
from foremoe.workload.workload import Workload

# Letters: M micro-steps.

RECORDED = ("gpt-oss-ep16", "esft-ep8", "esft-ep16")
ALONE = Transitions(reorder=False, replan=False)
LEVELS = {
    "order": Transitions(replan=False),
    "keep": Transitions(reorder=False),
    "both": Transitions(),
    "invest": Transitions(invest=True),
}
COLUMNS = (
    "case", "M", "stage", "R", "alone ms", *LEVELS, "copies alone", "both", "invest", "skew alone", "both", "CPU us/row alone",
    "both", "invest",
)  # fmt: skip


def shuffled(work: Workload) -> Workload:
    """The same micro-steps in a seeded random order."""
    order_M = np.random.default_rng(0).permutation(work.M)
    names = ("load_MLGE", "tokens_MG", "attention_MG", "unknown_ML")
    return dataclasses.replace(
        work, micro_step_Q=None, rank_Q=None, dealt=None, **{name: getattr(work, name)[order_M] for name in names}
    )


def synthetic(num_ranks: int, micro_steps: int, num_layers: int) -> Workload:
    """Regime mid, Qwen3-30B-A3B."""
    return synthetic_workload(
        "qwen3-30b-a3b", num_ranks=num_ranks, tokens_per_rank=8192, micro_steps=micro_steps, num_layers=num_layers, seed=0
    )


def cases(num_layers: int) -> dict[str, Callable[[], Workload]]:
    """Name -> workload, for those that can run here."""
    found: dict[str, Callable[[], Workload]] = {}
    for name in RECORDED:
        case = CASES[name]
        if case.missing:
            print(f"{name}: skipped, {case.missing}.", file=sys.stderr)
            continue
        found[name] = case.make
        found[f"{name}, shuffled"] = lambda case=case: shuffled(case.make())  # type: ignore[misc]
    for num_ranks in (8, 16, 64):
        for micro_steps in (4, 32):
            found[f"mid-ep{num_ranks}, M = {micro_steps}"] = lambda g=num_ranks, m=micro_steps: synthetic(g, m, num_layers)  # type: ignore[misc]
    return found


def measure(problem: Problem, level: Transitions) -> dict[str, float]:
    """Seconds of the whole stage, copies and planning CPU time per micro-step and layer, mean skew."""
    planner = Planner(order=level)
    seconds = []
    for _ in range(2):
        began = time.process_time()
        plan, _ = planner.plan(problem, num_threads=1)
        seconds.append(time.process_time() - began)
    plan.check(problem)
    placement = Placement(expert_NGS=plan.expert_NGS, quota_NGS=plan.quota_NGS)
    return {
        "stage_s": float(plan.cost_ML.sum().total_s),
        "copies": len(plan.transfers) / plan.N,
        "skew": float(skew_N(problem, placement).mean()),
        "cpu_us": min(seconds) / plan.N * 1e6,
    }


def table(names: list[str], num_layers: int) -> str:
    """One line per case, stage and R."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + " --- |" * len(COLUMNS)]
    available = cases(num_layers)
    for name in names or available:
        if name not in available:
            print(f"{name}: there is no such case here; choose from {', '.join(available)}", file=sys.stderr)
            continue
        work = available[name]()
        for stage in ("recompute", "update"):
            for redundant in (1, 2):
                print(f"{name}, {stage}, R = {redundant} ...", file=sys.stderr, flush=True)
                cluster = Cluster.preset("8xh100", num_ranks=work.G)
                staged = dataclasses.replace(work, stage=stage)
                problem = Problem.of(staged, cluster, redundant=redundant, slots=ResidentSlots(1))
                alone = measure(problem, ALONE)
                found = {kind: measure(problem, level) for kind, level in LEVELS.items()}
                cells = [name.split(", M =")[0], str(work.M), stage, str(redundant), f"{alone['stage_s'] * 1e3:.1f}"]
                cells += [f"{1.0 - row['stage_s'] / alone['stage_s']:.2%}" for row in found.values()]
                cells += [f"{row['copies']:.1f}" for row in (alone, found["both"], found["invest"])]
                cells += [f"{row['skew']:.4f}" for row in (alone, found["both"])]
                cells += [f"{row['cpu_us']:.0f}" for row in (alone, found["both"], found["invest"])]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: all")
    parser.add_argument("--layers", type=int, default=4, help="layers of the synthetic cases")
    args = parser.parse_args()
    command = " ".join(["python -m bench.transitions", *args.cases, f"--layers {args.layers}"])
    text = (
        f"# Transitions\n\nMeasured on: {hardware()}. Command: `{command}`. Resident slots, one copy. `alone`:"
        " every row planned by itself, in the order given, with what happens to stay not sent again. Then the seconds saved by"
        " `Transitions(replan=False)`, `(reorder=False)`, `()` and `(invest=True)`. Copies: weights sent per micro-step and"
        f" layer. CPU: one thread, best of 2, with the rank level.\n\n{table(args.cases, args.layers)}\n"
    )
    emit(text, args.out)


if __name__ == "__main__":
    main()
