"""Experts that compute away from their parameters for a stage: the same gradients, and every parameter as it was."""

import cpu
import numpy as np
import program_arms as arms
import pytest
import torch
from layouts import Case
from program import Layout, Program

from foremoe.base.errors import InputError

CASES = (
    Case(4, Layout(ep=4), nodes=2),
    Case(4, Layout(ep=2, pp=2, num_layers=4, recompute="full", overlap_param=True)),
    Case(2, Layout(bf16=True, grouped=True)),
    Case(2, Layout(bf16=True, narrow=True)),
)


def permuted(_group, case, planned):
    """Losses, main gradients, whether the stages left all parameters as they were, and how many experts computed elsewhere."""
    with cpu.steady_rows():
        program = Program(case.layout)
        topk_MTLK = program.routing(0)
        program.zero()
        if not planned:
            return program.forward_backward(0, topk_MTLK), program.main_grads(), True, 0
        with arms.attached(program, case, debug=True) as moe:
            work, num_layers = [topk_TLK.numpy() for topk_TLK in topk_MTLK], len(moe.moe_layers)
            rng = np.random.default_rng(num_layers)
            home_LE = np.stack([rng.permutation(moe.num_experts) for _ in range(num_layers)]).astype(np.int32)
            before = program.weights()
            with torch.no_grad(), moe.stage(work, "recompute", home_LE=home_LE):
                program.forward_backward(0, topk_MTLK, forward_only=True)
            with moe.stage(work, "update", home_LE=home_LE):
                losses = program.forward_backward(0, topk_MTLK)
            unchanged = all(torch.equal(weight, before[name]) for name, weight in program.weights().items())
            return losses, program.main_grads(), unchanged, int((home_LE != np.arange(moe.num_experts)).sum())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_come_back_to_their_parameters(pool, case):
    plain = pool.run(permuted, case, False, num_ranks=case.num_ranks)
    moved = pool.run(permuted, case, True, num_ranks=case.num_ranks)
    # Per expert the order of its tokens is another, in bf16 also the rounding of each replica's part.
    bound = 5e-2 if case.layout.narrow else 2e-2 if case.layout.bf16 else 1e-5
    for (loss_a, grads_a, _, _), (loss_b, grads_b, unchanged, num_moved) in zip(plain, moved, strict=True):
        assert unchanged and num_moved > 0
        assert loss_b == pytest.approx(loss_a, rel=1e-6)
        for name, grad in grads_a.items():
            assert float((grads_b[name] - grad).abs().max()) <= bound * float(grad.abs().max()), name


def refused(_group, case):
    program = Program(case.layout)
    with arms.attached(program, case) as moe:
        work = [topk_TLK.numpy() for topk_TLK in program.routing(0)]
        home_LE = np.tile(np.roll(np.arange(moe.num_experts), 1), (len(moe.moe_layers), 1)).astype(np.int32)
        with pytest.raises(InputError) as caught, moe.stage(work, "update", home_LE=home_LE):
            pass
        return str(caught.value)


def test_overlapped_reduction_is_refused(pool):
    for said in pool.run(refused, Case(2, Layout(overlap_grad=True)), num_ranks=2):
        assert "overlap_grad_reduce=False" in said
