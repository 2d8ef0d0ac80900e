"""Drills in which one of three processes dies, is stopped, ends or fails: how soon the other two end, and which rank they name.

In some drills, the failing process hosts the store that links the ranks, as rank 0 does with env://, or torchrun's agent does.

python -m bench.drills [--out bench/results/drills_HARDWARE_DATE.md]
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.drill_worlds import end_after, hosted_by_rank_0, under_launcher
from bench.output import command_line, emit, hardware
from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import TorchGroup, make_on_all
from foremoe.distributed.planning import PlanningTask, plan_together
from foremoe.distributed.private import private_group
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.runtime import Runtime
from foremoe.testing.ranks import run_processes
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, T tokens, K top-k, H hidden size.

RANKS, CULPRIT, LIMIT_S, PATIENCE_S = 3, 1, 5.0, 120.0
M, L, E, K, T, H = 2, 2, 6, 2, 64, 8


def dies() -> None:
    """The kernel ends it, as for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def stops() -> None:
    """It neither ends nor answers, as on a machine that hangs."""
    os.kill(os.getpid(), signal.SIGSTOP)


def ends() -> None:
    """A plug-in calls `sys.exit`."""
    raise SystemExit("enough")


def fails() -> None:
    """An exception that nobody expects."""
    raise MemoryError("no more")


FAULTS: dict[str, Callable[[], None]] = {"killed": dies, "stopped": stops, "SystemExit": ends, "MemoryError": fails}


@dataclass(frozen=True)
class Fault:
    """Happens on one rank alone, when it is called there."""

    happens: bool
    act: Callable[[], None]

    def __call__(self) -> None:
        if self.happens:
            self.act()


class Faulty(Planner):
    """A planner with a fault."""

    fault: Fault

    def plan(self, *args: Any, **options: Any) -> Any:
        """Does not come to planning on the culprit."""
        type(self).fault()
        return super().plan(*args, **options)


def routing() -> np.ndarray:
    """int64 [M, L, G, T, K]; the first experts are popular."""
    rng = np.random.default_rng(0)
    weight_E = np.linspace(1.0, 0.1, E) / np.linspace(1.0, 0.1, E).sum()
    draws = [rng.choice(E, K, replace=False, p=weight_E) for _ in range(M * L * RANKS * T)]
    return np.array(draws).reshape(M, L, RANKS, T, K)


def workload() -> Workload:
    """The counts of `routing`."""
    return Workload.from_counts((routing()[..., None] == np.arange(E)).sum(axis=(3, 4)), num_topk=K)


def a_model() -> Model:
    """A toy."""
    return Model(
        name="toy", num_layers=L, first_moe_layer=0, num_experts=E, num_topk=K, hidden_size=H, ffn_size=16, attention_params=1,
        num_heads=1, qk_head_dim=1, v_head_dim=1, source="made up",
    )  # fmt: skip


def in_set_up(group: TorchGroup, fault: Fault) -> None:
    """A group is made."""
    fault()
    TorchGroup(group.process_group, timeout_s=group.timeout_s)


def in_second_set_up(group: TorchGroup, fault: Fault) -> None:
    """A backend opens a communicator of its own."""
    fault()
    private_group(group, torch.device("cpu"))


def in_message(group: TorchGroup, fault: Fault) -> None:
    """Ranks agree on something."""
    fault()
    group.gather("fine")


def in_tokens(group: TorchGroup, fault: Fault) -> None:
    """Tokens are exchanged."""
    fault()
    ones = [1] * group.size
    group.all_to_all(torch.zeros(group.size), torch.ones(group.size), ones, ones)


