"""A soak test of thousands of micro-steps, plans and reports, which compares a process's resources at the start, middle and end.

python -m bench.soak [--out bench/results/soak_HARDWARE_DATE.md]    exits with 1 if something has grown
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bench.output import command_line, emit, hardware
from foremoe.distributed.group import TorchGroup
from foremoe.distributed.planning import PlanningTask, plan_together
from foremoe.levels import PathSolver
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.report import write_report
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.runtime import Runtime
from foremoe.simulate import run_stage, simulate
from foremoe.testing.ranks import run_processes
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, T tokens, K top-k, H hidden size.

RANKS = 2
M, L, E, K, T, H = 8, 2, 6, 2, 16, 8
SHARED = Path("/dev/shm")
BALANCE = CostModel(objective="balance")  # copies pay, however small the model
GROWN_MB = 16.0  # resident memory from the beginning to the end; all else may not grow


@dataclass(frozen=True)
class Holdings:
    """Holdings of a process."""

    resident_mb: float
    files: int
    threads: int
    names: int  # of foremoe's in shared memory

    @classmethod
    def now(cls, others: frozenset[str]) -> Holdings:
        """Counts them, but for names that were there before the soak."""
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            resident_mb=pages * os.sysconf("SC_PAGESIZE") / 2**20, files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")), names=len(own_names() - others),
        )  # fmt: skip


def own_names() -> frozenset[str]:
    """Names that a store has while its ranks open it."""
    return frozenset(path.name for path in SHARED.glob("foremoe-*"))


@dataclass(frozen=True)
class ByHost(PathSolver):
    """Every copy comes from the host store."""

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """Changes the links alone."""
        return transfers.replace(link_C=transfers.link_C * 0 + Link.HOST, src_C=transfers.src_C * 0 - 1)


def a_model() -> Model:
    """A toy."""
    return Model(
        name="toy", num_layers=L, first_moe_layer=0, num_experts=E, num_topk=K, hidden_size=H, ffn_size=16, attention_params=1,
        num_heads=1, qk_head_dim=1, v_head_dim=1, source="made up",
    )  # fmt: skip


def routing(rng: np.random.Generator) -> np.ndarray:
    """int64 [M, L, G, T, K]; other experts are popular every time."""
    weight_E = rng.permutation(np.linspace(1.0, 0.05, E))
    return np.argsort(rng.random((M, L, RANKS, T, E)) ** (1 / weight_E), axis=-1)[..., : -K - 1 : -1]


def workload(topk: np.ndarray) -> Workload:
    """The counts of routing."""
    return Workload.from_counts((topk[..., None] == np.arange(E)).sum(axis=(3, 4)), num_topk=K)


def cluster() -> Cluster:
    """One node."""
    return Cluster.preset("8xh100", num_ranks=RANKS, host_store=True)


def stages(group: TorchGroup, path: PathSolver | None) -> Iterator[int]:
    """Stages that the ranks plan together, run and end with an optimizer's step; yields the micro-steps of each."""
    rng = np.random.default_rng(0)
    task = PlanningTask(
        model=a_model(), cluster=cluster(), stage="update", schedule=Schedule.accumulate(M), redundant=1,
        moe_layer_L=np.arange(L, dtype=np.int32), cost=BALANCE,
    )  # fmt: skip
    bank = ExpertBank(
        num_layers=L, num_experts=E, hidden_size=H, ffn_size=16, rank=group.rank, num_ranks=group.size,
        num_buffers=task.redundant * task.slot_depth,
    )  # fmt: skip
    optimizer = torch.optim.SGD(bank.parameters(), lr=1e-3)
    planner = Planner() if path is None else Planner(path=path)
    backends = ("collective",) if path is None else ("pinned_host", "collective")
    weight_TK = torch.full((T, K), 1 / K)
    with Runtime(bank, group=group, backends=backends) as runtime:
        while True:
            topk = routing(rng)
            work = workload(topk)
            mine = work.load_MLGE[:, :, group.rank], work.tokens_MG[:, group.rank].astype(np.int64)
            planned = plan_together(group, planner, task, *mine, num_threads=1)
            assert len(planned.plan.transfers)
            runtime.begin(planned.plan, planned.split_MLP)
            for m in range(M):
                x_TH = torch.ones(T, H)
                for layer in range(L):
                    x_TH = runtime.moe(layer, x_TH, torch.from_numpy(topk[m, layer, group.rank].copy()), weight_TK)
                x_TH.sum().backward()
            assert not runtime.end().fell_back
            optimizer.step()
            optimizer.zero_grad()
            yield M


