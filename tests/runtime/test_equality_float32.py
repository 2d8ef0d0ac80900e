"""One float32 step by a plan lies within a derived bound of the exact result, and so does the dense step."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import assume, given, note
from hypothesis import strategies as st
from profiles import examples
from rounding import Bounded, expert, gamma
from stage_util import Case, H, Results, case_of, make_bank, run_case, run_dense

from foremoe.distributed.group import ThreadGroup
from foremoe.problem.schedule import Schedule
from foremoe.testing.pasteable import describe
from foremoe.testing.ranks import run_threads
from foremoe.testing.samples import random_sources
from foremoe.testing.strategies import plans, problems

# Letters: M micro-steps, L layers, G ranks, N pairs of an expert, T tokens, K top-k, H hidden size.

Bounds = dict[str, dict[tuple[int, int, int], Bounded]]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Every layer is a chunk of its own, so layers do not feed each other and errors stay within one."""
    problem = draw(problems(max_ranks=4, max_pairs=12, max_micro_steps=3, min_layers=2, max_layers=2, stages=("update",)))
    schedule = Schedule.interleaved(problem.M, 1, 2, 0, draw(st.booleans()))
    problem = dataclasses.replace(problem, schedule=schedule)
    note(describe(problem))
    plan, rng = draw(plans(problem)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    mode = draw(st.sampled_from(["reentrant", "non-reentrant"])) if schedule.reforward else "kept"
    return case_of(plan, random_sources(problem, rng), rng, mode=mode, dtype=torch.float32, unplanned=0.05)


def bounds(case: Case) -> tuple[Bounds, dict[str, Bounded]]:
    """Exact values and error bounds of everything that `run_dense` computes."""
    plan, found = case.plan, {"output": {}, "loss": {}, "x": {}, "weight": {}}
    weights = {name: w.double() for name, w in make_bank(case, 0, 1).gather(ThreadGroup.of(1)[0]).items()}
    grads = {name: Bounded.exact(torch.zeros_like(w)) for name, w in weights.items()}
    # A weight gradient is a sum over the pairs of an expert, with a partial sum per micro-step and slot.
    parts = plan.M * plan.G * plan.S
    for layer in range(plan.L):
        every = [(m, g) for m in range(plan.M) for g in range(plan.G)]
        sizes = [case.topk[m, layer, g].shape for m, g in every]
        join = lambda tensors: torch.cat([t.reshape(-1, t.shape[-1]).double() for t in tensors])  # noqa: E731
        x_ZH = join([case.x[m, layer, g].repeat_interleave(K, 0) for (m, g), (_, K) in zip(every, sizes, strict=True)])
        out_ZH = join(
            [case.coefficient[m, layer, g].repeat_interleave(K, 0) for (m, g), (_, K) in zip(every, sizes, strict=True)]
        )
        weight_Z = torch.cat([case.weight[m, layer, g].reshape(-1) for m, g in every]).double()
        topk_Z = torch.cat([case.topk[m, layer, g].reshape(-1) for m, g in every])
        grad_y_ZH = Bounded.exact(weight_Z[:, None]) * Bounded.exact(out_ZH)
        y_ZH, grad_x_ZH = Bounded.exact(torch.zeros_like(x_ZH)), Bounded.exact(torch.zeros_like(x_ZH))
        for e in range(plan.E):
            z = topk_Z == e
            if z.any():
                one = expert(x_ZH[z], grad_y_ZH[z], weights["gate_up"][layer, e], weights["down"][layer, e], parts)
                for whole, part in ((y_ZH, one.y_NH), (grad_x_ZH, one.grad_x_NH)):
                    whole.v[z], whole.b[z] = part
                for name, part in (("gate_up", one.grad_gate_up), ("down", one.grad_down)):
                    grads[name].v[layer, e], grads[name].b[layer, e] = part
        end = 0
        for (m, g), (T, K) in zip(every, sizes, strict=True):
            begin, end = end, end + T * K
            key, rows = (m, layer, g), slice(begin, end)
            mine = lambda b, rows=rows, T=T, K=K: Bounded(b.v[rows].view(T, K, H), b.b[rows].view(T, K, H))  # noqa: E731
            weight_TK1 = Bounded.exact(case.weight[key].double()[:, :, None])
            coefficient = case.coefficient[key].double()
            found["output"][key] = (weight_TK1 * mine(y_ZH)).sum(1) + Bounded.exact(case.x[key].double())
            found["x"][key] = mine(grad_x_ZH).sum(1) + Bounded.exact(coefficient)
            found["weight"][key] = (mine(y_ZH) * Bounded.exact(coefficient[:, None])).sum(2)
            terms = (found["output"][key] * Bounded.exact(coefficient)).v.flatten()
            error = (found["output"][key].b * coefficient.abs()).sum() + gamma(len(terms) + 1) * (
                found["output"][key].size * coefficient.abs()
            ).sum()
            found["loss"][key] = Bounded(terms.sum(), error)
    return found, grads


def excess(results: Results, grads: dict[str, torch.Tensor], bound: tuple[Bounds, dict[str, Bounded]]) -> float:
    """How often the bound the largest error is; infinity for NaN, or an error where none is allowed."""
    pairs = [(tensor, bound[0][kind][key]) for kind, part in results.items() for key, tensor in part.items()]
    pairs += [(grads[name], bound[1][name]) for name in grads]
    worst = 0.0
    for tensor, (v, b) in pairs:
        error = (tensor.double() - v).abs()
        over = torch.where(error <= b, 0.0, float("inf")) if not (b > 0).all() else error / b
        worst = max(worst, float(torch.nan_to_num(over, nan=float("inf")).max()) if over.numel() else 0.0)
    return worst


@given(cases())
@examples(20)
def test_a_float32_step_is_within_rounding_of_the_exact_one(case: Case) -> None:
    bound = bounds(case)
    for results, grads, _ in run_threads(run_case, case.plan.G, case):
        assert excess(results, grads, bound) <= 1.0
    assert excess(*run_dense(case), bound) <= 1.0


@given(cases(), st.integers(0, 2**32 - 1))
@examples(20)
def test_the_bound_is_tight_enough_to_see_one_pair_that_is_off_by_a_thousandth(case: Case, seed: int) -> None:
    keys = [key for key, weight_TK in case.weight.items() if weight_TK.numel()]
    assume(keys)
    rng = np.random.default_rng(seed)
    key = keys[rng.integers(len(keys))]
    weight_TK = case.weight[key].clone()
    weight_TK.view(-1)[rng.integers(weight_TK.numel())] *= 1.001
    off = dataclasses.replace(case, weight=case.weight | {key: weight_TK})
    assert excess(*run_dense(off), bounds(case)) > 1.0
