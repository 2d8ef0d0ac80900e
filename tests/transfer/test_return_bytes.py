"""Gradient returns stay within their bytes, come out bit for bit the same, and ranks never wait for each other in a circle."""

import dataclasses

import pytest
import torch
from engine_util import SIZES, ToyBuffers, a_plan, check_grads, run_uses
from flaky import Late

import foremoe
from foremoe.base.errors import InputError
from foremoe.testing.ranks import run_threads
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local

GRADIENT_BYTES = 8 * sum(SIZES)


def fan_in_plan(ranks=4):
    """Expert 0 is served by every rank, so that three gradients come home to rank 0 from every row."""
    plan = a_plan(ranks=ranks, micro_steps=4)
    load_MLGE = torch.zeros((4, 2, ranks, 2 * ranks), dtype=torch.int64)
    load_MLGE[..., 0] = 120
    work = foremoe.Workload.from_counts(load_MLGE.numpy(), num_topk=1)
    head = plan.header
    problem = foremoe.Problem.of(work, head.cluster, model=head.model, cost=foremoe.CostModel(objective="balance"))
    found, _ = foremoe.Planner().plan(problem)
    assert (found.quota_MLGS[..., found.B :] > 0).sum() == 4 * 2 * 3
    return found


def staged(group, plan, return_bytes, backend, prefetch):
    buffers = ToyBuffers(plan, group.rank)
    engine = Engine(buffers, group=group, backends=(backend(),), prefetch=prefetch, return_bytes=return_bytes)
    try:
        engine.begin(plan)
        run_uses(engine, plan, group)
        returns = engine._returns
        engine.end()
    finally:
        engine.close()
    check_grads(plan, buffers)
    assert returns.staged_bytes == 0
    return returns.most_staged_bytes, [grad.clone() for tensors in buffers.grads.values() for grad in tensors]


@pytest.mark.parametrize("backend", [Local, Late])
@pytest.mark.parametrize("prefetch", [0, 2, 50])
def test_no_rank_stages_more_than_its_bytes(backend, prefetch):
    plan = fan_in_plan()
    free = run_threads(staged, plan.G, plan, 2**30, backend, prefetch)
    # The rows in flight, and the next one.
    assert free[0][0] == min(max(prefetch, 1) + 1, 8) * 3 * GRADIENT_BYTES and free[1][0] == 0
    # Five hold a row of three, but not two rows.
    for limit, most in ((1, 1), (GRADIENT_BYTES, 1), (2 * GRADIENT_BYTES + 7, 2), (5 * GRADIENT_BYTES, 3)):
        bound = run_threads(staged, plan.G, plan, limit, backend, prefetch)
        assert bound[0][0] == most * GRADIENT_BYTES, limit
        for (_, mine), (_, theirs) in zip(free, bound, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_the_memory_model_knows_the_bound():
    plan = fan_in_plan()
    head = plan.header
    model = dataclasses.replace(head.model, hidden_size=4096, ffn_size=1536)
    work = foremoe.Workload.from_counts(plan.load_MLE[:, :, None, :].repeat(4, 2) // 4, num_topk=1)
    problem = foremoe.Problem.of(work, head.cluster, model=model)
    placement = plan.placement
    staged_G = foremoe.problem.memory.staging_bytes(problem, placement)
    assert staged_G.tolist() == [9 * model.gradient_bytes, 0, 0, 0]


@pytest.mark.parametrize("wrong", [0, -5])
def test_a_bound_below_one_byte_is_refused(wrong):
    with pytest.raises(InputError, match="return_bytes must be a whole number from 1"):
        Engine(None, return_bytes=wrong)