def in_planning(group: TorchGroup, fault: Fault, limit_s: float | None = None) -> None:
    """A rank plans its layers."""
    work = workload()
    task = PlanningTask(
        model=a_model(), cluster=Cluster.preset("8xh100", num_ranks=RANKS), stage="update", schedule=Schedule.accumulate(M),
        redundant=1, moe_layer_L=np.arange(L, dtype=np.int32),
    )  # fmt: skip
    Faulty.fault = fault
    mine = work.load_MLGE[:, :, group.rank], work.tokens_MG[:, group.rank].astype(np.int64)
    plan_together(group, Faulty(), task, *mine, num_threads=1, plan_limit_s=limit_s)


def in_planning_thread(group: TorchGroup, fault: Fault) -> None:
    """The same with a limit, so that it plans in a thread."""
    in_planning(group, fault, group.timeout_s)


def in_stage(group: TorchGroup, fault: Fault, backends: tuple[str, ...] = ("collective",)) -> None:
    """A stage runs, and a rank comes to its second layer."""
    work, topk = workload(), routing()
    cluster = Cluster.preset("8xh100", num_ranks=RANKS)
    problem = Problem.of(work, cluster, model=a_model(), redundant=1, cost=CostModel(objective="balance"))
    plan, _ = Planner().plan(problem, num_threads=1)
    num_buffers = plan.header.num_buffers
    bank = ExpertBank(
        num_layers=L, num_experts=E, hidden_size=H, ffn_size=16, rank=group.rank, num_ranks=RANKS, num_buffers=num_buffers
    )
    with Runtime(bank, group=group, backends=backends, timeout_s=LIMIT_S / 2) as runtime:
        runtime.begin(plan, plan.rows_for(work, group.rank))
        for m in range(M):
            x_TH = torch.ones(T, H)
            for layer in range(L):
                if (m, layer) == (0, 1):
                    fault()
                topk_TK = torch.from_numpy(topk[m, layer, group.rank])
                x_TH = runtime.moe(layer, x_TH, topk_TK, torch.full((T, K), 1 / K))
            x_TH.sum().backward()
        runtime.end()


def in_host_stage(group: TorchGroup, fault: Fault) -> None:
    """The same with host stores."""
    in_stage(group, fault, ("pinned_host", "collective"))


PLACES = {
    "group set-up": in_set_up, "a backend's set-up": in_second_set_up, "message": in_message, "exchange of tokens": in_tokens,
    "planning": in_planning, "planning with a limit": in_planning_thread, "stage": in_stage, "stage, host stores": in_host_stage,
}  # fmt: skip


SET_UPS = ("group set-up", "a backend's set-up")
# Elsewhere nobody of foremoe is there to report what a rank raises: the caller does.
REPORTED = ("planning", "planning with a limit", "stage", "stage, host stores")
_kept: list[TorchGroup] = []


# Where rank 0 hosts the store and is the culprit.
BY_HOST = ("group set-up", "a backend's set-up", "message", "exchange of tokens", "planning", "stage", "stage, host stores")


def drill(group: TorchGroup, place: str, fault: str, culprit: int, folder: Path) -> tuple[float, str] | None:
    """Seconds from the start to the error, and the error, on the ranks that live on; they leave a file when they end."""
    process_group, cut = (group.process_group, None) if culprit else hosted_by_rank_0(group, PATIENCE_S)
    own = TorchGroup(process_group, timeout_s=PATIENCE_S)  # the harness does not report on it
    _kept.append(own)  # nor are its connections closed when a rank comes back from here
    if place not in SET_UPS:
        PLACES[place](own, Fault(False, dies))  # compiles what there is to compile
    own.timeout_s = LIMIT_S
    own.barrier()

    def is_cut_off() -> None:
        assert cut is not None
        cut()
        time.sleep(PATIENCE_S)

    here = group.rank == culprit
    if here and fault in ("stopped", "cut off"):
        end_after(folder, group.size - 1)
    begin = time.monotonic()
    try:
        PLACES[place](own, Fault(here, is_cut_off if fault == "cut off" else FAULTS[fault]))
    except (InputError, TransferError) as error:
        return time.monotonic() - begin, str(error)
    except BaseException:
        return None  # the culprit
    finally:
        (folder / str(group.rank)).touch()
    return None


