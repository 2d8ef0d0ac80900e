"""What must not go unnoticed: a wrong quota, a lost gradient, a stale host copy, a slot overwritten before backward."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import pytest
import torch
from stage_util import Case, a_case, expected_counts, make_bank, run_case, run_dense, run_passes, worst
from test_equality import TOLERANCE

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group
from foremoe.problem.schedule import Phase
from foremoe.runtime import Runtime, stage
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost

# Letters: M micro-steps, L layers, G ranks, E experts.


def test_the_case_itself_is_right_and_its_replicas_stay_in_their_slots() -> None:
    case = a_case()
    assert worst(run_threads(run_case, 2, case), run_dense(case)) < TOLERANCE
    t = case.plan.transfers
    assert len(t) == 2 and (t.phase_C == Phase.FORWARD).all()


# A wrong quota.


def test_splits_that_do_not_sum_up_to_the_quotas_are_refused_on_all_ranks() -> None:
    case = a_case()

    def run(group: Group) -> None:
        split_MLP = case.split(group.rank).copy()
        if group.rank == 0:
            split_MLP[1, 0, 0] -= 1
            split_MLP[1, 0, 5] += 1
        with Runtime(make_bank(case, group.rank, 2), group=group, backends=("local",)) as runtime:
            runtime.begin(case.plan, split_MLP)

    for error in run_threads(run, 2, errors=True):
        assert isinstance(error, InputError)
        assert "send 8 pairs to slot 0 of rank 0 in micro-step 1, layer 0; its quota is 9" in str(error)


def test_a_remapping_that_ignores_quotas_shows_in_what_slots_received(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_to_replicas(self: Any, m: int, layer: int, topk_TK: torch.Tensor) -> Any:
        expert_P = self._plan.expert_MLGS[m, layer].reshape(-1)
        last_E = torch.tensor([int((expert_P == e).nonzero()[0][-1]) for e in range(self._plan.E)])
        return last_E[topk_TK], torch.zeros((), dtype=torch.int64)

    monkeypatch.setattr(stage.PlannedStage, "slots", all_to_replicas)
    case = a_case()
    ranks = run_threads(run_case, 2, case)
    assert worst(ranks, run_dense(case)) < TOLERANCE  # the right expert all the same
    assert (ranks[1][2].served_MLS != expected_counts(case)[0][:, :, 1]).any()


# A lost gradient.


class Lossy(Local):
    """Delivers zeros in place of one gradient."""

    def __init__(self, lost_key: int) -> None:
        super().__init__()
        self.lost_key = lost_key

    def start(self, copies: Any) -> Any:
        return super().start(copies), copies

    def wait(self, handle: Any, timeout_s: float) -> None:
        super().wait(handle[0], timeout_s)
        for copy in handle[1]:
            if copy.key == self.lost_key and copy.dst is not None:
                for tensor in copy.dst:
                    tensor.zero_()


def lossy(key: int, rank: int) -> list[Local]:
    return [Lossy(key)]


@pytest.mark.parametrize("nth", range(2))
def test_a_gradient_that_is_lost_on_its_way_home_shows(nth: int) -> None:
    case = a_case()
    key = len(case.plan.transfers) + nth  # gradients come after weights; every layer has one
    for lost, differs in ((10**6, False), (key, True)):
        ranks = run_threads(run_case, 2, case, partial(lossy, lost))
        assert not any(report.fell_back for _, _, report in ranks)
        assert (worst(ranks, run_dense(case)) > 1e-3) == differs


def test_a_gradient_that_is_not_sent_ends_the_step() -> None:
    case = a_case()

    class Silent(Local):
        def start(self, copies: Any) -> Any:
            return super().start([c for c in copies if c.src is None or c.key < len(case.plan.transfers)])

    def run(group: Group) -> Any:
        bank = make_bank(case, group.rank, 2)
        with Runtime(bank, group=group, backends=(Silent(),), timeout_s=0.3) as runtime:
            runtime.begin(case.plan, case.split(group.rank))
            run_passes(case, group.rank, runtime.moe)
            runtime.end()

    errors = run_threads(run, 2, errors=True)
    assert all(isinstance(error, TransferError) for error in errors)
    assert "did not arrive over" in str(errors[0])


# A stale host copy.


def lie_about_weights(group: Group, case: Case, debug: bool) -> tuple[Any, Any, Any]:
    """Weights change between two plans, where no version counter sees it, and the second is begun as if they had not."""
    bank = make_bank(case, group.rank, group.size)
    with Runtime(bank, group=group, backends=(PinnedHost(),), debug=debug) as runtime:
        runtime.begin(case.plan, case.split(group.rank))
        run_passes(case, group.rank, runtime.moe)
        runtime.end()
        for param in bank.parameters():
            param.data.mul_(1.5)
        runtime.begin(case.plan, case.split(group.rank), same_weights=True)
        results, report = run_passes(case, group.rank, runtime.moe), runtime.end()
        return results, bank.gather(group), report


def test_a_stale_host_copy_is_an_error_in_debug_mode_and_shows_in_the_outputs() -> None:
    case = a_case("recompute", host=True)
    # A rank that fails leaves a message behind, for which its group is waited for when it goes: not for long.
    errors = get_pool(2).run(lie_about_weights, case, True, num_ranks=2, errors=True, timeout_s=5.0)
    assert any(isinstance(error, TransferError) and "differs from its home" in str(error) for error in errors)
    ranks = get_pool(2).run(lie_about_weights, case, False, num_ranks=2, errors=True)
    if any(isinstance(r, Exception) for r in ranks):  # noticed without debug mode as well
        assert any(isinstance(r, TransferError) for r in ranks)
    else:
        outputs = [({"output": results["output"]}, {}, None) for results, _, _ in ranks]
        dense = ({"output": run_dense(case, ranks[0][1])[0]["output"]}, {})
        assert worst(outputs, dense) > 1e-3


# A slot overwritten before backward.


def overwrite(runtime: Runtime, m: int, phase: Phase, chunk: int) -> None:
    """Writes zeros over a replica after its forward, behind torch's back: no version counter sees a raw pointer."""
    if phase == Phase.BACKWARD and runtime.bank.rank == 1:
        for tensor in runtime.bank.slot(0):
            ctypes.memset(tensor.data_ptr(), 0, tensor.numel() * tensor.element_size())
            other = torch.ones_like(tensor)
            ctypes.memmove(tensor.data_ptr(), other.data_ptr(), tensor.numel() * tensor.element_size())


def test_a_slot_overwritten_before_backward_is_an_error_in_debug_mode_and_shows_in_the_gradients() -> None:
    case = a_case()
    errors = run_threads(run_case, 2, case, ("local",), True, overwrite, errors=True)
    assert all(isinstance(error, TransferError) for error in errors)
    assert "replica of expert 0 of layer 0 on rank 1 differs from its home" in str(errors[1])
    assert worst(run_threads(run_case, 2, case, ("local",), False, overwrite), run_dense(case)) > 1e-3
