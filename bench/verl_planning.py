"""Measures the time that a pass of veRL's update waits for planning before it starts, on one rank of the EP group.

    python -m bench.verl_planning [CASE ...] [--out bench/results/verl_planning_HARDWARE_DATE.md]

The rank runs `plan_together` and the checks before a stage as it would in a group. The answers of the other ranks are made
beforehand. Messages are encoded as usual, and a network model gives their times. Counts are synthetic. Prints markdown.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.output import command_line, emit, hardware, markdown
from foremoe.base.arrays import Array
from foremoe.distributed import planning as sharing
from foremoe.distributed.group import Group
from foremoe.distributed.messages import decode, encode
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.plan.programme import Programme
from foremoe.planner.strategies import resolve
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.synthetic.counts import synthetic_workload
from foremoe.transfer.admission import fingerprint, refusal
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, P physical slots of all ranks, T tokens, K top-k.

PLANNER, MICRO_STEPS, TOKENS = "foremoe", 32, 8192
# Control messages go over TCP between hosts, not over the links that experts' tokens take.
BYTES_PER_S, MESSAGE_S = 1e9, 100e-6
PREFETCH = 2


class Job(NamedTuple):
    """An EP group's model, ranks, redundant slots and dispatch, and how often it is measured."""

    model: str
    num_ranks: int
    redundant: int = 1
    dispatch: str = "pairs"
    repeats: int = 3


CASES = {
    "ep8": Job("qwen3-30b-a3b", 8), "ep64": Job("qwen3-30b-a3b", 64),
    "ep64-94-node": Job("qwen3-235b-a22b", 64, 6, "node", 2),
}  # fmt: skip
PARTS = {
    "count": "count the routing of own tokens",
    "counts": "exchange counts",
    "plan": "plan own layers",
    "placements": "gather plans of the others",
    "derive": "merge, derive transfers",
    "splits": "exchange splits",
    "check": "check on all ranks, begin the engine",
}


class Call(NamedTuple):
    """One call of a group: this rank's seconds before and in it, modelled seconds on the network, and bytes received."""

    before_s: float
    work_s: float
    network_s: float
    num_bytes: int


@dataclass
class OneRank(Group):
    """Rank 0 of a group whose other ranks' answers are known.

    Attributes:
        answers: one per call, in order: what this rank gives -> what all ranks give, or the rows that it receives.
        clock: seconds.   calls: what came of them.   at: when the last one ended.
    """

    size: int
    answers: list[Callable[[Any], Any]]
    clock: Callable[[], float]
    rank: int = 0
    timeout_s: float = 60.0
    calls: list[Call] = field(default_factory=list)
    at: float = 0.0

    def start(self) -> None:
        """The clock of the work before the next call."""
        self.at = self.clock()

    def gather(self, value: Any) -> list[Any]:
        before = self.clock() - self.at
        others = self.answers[len(self.calls)](value)
        packed = [encode(other) for other in others]
        begin = self.clock()
        encode(value)
        values = [decode(data, g) for g, data in enumerate(packed)]
        self._note(before, self.clock() - begin, sum(map(len, packed)))
        return values

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        before = self.clock() - self.at
        begin = self.clock()
        received.copy_(self.answers[len(self.calls)](sent).reshape(received.shape))
        self._note(before, self.clock() - begin, received.numel() * received.element_size())

    def report(self, message: str) -> None:
        """Nobody reads it."""

    def close(self) -> None:
        """Nothing to give back."""

    def _note(self, before_s: float, local_s: float, num_bytes: int) -> None:
        network_s = (self.size - 1) * MESSAGE_S + num_bytes / BYTES_PER_S
        self.calls.append(Call(before_s, local_s, network_s, num_bytes))
        self.start()


def a_task(job: Job, stage: str, num_micro_steps: int, num_layers: int) -> sharing.PlanningTask:
    """A model on 8xh100 nodes, in an update with full recomputation of every layer."""
    model, update = Model.preset(job.model), stage == "update"
    schedule = Schedule.accumulate(num_micro_steps, True) if update else Schedule.forward_only(num_micro_steps)
    return sharing.PlanningTask(
        model=model, cluster=Cluster.preset("8xh100", num_ranks=job.num_ranks, dispatch=job.dispatch), stage=stage,
        schedule=schedule, redundant=job.redundant, cost=CostModel(),
        moe_layer_L=model.moe_layer_L[:num_layers],
        home_LE=np.tile(np.arange(model.num_experts, dtype=np.int32), (num_layers, 1)),
    )  # fmt: skip


def of_layers(task: sharing.PlanningTask, work: Workload, layers: list[int]) -> Workload:
    """The counts that the rank with these layers has."""
    return Workload.from_counts(
        work.load_MLGE[:, layers], num_topk=work.num_topk, stage=task.stage, tokens_MG=work.tokens_MG,
        moe_layer_L=task.moe_layer_L[layers],
    )  # fmt: skip