def line(place: str, fault: str, culprit: int = CULPRIT) -> str:
    """One drill."""
    limits = {"timeout_s": PATIENCE_S, "limit_s": 2 * PATIENCE_S + 9 * LIMIT_S}
    with tempfile.TemporaryDirectory() as folder:
        results = run_processes(drill, RANKS, place, fault, culprit, Path(folder), errors=True, **limits)
    others = [result for g, result in enumerate(results) if g != culprit]
    ended = [result for result in others if isinstance(result, tuple)]
    act = fault if fault.islower() else f"raises {fault}"
    what = f"rank {culprit} {act}" if culprit else f"rank {culprit} {act}, which hosts the store"
    if len(ended) < RANKS - 1:
        lost = next(result for result in others if not isinstance(result, tuple))
        return f"| {place} | {what} | **{RANKS - 1 - len(ended)} did not come to it, or did not end** | | {lost} |"
    return row(place, what, f"rank {culprit}", ended)


def row(place: str, what: str, name: str, ended: list[tuple[float, str]]) -> str:
    """A line of the table."""
    seconds = max(seconds for seconds, _ in ended)
    named = sum(name in text for _, text in ended)
    text = min((text for _, text in ended), key=len)
    return f"| {place} | {what} | {seconds:.1f} | {named} of {len(ended)} | {text.replace('|', '/')} |"


def launcher_line() -> str:
    """Torchrun's agent, which hosts the store, is stopped."""
    with tempfile.TemporaryDirectory() as folder:
        found = under_launcher(Path(folder), LIMIT_S)
    ended = [(answer["seconds"], answer["error"]) for answer in found]
    return row("group set-up", "torchrun's agent stopped, which hosts the store", "the launcher", ended)


def refuses(group: TorchGroup) -> tuple[float, str] | None:
    """Rank 1 alone refuses its input; then a group of all is made."""
    begin = time.monotonic()

    def make() -> None:
        if group.rank == CULPRIT:
            raise InputError("did you mean 'foremoe'?")

    try:
        make_on_all(group, make)
    except InputError as error:
        found = time.monotonic() - begin, str(error)
    TorchGroup(group.process_group, timeout_s=PATIENCE_S).gather("here")
    return None if group.rank == CULPRIT else found


def refusal_line() -> str:
    """A one-sided refusal."""
    results = run_processes(refuses, RANKS, timeout_s=PATIENCE_S, limit_s=PATIENCE_S)
    return row("attach, its arguments", f"rank {CULPRIT} refuses", f"rank {CULPRIT}", [r for r in results if r is not None])


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--place", choices=list(PLACES), help="drill there alone")
    parser.add_argument("--host", action="store_true", help="only those in which the culprit hosts the store")
    args = parser.parse_args()
    about = (
        f"Measured on: {hardware()}. Command: `python -m bench.drills`. {RANKS} processes over gloo."
        f" Limits: {LIMIT_S:g} s for another rank, {LIMIT_S / 2:g} s for a copy."
    )
    lines = [
        about, "", "| where | what happens | the others end after, s | they name it | what they say |",
        "| --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    places = list(PLACES) if args.place is None else [args.place]
    drills: list[Callable[[], str]] = []
    if not args.host:
        drills = [partial(line, at, fault) for at in places for fault in (FAULTS if at in REPORTED else ("killed", "stopped"))]
    drills += [partial(line, at, fault, 0) for at in places if at in BY_HOST for fault in ("killed", "stopped", "cut off")]
    if args.place is None:
        drills += [launcher_line, refusal_line]
    for one in drills:
        lines.append(one())
        print(lines[-1], file=sys.stderr, flush=True)
    emit("# Drills\n\n" + "\n".join(lines) + "\n", args.out)


if __name__ == "__main__":
    main()
