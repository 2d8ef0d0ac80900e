"""All ranks that take an optimizer step together take it or drop it together, whichever EP group it went wrong in."""

import functools
import os
from unittest.mock import patch

import cpu
import program_arms as arms
import pytest
import torch
from layouts import Case
from logged import logged
from program import Layout, Program

from foremoe.base.errors import InputError, TransferError
from foremoe.integrations.megatron import attach
from foremoe.integrations.megatron.forward_backward import planned_or_home
from foremoe.integrations.megatron.job import Job
from foremoe.machine.cluster import Cluster
from foremoe.testing.ranks import RankDied, run_processes

EDP2, PP2 = Case(4, Layout()), Case(4, Layout(pp=2))
CASES = (EDP2, PP2, Case(4, Layout(overlap_grad=True)), Case(4, Layout(pp=2, vpp=2, num_layers=4)))
NO_EXPERTS = Case(4, Layout(pp=2, num_layers=4, dense=(0, 1)))  # on the first pipeline ranks


def with_a_wrong_step(_, case, rank, timed=False):
    """Steps of which the third has other routing than was known on one rank (None: there is no such step), and is dropped.

    Returns:
        What each step said, whether it changed a weight, and its losses; the weights at the end.
    """
    from megatron.core.timers import Timers

    program = Program(case.layout)
    own, other = program.routing(0), program.routing(0, seed=7)
    work = [topk_TLK.numpy() for topk_TLK in own]
    if timed:
        program.config.timers = Timers(2, "minmax")
    found = []
    with cpu.steady_rows(), arms.attached(program, case) as moe:
        for wrong in (False, False, False) if rank is None else (False, False, True, False):
            program.zero()
            before, said, losses = program.weights(), "", []
            try:
                with moe.stage(work):
                    losses = program.forward_backward(0, other if wrong and torch.distributed.get_rank() == rank else own)
                program.optimizer.step()
            except (InputError, TransferError) as error:
                said = f"{type(error).__name__}: {error}"
            changed = any(not torch.equal(before[name], weight) for name, weight in program.weights().items())
            found.append((said, changed, losses))
    return found, program.weights()


@pytest.fixture(scope="module")
def undisturbed_of(pool):
    """What a case does without a wrong step; once for both ranks."""
    return functools.cache(lambda case: pool.run(with_a_wrong_step, case, None, num_ranks=4))


@pytest.mark.parametrize(("case", "rank"), [*((case, 3) for case in CASES), (EDP2, 0), (PP2, 0)], ids=str)
def test_a_step_that_one_group_drops_is_dropped_on_all_and_the_next_is_as_ever(pool, undisturbed_of, case, rank):
    undisturbed = undisturbed_of(case)
    group_of = {0: (0, 1), 3: (2, 3)}[rank]
    for g, ((steps, weights), (good, expected)) in enumerate(
        zip(pool.run(with_a_wrong_step, case, rank, case is EDP2, num_ranks=4), undisturbed, strict=True)
    ):
        said, changed, _ = steps.pop(2)
        where = "" if g in group_of else f"in the EP group of global rank {group_of[0]}: "
        assert said.startswith(f"InputError: {where}rank {rank % 2}: ") and "drop this step on all ranks" in said
        assert not changed
        assert steps == good and all(step[:2] == ("", True) for step in good)
        assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


def fails_in_a_pass(group, case):
    """Rank 3 fails in its second micro-step, and its process ends; what the others raise, and whether a weight changed."""
    program = Program(case.layout)
    topk_MTLK, before = program.routing(0), program.weights()
    work, mean, calls = [topk_TLK.numpy() for topk_TLK in topk_MTLK], program.loss, []

    def loss(value):
        calls.append(value)
        if group.rank == 3 and len(calls) == 2:
            raise ArithmeticError("the loss is not a number")
        return mean(value)

    program.loss = loss
    moe = attach(program.chunks, group_timeout_s=60.0)
    try:
        with moe.stage(work):
            program.forward_backward(0, topk_MTLK)
        program.optimizer.step()
    except Exception as error:
        if group.rank == 3:
            os._exit(3)
        changed = any(not torch.equal(before[name], weight) for name, weight in program.weights().items())
        with pytest.raises(InputError, match="end the job"):
            moe.stage(work).__enter__()
        return type(error).__name__, str(error), changed


def test_a_pass_that_fails_in_one_group_ends_the_step_in_the_others():
    *others, peer, ended = run_processes(fails_in_a_pass, 4, EDP2, timeout_s=60.0, errors=True)
    assert isinstance(ended, RankDied)
    for kind, error, changed in others:
        assert kind == "TransferError" and "rank 3: ArithmeticError: the loss is not a number" in error and not changed
    assert not peer[2]