@dataclass
class Measured:
    """What one rank waits for, in seconds.

    Attributes:
        work_s, network_s, received, num_calls: by part; planning is that of the slowest rank, for which all wait.
        plan_G: planning of every rank that has layers.   first_s: planning micro-step 0 alone.   stage_s: predicted.
    """

    work_s: dict[str, float]
    network_s: dict[str, float]
    received: dict[str, int]
    num_calls: dict[str, int]
    plan_G: list[float]
    first_s: float
    stage_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.work_s.values()) + sum(self.network_s.values())


def best_of(runs: list[Measured]) -> Measured:
    """The least of every figure: the machine has other work, too."""
    plan_G = [min(seconds) for seconds in zip(*(run.plan_G for run in runs), strict=True)]
    work_s = {part: min(run.work_s[part] for run in runs) for part in PARTS}
    return dataclasses.replace(
        runs[0], work_s=work_s | {"plan": max(plan_G)}, plan_G=plan_G, first_s=min(run.first_s for run in runs)
    )


def measured(job: Job, work: Workload, stage: str, num_threads: int) -> Measured:
    """One rank's part in planning a stage."""
    M, L, G, E = work.load_MLGE.shape
    clock = time.process_time if num_threads == 1 else time.perf_counter
    task, planner = a_task(job, stage, M, L), resolve(PLANNER)
    layers_G = [list(range(g, L, G)) for g in range(G)]

    def plan_layers(of: sharing.PlanningTask, some: Workload, layers: list[int]) -> tuple[float, tuple[Plan, Array]]:
        mine = of_layers(of, some, layers)
        begin = clock()
        made = sharing._plan_layers(planner, of.problem(mine, np.array(layers)), num_threads, Event())
        return clock() - begin, made

    plan_layers(a_task(job, stage, 1, L), work[:1], [0])  # loads the kernels
    plan_G, made = zip(*(plan_layers(task, work, layers) for layers in layers_G if layers), strict=True)
    first_s, _ = plan_layers(a_task(job, stage, 1, L), work[:1], layers_G[0])

    mine_MLE, tokens_M = work.load_MLGE[:, :, 0], work.tokens_MG[:, 0].astype(np.int64)
    parts = [("", part.header.planner, sharing._arrays_of(part)) for part, _ in made] + [("", "", {})] * (G - len(made))
    load_GLME = np.ascontiguousarray(work.load_MLGE[:, layers_G[0]].transpose(2, 1, 0, 3))
    # What the planner of each layer gives to source 0, in the order in which it arrives there.
    splits = np.concatenate([split_GLMP[0].reshape(split_GLMP.shape[1], -1) for _, split_GLMP in made])
    group = OneRank(G, [
        lambda _: [(mine_MLE.shape, tokens_M)] * G, lambda _: torch.from_numpy(load_GLME), lambda _: parts,
        lambda fault: [fault] * G, lambda _: torch.from_numpy(splits),
    ], clock)  # fmt: skip
    group.start()
    planned = sharing.plan_together(group, planner, task, mine_MLE, tokens_M, num_threads=num_threads)
    after_s = clock() - group.at
    # Before the third call lies planning, which is counted by itself; before the fourth, that of no faults, derivation.
    counts, placements, derived, splits_ = group.calls[:2], group.calls[2], group.calls[3], group.calls[3:]

    plan: Plan = planned.plan
    # The adapter's faults of counting, of the plan, and the engine's agreement.
    check = OneRank(G, [lambda value: [value] * G] * 3, clock)
    check.start()
    begin = clock()
    for _ in range(2):
        check.gather("")
    refused = refusal(plan, 0, G, plan.header.num_buffers, debug=False)
    assert not refused, refused
    check.gather(("", (fingerprint(plan), (PREFETCH, False, False, ("collective",)))))
    Programme.of(plan, 0, PREFETCH)
    check_s = clock() - begin
    return Measured(
        work_s={
            "count": counted_s(M, L, E, int(tokens_M[0]), work.num_topk, num_threads, clock),
            "counts": sum(c.before_s + c.work_s for c in counts),
            "plan": max(plan_G), "placements": placements.work_s, "derive": derived.before_s,
            "splits": sum(c.before_s + c.work_s for c in splits_) - derived.before_s + after_s,
            "check": check_s,
        },
        network_s={
            "counts": sum(c.network_s for c in counts), "placements": placements.network_s,
            "splits": sum(c.network_s for c in splits_),
            "check": sum(c.network_s for c in check.calls),
        },
        received={
            "counts": sum(c.num_bytes for c in counts), "placements": placements.num_bytes,
            "splits": sum(c.num_bytes for c in splits_),
            "check": sum(c.num_bytes for c in check.calls),
        },
        num_calls={"counts": len(counts), "placements": 1, "splits": len(splits_), "check": len(check.calls)},
        plan_G=list(plan_G), first_s=first_s, stage_s=float(plan.cost_ML.sum().total_s),
    )  # fmt: skip


