"""The order of exchanges, experts and copies in a layer of the runtime."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from stage_util import MODES, a_case, make_bank, run_dense, run_passes, worst

from foremoe.distributed.group import Group
from foremoe.problem.schedule import Schedule
from foremoe.runtime import Runtime, SwiGLU
from foremoe.runtime.dispatch import Exchange
from foremoe.testing.ranks import run_threads
from foremoe.transfer.base import Copy
from foremoe.transfer.local import Local
from foremoe.transfer.streams import Landing

SEEN: dict[int, str] = defaultdict(
    str
)  # thread of a rank -> e: exchange, l: wait for weights, p: products, w, g: weights, gradients leave


def note(what: str) -> None:
    SEEN[threading.get_ident()] += what


class Noted(SwiGLU):
    def forward(self, x_NH: torch.Tensor, weights: Any) -> Any:
        note("p")
        return super().forward(x_NH, weights)

    def backward(self, *args: Any) -> torch.Tensor:
        note("p")
        return super().backward(*args)


class NotedLocal(Local):
    num_copies = 0

    def start(self, copies: Sequence[Copy]) -> Any:
        note("".join("w" if copy.key < self.num_copies else "g" for copy in copies))
        return super().start(copies)


@pytest.mark.parametrize("mode", MODES)
def test_copies_leave_behind_the_last_exchange_and_weights_are_waited_for_behind_the_first(mode, monkeypatch):
    send, wait = Exchange._send, Landing.wait
    monkeypatch.setattr(Exchange, "_send", lambda *args: (note("e"), send(*args))[1])
    monkeypatch.setattr(Landing, "wait", lambda self: (note("l"), wait(self))[1])
    schedule = Schedule.accumulate(2) if mode == "kept" else Schedule.accumulate(2, reforward=True)
    case = a_case(schedule=schedule, mode=mode)

    def run(group: Group) -> Any:
        bank, local = make_bank(case, group.rank, 2, Noted()), NotedLocal()
        local.num_copies = len(case.plan.transfers)
        with Runtime(bank, group=group, backends=(local,), prefetch=0) as runtime:
            runtime.begin(case.plan, case.split(group.rank))
            results = run_passes(case, group.rank, runtime.moe)
            report = runtime.end()
        return (results, bank.gather(group, gradients=True), report), SEEN.pop(threading.get_ident())

    ranks = run_threads(run, 2)
    assert worst([found for found, _ in ranks], run_dense(case)) < 1e-12
    for _, seen in ranks:
        assert re.fullmatch("w*(el+p+eg*w*)*", seen), seen
        assert "ew" in seen and "eg" in seen