def by_collective(group: TorchGroup) -> Iterator[int]:
    """Weights come from other ranks."""
    return stages(group, None)


def by_host(group: TorchGroup) -> Iterator[int]:
    """Weights come from host stores."""
    return stages(group, ByHost())


def problems() -> Iterator[tuple[Problem, Plan]]:
    """Plans of two micro-steps, with other counts every time."""
    rng, model, where = np.random.default_rng(1), a_model(), cluster()
    while True:
        problem = Problem.of(workload(routing(rng)[:2]), where, model=model, redundant=1, cost=BALANCE)
        yield problem, Planner().plan(problem, num_threads=1)[0]


def plans(group: TorchGroup) -> Iterator[int]:
    """Plans are made and checked; every tenth is simulated."""
    for number, (problem, plan) in enumerate(problems()):
        plan.check(problem)
        if number % 10 == 0:
            simulate(problem, plan)
        yield 1


def reports(group: TorchGroup) -> Iterator[int]:
    """Plans are written and read again, and their pages written."""
    with tempfile.TemporaryDirectory() as folder:
        for problem, plan in problems():
            plan.save(Path(folder, "plan.safetensors"))
            again = Plan.load(Path(folder, "plan.safetensors"))
            write_report(Path(folder, "page.html"), problem, again, runs=run_stage(problem, again))
            yield 1


def soak(group: TorchGroup, part: Callable[[TorchGroup], Iterator[int]], count: int, others: frozenset[str]) -> list[Holdings]:
    """Holdings of this rank after a tenth, a half and all of `count`."""
    done, seen, marks = 0, list[Holdings](), [count // 10, count // 2, count]
    for number in part(group):
        done += number
        if done >= marks[len(seen)]:
            group.barrier()
            seen.append(Holdings.now(others))
            if len(seen) == len(marks):
                return seen
    raise AssertionError


PARTS: dict[str, tuple[Callable[[TorchGroup], Iterator[int]], int, int]] = {
    "micro-steps, weights from ranks": (by_collective, RANKS, 5_200),
    "micro-steps, weights from host stores": (by_host, RANKS, 5_200),
    "plans": (plans, 1, 10_000),
    "reports": (reports, 1, 300),
}


def grown(seen: list[Holdings]) -> list[str]:
    """Names of holdings that are larger at the end than at the beginning."""
    first, *_, last = seen
    more = [name for name in ("files", "threads", "names") if getattr(last, name) > getattr(first, name)]
    return more + (["resident memory"] if last.resident_mb > first.resident_mb + GROWN_MB else [])


def line(name: str, share: float, others: frozenset[str]) -> tuple[str, list[str]]:
    """One part, and what has grown in it."""
    part, ranks, count = PARTS[name]
    count, begin = max(10, int(count * share)), time.monotonic()
    by_rank = run_processes(soak, ranks, part, count, others, timeout_s=300.0, limit_s=3600.0)
    cells = [
        "; ".join(" / ".join(f"{getattr(held, field):.0f}" for held in seen) for seen in by_rank)
        for field in Holdings.__dataclass_fields__
    ]
    seconds = time.monotonic() - begin
    return f"| {count:,} {name} | {seconds:.0f} | {' | '.join(cells)} |", [
        f"{name}: {what}" for x in by_rank for what in grown(x)
    ]


def main() -> int:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--share", type=float, default=1.0, help="run that share of everything")
    args = parser.parse_args()
    about = (
        f"Measured on: {hardware()}. Command: `python -m bench.soak`. {RANKS} ranks over gloo run stages of {M} micro-steps and"
        f" {L} layers, which they plan together; plans are checked, every tenth simulated; reports are of simulated stages."
        f" What each process holds after a tenth / half / all of it, by rank. Only resident memory may grow, by {GROWN_MB:g} MB."
    )
    head = ("ran", "s", "resident, MB", "open files", "threads", "names in /dev/shm")
    lines = [about, "", f"| {' | '.join(head)} |", "| --- | ---: | --- | --- | --- | --- |"]
    others, bad = own_names(), list[str]()
    for name in PARTS:
        text, more = line(name, args.share, others)
        lines.append(text)
        bad += more
        print(text, file=sys.stderr, flush=True)
    lines += ["", f"Grown: {'; '.join(bad) or 'nothing'}."]
    emit("# Soak\n\n" + "\n".join(lines) + "\n", args.out)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
