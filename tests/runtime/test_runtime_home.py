"""Without a plan the runtime on any number of ranks computes what a dense model on one rank computes."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from profiles import examples
from runtime_util import relative
from stage_util import Case, a_case, make_bank, run_case, run_dense, run_passes, worst
from test_equality import cases

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, ThreadGroup
from foremoe.runtime import ExpertBank, Runtime
from foremoe.testing.ranks import get_pool, run_threads

# Letters: L layers, T tokens, H hidden size, E experts, G ranks.

H = 6
TOLERANCE = 1e-12
at_home = partial(run_case, home=True)


@given(cases())
@examples(36)
def test_equals_the_dense_model(case: Case) -> None:
    assert worst(run_threads(at_home, case.plan.G, case), run_dense(case)) < TOLERANCE


def test_on_processes() -> None:
    case = a_case()
    assert worst(get_pool(2).run(at_home, case, num_ranks=2), run_dense(case)) < TOLERANCE


def test_tokens_that_need_no_gradient_still_train_the_experts() -> None:
    case = a_case()

    def run(group: Group) -> dict[str, torch.Tensor]:
        bank = make_bank(case, group.rank, 2)
        with Runtime(bank, group=group) as runtime:
            runtime.begin_home()
            run_passes(case, group.rank, lambda layer, x, *rest: runtime.moe(layer, x if layer else x.detach(), *rest))
            runtime.end()
        for name, param in bank.named_parameters():
            assert param.grad is not None and param.grad.data_ptr() == bank._main[name].data_ptr()
        return bank.gather(group, gradients=True)

    dense = run_dense(case)[1]
    for grads in run_threads(run, 2):
        assert all(relative(grads[name], grad) < TOLERANCE for name, grad in dense.items())


def test_every_pair_is_counted_where_it_was_served() -> None:
    case = a_case()
    plan, reports = case.plan, [report for _, _, report in run_threads(at_home, 2, case)]
    for m, layer in np.ndindex(plan.M, plan.L):
        load_E = sum(torch.bincount(case.topk[m, layer, g].view(-1), minlength=plan.E) for g in (0, 1)).numpy()
        for rank, report in enumerate(reports):
            assert report.served_MLS[m, layer].tolist() == load_E[rank * plan.B : (rank + 1) * plan.B].tolist()
    assert not any(r.drift_ML.any() or r.fell_back or r.timeline for r in reports)
    assert all(r.forward_cpu_s > 0 and r.backward_cpu_s > 0 for r in reports)


def one_rank(dtype: torch.dtype = torch.float64) -> tuple[ExpertBank, Runtime]:
    """Two layers of two experts, and a runtime without a stage."""
    bank = ExpertBank(num_layers=2, num_experts=2, hidden_size=H, ffn_size=4, rank=0, num_ranks=1, dtype=dtype)
    return bank, Runtime(bank, group=ThreadGroup.of(1)[0])


def test_forward_alone_sets_no_gradient() -> None:
    bank, runtime = one_rank()
    runtime.begin_home()
    with torch.no_grad():
        y_TH = runtime.moe(0, torch.ones(3, H, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.uint8), torch.ones(3, 1))
    report = runtime.end()
    assert not y_TH.requires_grad and report.served_MLS[:, 0].tolist() == [[3, 0]] and report.backward_cpu_s == 0.0
    assert all(param.grad is None for param in bank.parameters())


def test_autocast_leaves_the_experts_alone() -> None:
    _, runtime = one_rank(torch.float32)
    runtime.begin_home()
    x_TH, topk_TK, weight_TK = torch.randn(3, H), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    plain = runtime.moe(0, x_TH, topk_TK, weight_TK)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = runtime.moe(0, x_TH, topk_TK, weight_TK)
    assert torch.equal(plain, cast)
    cast.sum().backward()


def test_wrong_arguments_end_in_one_sentence() -> None:
    bank, runtime = one_rank()
    x_TH, topk_TK, weight_TK = torch.ones(3, H, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    with pytest.raises(InputError, match="no stage is running"):
        runtime.moe(0, x_TH, topk_TK, weight_TK)
    with pytest.raises(InputError, match="no stage is running"):
        runtime.end()
    runtime.begin_home()
    with pytest.raises(InputError, match="call end"):
        runtime.begin_home()
    with pytest.raises(InputError, match="layer 2 does not exist"):
        runtime.moe(2, x_TH, topk_TK, weight_TK)
    with pytest.raises(InputError, match="cast x"):
        runtime.moe(0, x_TH.float(), topk_TK, weight_TK)
    with pytest.raises(InputError, match=r"\[T, H\]"):
        runtime.moe(0, x_TH, topk_TK[:2], weight_TK)
    for dtype in (torch.float32, torch.bool, torch.bfloat16):
        with pytest.raises(InputError, match="topk must hold the experts of each token as whole numbers"):
            runtime.moe(0, x_TH, topk_TK.to(dtype), weight_TK)
    with pytest.raises(InputError, match="experts 0 to 2"):
        runtime.moe(0, x_TH, topk_TK + torch.tensor([[0], [1], [2]]), weight_TK)
    runtime.close()
    runtime.close()
    with pytest.raises(InputError, match="was closed"):
        runtime.begin_home()
    with pytest.raises(InputError, match="rank 0 of 1"):
        Runtime(bank, group=ThreadGroup.of(2)[1])


def test_after_an_exception_in_a_stage_nothing_is_left_and_the_other_ranks_end() -> None:
    case = a_case()
    alive: list[weakref.ref[Any]] = []

    def broken(group: Group) -> None:
        bank = make_bank(case, group.rank, group.size)
        with Runtime(bank, group=group) as runtime:
            alive.extend([weakref.ref(runtime), weakref.ref(bank)])
            runtime.begin_home()
            first = 0, 0, group.rank
            y_TH = runtime.moe(0, case.x[first].requires_grad_(), case.topk[first], case.weight[first])
            if group.rank == 0:
                raise ArithmeticError("the loss is not finite")
            y_TH.sum().backward()

    errors = run_threads(broken, 2, timeout_s=20.0, errors=True)
    assert isinstance(errors[0], ArithmeticError)
    assert isinstance(errors[1], TransferError) and "rank 0: ArithmeticError: the loss is not finite" in str(errors[1])
    del errors
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
