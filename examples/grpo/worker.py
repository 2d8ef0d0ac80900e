"""One rank of the demo: pre-training, then GRPO steps with every stage run in three arms."""

from __future__ import annotations

import datetime
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.grpo.arms import ARMS, SHOWN
from examples.grpo.experts import ClockedSwiGLU
from examples.grpo.pages import write_pages
from examples.grpo.planning import SLOT_DEPTH, smallest_redundant, static_skew, trace_of, workloads_of
from examples.grpo.policy import Policy
from examples.grpo.results import summary
from examples.grpo.settings import Settings
from examples.grpo.step import StepRecord, Trainer, collect
from examples.grpo.train import optimizer_of, pretrain
from foremoe.cli.progress import clock
from foremoe.cli.terminal import width, wrapped
from foremoe.distributed.group import Group, TorchGroup
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.runtime import Runtime
from foremoe.workload.workload import STAGES

_TIMEOUT_S = 120.0
_BACKENDS = ("collective", "pinned_host")


def run(settings: Settings, num_steps: int, redundant: int | None, pages: Path | None) -> dict[str, Any]:
    """The demo on one rank of an elastic launch; figures on rank 0, nothing on the others.

    Args:
        redundant: R, or None for the smallest whose load bound allows to take away 95 % of (static skew - 1).
        pages: Folder for the last update's report page and trace, or None.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_TIMEOUT_S))
    try:
        return _demo(TorchGroup(timeout_s=_TIMEOUT_S), settings, num_steps, redundant, pages)
    finally:
        dist.destroy_process_group()


def _demo(group: Group, settings: Settings, num_steps: int, redundant: int | None, pages: Path | None) -> dict[str, Any]:
    say = Progress(group.rank == 0, num_steps)
    torch.manual_seed(settings.seed)
    policy, clock = Policy(settings), ClockedSwiGLU()
    # How many slots are needed follows from routing that does not exist yet, so there are buffers for all that could be.
    most = settings.num_experts - settings.num_experts // group.size
    bank = ExpertBank(
        num_layers=settings.num_layers, num_experts=settings.num_experts, hidden_size=settings.hidden_size,
        ffn_size=settings.ffn_size, rank=group.rank, num_ranks=group.size, seed=settings.seed, math=clock,
        num_buffers=most * SLOT_DEPTH,
    )  # fmt: skip
    optimizer = optimizer_of(policy, bank)
    with Runtime(bank, group=group, backends=_BACKENDS, timeout_s=_TIMEOUT_S) as runtime:
        begin_s = time.perf_counter()
        say(f"pre-training: {settings.pretrain_steps} supervised steps")
        pretrain(policy, bank, runtime, optimizer, say.pretraining)
        pretrain_s = time.perf_counter() - begin_s
        workloads = workloads_of(trace_of(collect(policy, bank, group, 0)[0], settings), settings, group.size)
        chosen = smallest_redundant(workloads, settings) if redundant is None else redundant
        static = ", ".join(f"{stage} {float(static_skew(work).mean()):.2f}" for stage, work in workloads.items())
        say(f"static skew: {static}; redundant slots per rank: {chosen}")
        trainer = Trainer(policy, bank, runtime, optimizer, clock, chosen)
        records: list[list[StepRecord]] = []
        for step in range(num_steps):
            begin_s = time.perf_counter()
            answers = group.gather(trainer.step(step).to_message())
            records.append([StepRecord.from_message(answer) for answer in answers])
            say.step(records[-1], time.perf_counter() - begin_s)
        last = trainer.reward_of(num_steps)
        if pages is not None and trainer.last is not None:
            write_pages(pages, group, *trainer.last)
    say(f"reward after the last step: {last:.3f}")
    if group.rank:
        return {}
    return summary(records, last, redundant=chosen) | {"pretrain_s": pretrain_s}


class Progress:
    """Lines on stderr while the demo runs; silent on all ranks but one."""

    def __init__(self, speaks: bool, num_steps: int) -> None:
        self.speaks, self.num_steps, self.num_done = speaks, num_steps, 0

    def __call__(self, line: str) -> None:
        if self.speaks:
            print("\n".join(wrapped(line, width(sys.stderr))), file=sys.stderr, flush=True)

    def pretraining(self, step: int, num_steps: int, loss: float) -> None:
        """A line every eighth of the way."""
        every = max(1, num_steps // 8)
        if step % every == 0 or step == num_steps:
            self(f"pre-training {step}/{num_steps}: loss {loss:.3f}")

    def step(self, by_rank: list[StepRecord], seconds: float) -> None:
        """One line for a GRPO step: reward, and the wall seconds of both stages by arm."""
        record = by_rank[0]
        self.num_done += 1
        times = "; ".join(
            f"{stage} " + " ".join(f"{SHOWN[arm]} {record.runs[stage, arm].wall_s:.2f}" for arm in ARMS) + " s"
            for stage in STAGES
        )
        left = (self.num_steps - self.num_done) * seconds
        ends = f", about {clock(left)} left" if left else ""
        self(f"step {self.num_done}/{self.num_steps}: reward {record.reward:.3f}; {times}; {seconds:.1f} s in all{ends}")