def refused(_, case, what):
    """What attaching says when one rank, or one EP group, refuses."""
    from megatron.core import parallel_state as ps

    program, rank = Program(case.layout), torch.distributed.get_rank()
    options = {}
    if what == "cluster":
        options["cluster"] = Cluster.preset("8xh100", num_ranks=3)
    if what == "layout" and rank == 3:
        program.config.moe_expert_capacity_factor = 1.0
    assert ps.get_expert_model_parallel_world_size() == 2
    try:
        with pytest.raises(InputError) as error:
            attach(program.chunks, **options)
    finally:
        program.config.moe_expert_capacity_factor = None
    attach(program.chunks).detach()
    return str(error.value)


@pytest.mark.parametrize("case", [EDP2, NO_EXPERTS], ids=str)
@pytest.mark.parametrize(
    ("what", "sentence"), [("cluster", "the cluster has 3 ranks"), ("layout", "to capacity changes what the plan counted")]
)
def test_a_rank_that_refuses_refuses_for_all(pool, case, what, sentence):
    assert all(sentence in said for said in pool.run(refused, case, what, num_ranks=4))


def unplanned(_, case):
    """Returns the errors of all ranks when rank 3 knows impossible routing, and the drift of a stage after that."""
    program = Program(case.layout)
    topk_MTLK = program.routing(0)
    work = [topk_TLK.numpy() for topk_TLK in topk_MTLK]
    wrong = [topk_TLK + 9 for topk_TLK in work] if torch.distributed.get_rank() == 3 else work
    with arms.attached(program, case) as moe:
        errors = []
        for attempt in (moe.plan, lambda work: moe.homes((work, "update")), lambda work: moe.stage(work).__enter__()):
            with pytest.raises(InputError) as error:
                attempt(wrong)
            errors.append(str(error.value))
        program.zero()
        with moe.stage(work):
            program.forward_backward(0, topk_MTLK)
        return errors, moe.metrics().get("drift", 0)


@pytest.mark.parametrize("case", [EDP2, NO_EXPERTS], ids=str)
def test_work_that_one_group_cannot_plan_is_refused_on_all(pool, case):
    for errors, drift in pool.run(unplanned, case, num_ranks=4):
        assert len(errors) == 3 and all("rank 1: routing holds experts" in said for said in errors) and drift == 0


def at_home(_, case):
    """Whether a step that rank 3 cannot plan has the losses of one without foremoe; its metrics and warnings."""
    program = Program(case.layout)
    topk_MTLK = program.routing(0)
    alone = program.forward_backward(0, topk_MTLK)
    work = [topk_TLK.numpy() + 9 * (torch.distributed.get_rank() == 3) for topk_TLK in topk_MTLK]
    with arms.attached(program, case) as moe:
        program.zero()
        with logged() as said, planned_or_home(moe, work, "update"):
            same = alone == program.forward_backward(0, topk_MTLK)
        return same, moe.metrics(), [record.getMessage() for record in said]


@pytest.mark.parametrize("case", [EDP2, NO_EXPERTS], ids=str)
def test_a_step_that_one_group_cannot_plan_runs_at_home_on_all(pool, case):
    for rank, (same, metrics, warned) in enumerate(pool.run(at_home, case, num_ranks=4)):
        assert same and metrics == {}
        assert len(warned) == (rank == 2 or (case is EDP2 and rank == 0)) and all(
            "without a plan" in message for message in warned
        )


def gathers(_, case):
    """How often all ranks gather in a step without a stage, in one with, and in a stage that was planned before."""
    program, num = Program(case.layout), []
    topk_MTLK, agree = program.routing(0), Job.agree
    work = [topk_TLK.numpy() for topk_TLK in topk_MTLK]

    def counted(self, error):
        num[-1] += 1
        return agree(self, error)

    with arms.attached(program, case) as moe, patch.object(Job, "agree", counted):
        for kind in ("plain", "stage", "planned"):
            num.append(0)
            program.zero()
            if kind == "plain":
                program.forward_backward(0, topk_MTLK)
                continue
            with moe.stage(moe.plan(work) if kind == "planned" else work):
                program.forward_backward(0, topk_MTLK)
    return num


@pytest.mark.parametrize("case", [EDP2, NO_EXPERTS], ids=str)
def test_plain_steps_gather_nothing(pool, case):
    assert pool.run(gathers, case, num_ranks=4) == [[0, 2, 3]] * 4
