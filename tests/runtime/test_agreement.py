"""What goes wrong on one rank is an error on all of them: nobody waits in vain, publishes gradients or takes the step alone."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from stage_util import a_case, make_bank, run_passes

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed import planning
from foremoe.distributed.group import Group
from foremoe.distributed.planning import PlanningTask, homes_together, plan_together
from foremoe.machine.cluster import Cluster
from foremoe.planner.planner import Planner
from foremoe.problem.schedule import Phase
from foremoe.runtime import Runtime, replay, stage
from foremoe.solvers import Anneal
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.transfer import admission, engine, pinned_host
from foremoe.transfer.carrier import Carrier
from foremoe.transfer.residency import Residencies
from foremoe.transfer.returns import Returns

RANKS = 2


# Programs that all ranks run. What they return says whether the rank took the step; an error says why it did not.


def step(group: Group, backends: tuple[str, ...] = ("local",), host: bool = False) -> tuple[bool, bool, str]:
    """One step by a plan whose routing is known: whether gradients were published, weights changed, and the error."""
    case, g = a_case(host=host), group.rank
    bank = make_bank(case, g, group.size)
    before = [param.detach().clone() for param in bank.parameters()]
    optimizer, error = torch.optim.SGD(bank.parameters(), lr=1.0), ""
    routing = {(m, layer): topk_TK for (m, layer, source), topk_TK in case.topk.items() if source == g}
    try:
        with Runtime(bank, group=group, backends=backends, timeout_s=20.0) as runtime:
            runtime.begin(case.plan, case.split(g), routing=routing)
            run_passes(case, g, runtime.moe)
            runtime.end()
            optimizer.step()
    except (InputError, TransferError) as found:
        error = f"{type(found).__name__}: {found}"
    changed = any(not torch.equal(a, b) for a, b in zip(before, bank.parameters(), strict=True))
    return any(param.grad is not None for param in bank.parameters()), changed, error


def step_by_host(group: Group) -> tuple[bool, bool, str]:
    return step(group, ("pinned_host", "local"), host=True)


def counts_of(case: Any, rank: int) -> np.ndarray:
    return case.load_MLGE[:, :, rank]


def shared_plan(group: Group, homes: bool = False) -> tuple[bool, bool, str]:
    """A plan of all ranks: whether this rank has one, twice, and the error."""
    case = a_case()
    head = case.plan.header
    task = PlanningTask(
        model=head.model, cluster=Cluster.preset("8xh100", num_ranks=group.size), stage="update", schedule=head.schedule,
        redundant=1, slot_depth=head.slot_depth, moe_layer_L=np.arange(2, dtype=np.int32), home_LE=np.array(case.plan.home_LE),
    )  # fmt: skip
    load_MLE = counts_of(case, group.rank)
    tokens_M = load_MLE.sum(axis=(1, 2)) // 4
    try:
        if homes:
            homes_together(group, Planner(home=Anneal()), [task], [load_MLE], [tokens_M])
        else:
            plan_together(group, Planner(), task, load_MLE, tokens_M, num_threads=1)
    except (InputError, TransferError) as found:
        return False, False, f"{type(found).__name__}: {found}"
    return True, True, ""


def shared_homes(group: Group) -> tuple[bool, bool, str]:
    return shared_plan(group, homes=True)


# Faults of one rank.


@dataclass(frozen=True)
class Fault:
    """A name of a module or class that does otherwise on one rank.

    Attributes:
        effect: in its place; is given the original and its arguments.
        told: what every rank says, as a pattern.
        covers: functions that raise after ranks have exchanged something, and that this fault makes raise.
        alone: the rank leaves a pass by itself. The others then name it, or what they lack from it, whichever they meet first.
    """

    owner: Any
    name: str
    effect: Callable[..., Any]
    told: str
    covers: tuple[str, ...] = ()
    alone: bool = False
    program: Callable[..., tuple[bool, bool, str]] = step


def returns(value: Any) -> Callable[..., Any]:
    return lambda original, *args, **kwargs: value


def raises(error: type[Exception]) -> Callable[..., Any]:
    def effect(original: Any, *args: Any, **kwargs: Any) -> Any:
        raise error("made to fail")

    return effect


def lacks_in_backward(original: Any, *args: Any) -> Any:
    if args[3] == Phase.BACKWARD:
        raise TransferError("made to fail")
    return original(*args)


def lacking(original: Any, *args: Any) -> bool:
    original(*args)
    return False


def fewer(original: Any, *args: Any) -> Any:
    return original(*args)[1:]


FAULTS = {
    "routing that fits no plan": Fault(
        replay, "_routing_fault", returns("made to fail"), "InputError: rank R: made to fail",
        ("runtime/replay.py:ReplayedRows.__init__",),
    ),
    "routers that differ": Fault(
        replay.ReplayedRows, "fault", returns("made to fail"), "InputError: rank R: made to fail, and were sent to the latter",
        ("runtime/runtime.py:Runtime.end",),
    ),
    "routers of another shape": Fault(replay.ReplayedRows, "_find", raises(InputError), "made to fail", alone=True),
    "a split that does not fit": Fault(
        stage, "split_fault", returns("made to fail"), "InputError: rank R: made to fail", ("runtime/stage.py:agree_on_split",)
    ),
    "splits that do not sum up": Fault(stage, "received_fault", returns("made to fail"), "InputError: rank R: made to fail"),
    "a plan that is refused": Fault(
        engine, "refusal", returns("made to fail"), "made to fail", ("transfer/admission.py:require_agreement",)
    ),
    "another plan": Fault(admission, "fingerprint", returns("other"), "was given another plan than rank 0"),
    "a replica that is lacking": Fault(
        stage.PlannedStage, "prepare", lacking, "TransferError: .*is missing, and its routing was known", alone=True
    ),
    "a replica that backward lacks": Fault(
        Residencies, "of", lacks_in_backward, "TransferError: .*made to fail", alone=True
    ),
    "a gradient that is lost": Fault(
        Returns, "_settle_oldest", raises(TransferError), "TransferError: .*made to fail", ("transfer/engine.py:Engine.end",),
        alone=True,
    ),
    "copies that do not end": Fault(Carrier, "finish", raises(TransferError), "TransferError: .*made to fail"),
    "host store: a rank that publishes nothing": Fault(
        pinned_host.secrets, "token_hex", raises(OSError), "TransferError: .*rank R cannot publish its weights: made to fail",
        ("transfer/host_fill.py:agreed", "transfer/pinned_host.py:PinnedHost.publish"), program=step_by_host,
    ),
    "host store: other entries": Fault(
        pinned_host, "hash", returns(0), "InputError: rank 1 publishes other entries",
        ("transfer/pinned_host.py:PinnedHost._publish",), program=step_by_host,
    ),
    "a planner that fails": Fault(
        planning, "_plan_layers", raises(ZeroDivisionError), r"InputError: rank R could not plan its layers \(ZeroDivisionError",
        ("distributed/planning.py:_gathered",), program=shared_plan,
    ),
    "arrays of another plan": Fault(
        planning, "_arrays_of", returns({}), "TransferError: .*rank R sent arrays that do not match its layers",
        program=shared_plan,
    ),
    "a path solver that fails": Fault(
        planning, "linked", raises(ZeroDivisionError), "InputError: rank R could not choose the links",
        ("distributed/planning.py:_linked",), program=shared_plan,
    ),
    "counts of another size": Fault(
        __import__(__name__), "counts_of", fewer, "InputError: ranks have counts of different sizes",
        ("distributed/planning.py:_workload",), program=shared_plan,
    ),
    "a home level that fails": Fault(
        Planner, "homes", raises(ZeroDivisionError), "InputError: rank R could not plan its layers", program=shared_homes
    ),
}  # fmt: skip


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_rank_is_an_error_on_all(name: str, rank: int) -> None:
    """On threads. The limit of a message is far above what the test takes: who waits in vain fails it by its message."""
    fault = FAULTS[name]
    original, hit = getattr(fault.owner, fault.name, hash), threading.Event()

    def broken(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name != f"rank {rank}":
            return original(*args, **kwargs)
        hit.set()
        return fault.effect(original, *args, **kwargs)

    with patch.object(fault.owner, fault.name, broken, create=fault.name == "hash"):
        found = run_threads(fault.program, RANKS, timeout_s=120.0)
    assert hit.is_set()
    for published, changed, error in found:
        assert not published and not changed and error, found
    for error in [found[rank][2]] if fault.alone else [error for *_, error in found]:
        assert re.search(fault.told.replace("rank R", f"rank {rank}"), error), (error, fault.told)


def test_the_programs_go_through_without_a_fault() -> None:
    for program in dict.fromkeys(fault.program for fault in FAULTS.values()):
        assert run_threads(program, RANKS) == [(True, True, "")] * RANKS


def differs(group: Group, rank: int) -> tuple[bool, bool, str]:
    with patch.object(replay.ReplayedRows, "fault", lambda self: "made to fail" if group.rank == rank else ""):
        return step(group, ("collective",))


@pytest.mark.parametrize("rank", range(RANKS))
def test_routers_that_differ_on_one_process_are_an_error_on_all(rank: int) -> None:
    # Another limit is another group: in the one before the runtime has reported its error.
    for published, changed, error in get_pool(RANKS).run(differs, rank, num_ranks=RANKS, timeout_s=60.0 + rank):
        assert not published and not changed and error.startswith(f"InputError: rank {rank}: made to fail, and were sent to")