def counted_s(M: int, L: int, E: int, num_tokens: int, num_topk: int, num_threads: int, clock: Callable[[], float]) -> float:
    """Seconds to count one rank's routing, int16."""
    rng = np.random.default_rng(0)
    few = [
        ((rng.integers(0, E, (num_tokens, L, 1)) + np.arange(num_topk)) % E).astype(np.int16) for _ in range(8)
    ]  # beyond caches
    routing = [few[m % len(few)] for m in range(M)]
    count_micro_steps([topk_TLK[:1] for topk_TLK in few], E)
    begin = clock()
    count_micro_steps(routing, E, num_threads)
    return clock() - begin


def case_table(name: str, num_micro_steps: int, tokens: int) -> str:
    """One EP group: update and recompute, and the update with two threads."""
    job = CASES[name]
    model, G = job.model, job.num_ranks
    work = synthetic_workload(model, num_ranks=G, tokens_per_rank=tokens, micro_steps=num_micro_steps, seed=0, regime="mid")
    kinds = {"update": ("update", 1), "recompute": ("recompute", 1), "update, 2 threads, wall": ("update", 2)}
    runs = {kind: best_of([measured(job, work, *options) for _ in range(job.repeats)]) for kind, options in kinds.items()}
    one = runs["update"]
    rows = []
    for part, what in PARTS.items():
        moved = part in one.received
        network = (
            [f"{one.network_s[part]:.3f}", f"{one.num_calls[part]}", f"{one.received[part] / 1e6:.1f}"] if moved else ["-"] * 3
        )
        rows.append([what, *(f"{run.work_s[part]:.3f}" for run in runs.values()), *network])
    rows.append(["all, network included", *(f"{run.total_s:.3f}" for run in runs.values()), "-", "-", "-"])
    rows.append(["the stage, predicted", *(f"{run.stage_s:.1f}" for run in runs.values()), "-", "-", "-"])
    rows.append(["exposed, of the stage", *(f"{run.total_s / run.stage_s:.1%}" for run in runs.values()), "-", "-", "-"])
    table = markdown(("seconds on a rank", *runs, "network, modelled", "collectives", "MB received"), rows)
    num_layers = -(-work.L // G)
    later = 1 - 1 / num_micro_steps
    hidden_s = later * one.work_s["count"] + max(one.work_s["plan"] - one.first_s, 0.0)
    agreed_s = (num_micro_steps - 1) * (G - 1) * MESSAGE_S
    return (
        f"## {name}: {model}, {work.L} layers, {num_micro_steps} micro-steps, {G} ranks, R = {job.redundant}, {job.dispatch}"
        f" dispatch, best of {job.repeats}\n\n{table}\n\nUpdate: a rank plans"
        f" {num_layers} layer{'s' * (num_layers != 1)} in {min(one.plan_G):.3f} to {max(one.plan_G):.3f} s, micro-step 0 of"
        f" them in {one.first_s:.3f} s. Counting and planning the other micro-steps while the pass runs would hide"
        f" {hidden_s:.3f} s, {hidden_s / one.stage_s:.1%} of the stage; agreeing on each of them, one gather before each, would"
        f" take {agreed_s:.3f} s of the modelled network."
    )


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--micro-steps", type=int, default=MICRO_STEPS, help=f"default {MICRO_STEPS}")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a rank in a micro-step; default {TOKENS}")
    args = parser.parse_args()
    wrong = [name for name in args.cases if name not in CASES]
    if wrong:
        parser.error(f"there is no case {', '.join(wrong)}; choose from {', '.join(CASES)}")
    torch.set_num_threads(1)
    about = (
        f"Measured on: {hardware()}. Command: `python -m bench.verl_planning`. {args.tokens} tokens per rank and"
        f" micro-step, regime mid, `{PLANNER}` under `time`, the update with every layer re-forwarded. CPU seconds of one"
        f" rank of the EP group with one thread; planning is that of the slowest rank, for which all"
        f" wait. Network: modelled, {BYTES_PER_S / 1e9:g} GB/s and {MESSAGE_S * 1e6:g} us per peer and message. A stage's length"
        " is the cost model's, uncalibrated. Laying out the routing (veRL's own code) and what backends prepare are not in it."
    )
    sections = [f"# Planning before a stage\n\n{about}"]
    for name in args.cases or CASES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        sections.append(case_table(name, args.micro_steps, args.tokens))
        print(sections[-1], file=sys.stderr, flush=True)
    emit("\n\n".join(sections) + "\n", args.out)


if __name__ == "__main__":
    main()
