"""Stages by a plan: experts of other kinds, bfloat16, stages one after the other, and what happens when they break off."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from runtime_util import dense_moe, relative
from stage_util import Case, a_case, make_bank, run_case, run_dense, run_passes, worst
from torch.utils.checkpoint import checkpoint

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group, ThreadGroup
from foremoe.problem.schedule import Phase, Schedule
from foremoe.runtime import Runtime
from foremoe.runtime.products import add_product
from foremoe.testing.ranks import run_threads

# Letters: L layers, G ranks, N pairs of an expert, H hidden size, F ffn size.


class Tanh:
    """An MLP with a bias: two matrices and a vector."""

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        return {"up": (hidden_size, ffn_size), "bias": (ffn_size,), "down": (ffn_size, hidden_size)}

    def forward(self, x_NH: torch.Tensor, weights: Any) -> Any:
        up_HF, bias_F, down_FH = weights
        act_NF = torch.tanh(x_NH @ up_HF + bias_F)
        return act_NF @ down_FH, (act_NF,)

    def backward(self, x_NH: torch.Tensor, saved: Any, grad_y_NH: torch.Tensor, weights: Any, grads: Any) -> torch.Tensor:
        up_HF, _, down_FH = weights
        (act_NF,) = saved
        add_product(grads[2], act_NF.T, grad_y_NH)
        grad_NF = (grad_y_NH @ down_FH.T) * (1 - act_NF**2)
        grads[1].add_(grad_NF.sum(0))
        add_product(grads[0], x_NH.T, grad_NF)
        return grad_NF @ up_HF.T


def test_experts_of_another_kind() -> None:
    case = a_case()

    def run(group: Group) -> Any:
        bank = make_bank(case, group.rank, 2, Tanh())
        with Runtime(bank, group=group, backends=("local",), debug=True) as runtime:
            runtime.begin(case.plan, case.split(group.rank))
            return run_passes(case, group.rank, runtime.moe), runtime.end(), bank.gather(group, gradients=True)

    weights = make_bank(case, 0, 1, Tanh()).gather(ThreadGroup.of(1)[0])
    leaves = {name: w.requires_grad_() for name, w in weights.items()}
    plain = lambda x, up, bias, down: torch.tanh(x @ up + bias) @ down  # noqa: E731
    for rank, (results, _, grads) in enumerate(run_threads(run, 2)):
        for w in leaves.values():
            w.grad = None
        for g in (0, 1):
            moe = lambda layer, x, k, w: dense_moe(x, k, w, {n: t[layer] for n, t in leaves.items()}, plain)  # noqa: E731
            dense = run_passes(case, g, moe)
            if g == rank:
                for kind, part in results.items():
                    assert all(relative(t, dense[kind][key], floor=1.0) < 1e-12 for key, t in part.items())
        assert all(relative(grads[name], w.grad) < 1e-12 for name, w in leaves.items())


def test_bfloat16_sums_gradients_in_float32() -> None:
    case = a_case(dtype=torch.bfloat16)
    wide = lambda tensors: {key: t.double() for key, t in tensors.items()}  # noqa: E731
    exact = dataclasses.replace(
        case, x=wide(case.x), coefficient=wide(case.coefficient), weight=wide(case.weight), dtype=torch.float64
    )
    weights = {name: w.double() for name, w in make_bank(case, 0, 1).gather(ThreadGroup.of(1)[0]).items()}
    dense, dense_grads = run_dense(exact, weights)
    for results, grads, _ in run_threads(run_case, 2, case):
        for kind in ("output", "x", "weight"):
            assert all(relative(t.double(), dense[kind][key]) < 0.05 for key, t in results[kind].items())
        for name, grad in grads.items():
            assert grad.dtype == torch.float32 and relative(grad.double(), dense_grads[name]) < 0.05


def test_stages_by_plan_and_at_home_alternate_and_agree() -> None:
    recompute, update = a_case("recompute"), a_case()

    def run(group: Group) -> Any:
        bank = make_bank(update, group.rank, 2)
        with Runtime(bank, group=group, backends=("local",), debug=True) as runtime:
            found = []
            for case in (recompute, update, update):
                runtime.begin(case.plan, case.split(group.rank), same_weights=bool(found))
                planned = run_passes(case, group.rank, runtime.moe)
                runtime.end()
                grads = bank.gather(group, gradients=True)
                bank.zero_grad()
                runtime.begin_home()
                found.append((planned, grads, run_passes(case, group.rank, runtime.moe)))
                assert runtime.end().timeline is None
                for name, grad in bank.gather(group, gradients=True).items():
                    assert relative(grads[name], grad) < 1e-12
                bank.zero_grad()
            return found

    for found in run_threads(run, 2):
        for planned, _, home in found:
            for kind, part in planned.items():
                assert all(relative(t, home[kind][key], floor=1.0) < 1e-12 for key, t in part.items())


def test_a_forward_beyond_the_plan_is_refused() -> None:
    case = a_case()

    def run(group: Group) -> None:
        bank = make_bank(case, group.rank, 2)
        with Runtime(bank, group=group, backends=("local",)) as runtime:
            runtime.begin(case.plan, case.split(group.rank))
            run_passes(case, group.rank, runtime.moe)
            with pytest.raises(InputError, match="layer 0 runs forward once more than the 2 times"):
                runtime.moe(0, case.x[0, 0, 0], case.topk[0, 0, 0], case.weight[0, 0, 0])
            runtime.end()

    run_threads(run, 2)


def test_a_checkpointed_block_that_the_schedule_does_not_name_is_refused() -> None:
    case = a_case(schedule=Schedule.accumulate(2, True))

    def run(group: Group) -> None:
        with Runtime(make_bank(case, group.rank, 2), group=group, backends=("local",)) as runtime:
            runtime.begin(case.plan, case.split(group.rank))
            m, g = 0, group.rank

            def both(x_TH: torch.Tensor) -> torch.Tensor:
                for layer in (0, 1):
                    T = len(case.topk[m, layer, g])
                    x_TH = runtime.moe(layer, x_TH[:T], case.topk[m, layer, g], case.weight[m, layer, g])
                return x_TH

            checkpoint(both, case.x[m, 0, g], use_reentrant=False).sum().backward()

    for error in run_threads(run, 2, errors=True):
        assert isinstance(error, InputError) and "backward of micro-step 0, layer 1 next" in str(error)


def test_a_stage_may_stop_early_on_all_ranks() -> None:
    case = a_case()

    def run(group: Group) -> Any:
        with Runtime(make_bank(case, group.rank, 2), group=group, backends=("local",), debug=True) as runtime:
            runtime.begin(case.plan, case.split(group.rank))

            def stop(m: int, phase: Phase, chunk: int) -> None:
                if m == 1:
                    raise StopIteration

            with pytest.raises(StopIteration):
                run_passes(case, group.rank, runtime.moe, stop)
            with pytest.raises(InputError, match="4 of 8 uses were not run"):
                runtime.end()
            report = runtime.end(partial=True)
            runtime.begin(case.plan, case.split(group.rank))
            run_passes(case, group.rank, runtime.moe)
            return report, runtime.end()

    for report, again in run_threads(run, 2):
        assert report.served_MLS[0].any() and not report.served_MLS[1].any() and again.served_MLS[1].any()


def test_an_exception_inside_a_stage_leaves_nothing_and_a_fresh_runtime_goes_on() -> None:
    case, alive = a_case(), []

    def run(group: Group) -> Any:
        bank = make_bank(case, group.rank, 2)
        runtime = Runtime(bank, group=group, backends=("local",), debug=True)
        alive.extend([weakref.ref(runtime), weakref.ref(bank)])
        runtime.begin(case.plan, case.split(group.rank))

        def fail(m: int, phase: Phase, chunk: int) -> None:
            if m == 1 and phase == Phase.BACKWARD:
                raise ArithmeticError

        with pytest.raises(ArithmeticError):
            run_passes(case, group.rank, runtime.moe, fail)
        runtime.close()
        bank.zero_grad()
        with Runtime(bank, group=group, backends=("local",), debug=True) as fresh:
            fresh.begin(case.plan, case.split(group.rank))
            results, report = run_passes(case, group.rank, fresh.moe), fresh.end()
            return results, bank.gather(group, gradients=True), report

    ranks = run_threads(run, 2)
    assert worst(ranks, run_dense(case)) < 1e-10
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4


def test_stages_do_not_pile_anything_up() -> None:
    case = a_case(schedule=Schedule.one_f_one_b(2, 2, 0, True), mode="non-reentrant")

    def run(group: Group) -> list[int]:
        bank, counts = make_bank(case, group.rank, 2), []
        with Runtime(bank, group=group, backends=("local",)) as runtime:
            for i in range(12):
                runtime.begin(case.plan, case.split(group.rank), same_weights=i > 0)
                run_passes(case, group.rank, runtime.moe)
                runtime.end()
                group.barrier()
                if group.rank == 0 and i in (2, 11):  # a look at all objects takes most of a second
                    gc.collect()
                    counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
                group.barrier()
        return counts

    counts = run_threads(run, 2)[0]
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("wrong", ["shape", "homes", "layers"])
def test_a_plan_that_does_not_fit_is_refused_on_all_ranks(wrong: str) -> None:
    case = a_case()

    def run(group: Group) -> None:
        bank, split_MLP = make_bank(case, group.rank, 2), case.split(group.rank)
        if wrong == "homes":
            other = dataclasses.replace(case.plan, home_LE=np.ascontiguousarray(case.plan.home_LE[:, ::-1]))
            bank = make_bank(dataclasses.replace(case, plan=other), group.rank, 2)
        elif wrong == "layers":
            one: Any = SimpleNamespace(L=1, E=case.plan.E, header=case.plan.header, home_LE=case.plan.home_LE[:1])
            bank = make_bank(dataclasses.replace(case, plan=one), group.rank, 2)
        elif group.rank == 1:
            split_MLP = split_MLP[:1]
        with Runtime(bank, group=group, backends=("local",)) as runtime:
            runtime.begin(case.plan, split_MLP)

    for error in run_threads(run, 2, errors=True):
        assert isinstance(error, InputError)
        assert ("rank 1: split_MLP must have shape" if wrong == "shape" else "home_LE") in str(error)


def test_the_report_counts_cpu_time_and_bytes() -> None:
    case: Case = a_case()
    for _, _, report in run_threads(run_case, 2, case):
        told = report.to_dict()
        assert told["forward_cpu_s"] > 0 and told["backward_cpu_s"] > 0 and told["drift"] == 0
        assert told["served"] == report.served_MLS.sum() and told["timeline"]["fell_back"] == 0
        assert told["fell_back"] == 0 and told["retired"] == []
        lost = dataclasses.replace(report, timeline=dataclasses.replace(report.timeline, retired=("Collective",)))
        assert lost.to_dict()["retired"] == ["Collective"]
