"""The wrapper of Megatron's forward-backward function: plans where routing is known, Megatron's own pass where it is not."""

from functools import partial

import compare
import program_arms as arms
import pytest
from layouts import Case
from logged import logged
from program import Layout, Program

from foremoe.base.errors import TransferError

CASES = (
    Case(2, Layout()),
    Case(4, Layout(pp=2, num_layers=2, recompute="full")),
    Case(4, Layout(pp=2, vpp=2, num_layers=4)),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_megatron_s_schedules_through_the_wrapper_equal_the_program_without_foremoe(pool, case):
    for verdict in pool.run(partial(compare.one_step, wrapped=True), case, num_ranks=case.num_ranks):
        assert verdict.equal and verdict.served and verdict.drift == 0 and verdict.replicas, verdict


def stages(_group, case):
    """Passes with routing, without, with two kinds of routing that cannot be planned, and with it again: losses and metrics."""
    from megatron.core import pipeline_parallel

    from foremoe.integrations.megatron import attach, forward_backward

    program, found, attached = Program(case.layout), [], []
    topk_MTLK = program.routing(0)
    known = [topk_TLK.numpy() for topk_TLK in topk_MTLK]
    alone = [program.forward_backward(0, topk_MTLK, forward_only=forward_only) for forward_only in (True, False)]
    routings = iter([known, None, [topk_TLK + 100 for topk_TLK in known], known[:0], known])

    def attach_to(model):
        attached.append(attach(model, cluster=arms.cluster_of(case), cost=arms.CostModel(objective="balance")))
        return attached[-1]

    run = forward_backward(attach_to, lambda call: next(routings))
    with arms.patch.object(pipeline_parallel, "get_forward_backward_func", lambda: run), logged() as said:
        for forward_only in (True, True, False, False, False):
            program.zero()
            losses = program.forward_backward(0, topk_MTLK, forward_only=forward_only)
            found.append((losses == alone[not forward_only], attached[0].metrics()))
    attached[0].detach()
    return found, len(attached), [record.getMessage() for record in said]


def test_stages_of_a_program_that_knows_its_routing_now_and_then(pool):
    for rank, (found, num_attached, said) in enumerate(pool.run(stages, Case(2, Layout()), num_ranks=2)):
        assert all(equal for equal, _ in found) and num_attached == 1
        recompute, unknown, *impossible, update = (metrics for _, metrics in found)
        assert recompute == unknown, "a pass without routing should leave the figures of the stage before"
        assert recompute["replicas"] and update["replicas"] and impossible == [{}, {}]
        assert all(metrics["fell_back"] == metrics["retired"] == 0.0 for metrics in (recompute, update))
        assert len(said) == (0 if rank else 2), "each stage once, by rank 0 of the group"
        assert all("the update stage runs at home, without a plan: " in text for text in said)


def routing_fails_on_rank_1(group):
    """The other rank waits in planning."""
    from megatron.core import pipeline_parallel

    from foremoe.integrations.megatron import forward_backward

    case = Case(2, Layout())
    program = Program(case.layout)
    topk_MTLK = program.routing(0)

    def routing_of(call):
        if group.rank == 1:
            raise ValueError("made to fail")
        return [topk_TLK.numpy() for topk_TLK in topk_MTLK]

    with arms.attached(program, case) as moe:
        run = forward_backward(moe, routing_of)
        with arms.patch.object(pipeline_parallel, "get_forward_backward_func", lambda: run):
            program.forward_backward(0, topk_MTLK, forward_only=True)


def test_a_rank_whose_routing_fails_is_named_to_those_that_wait(pool):
    """They would wait for 300 s, longer than the call may take."""
    waiting, failed = pool.run(routing_fails_on_rank_1, num_ranks=2, errors=True)
    assert isinstance(failed, ValueError)
    assert isinstance(waiting, TransferError) and "rank 1" in str(waiting) and "made to fail" in str(waiting)
