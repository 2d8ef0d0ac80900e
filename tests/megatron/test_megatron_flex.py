"""The flex dispatcher over slots, on Megatron's own DeepEP and HybridEP managers, over a stand-in for DeepEP's buffers."""

import dataclasses

import compare
import deepep
import numpy as np
import program_arms as arms
import pytest
import torch
import torch.distributed as dist
from layouts import CASES, CHOICES, FACTORS, Case, few
from megatron.core.transformer.transformer_config import TransformerConfig
from one_layer import OneLayer, choices, layers_of, run_layers
from program import Layout, Program
from test_megatron_faults import LAYOUTS, host_down
from test_megatron_layouts import SINGLE

from foremoe.base.errors import InputError
from foremoe.integrations.megatron import attach
from foremoe.problem.cost import CostModel
from foremoe.workload.skew import skew

BACKENDS = ("deepep", "hybridep")
PADDED = (("moe_hybridep_pad_uneven_dispatch_inputs", True),)
# Both meet all values of a layout, in other pairs.
MIXED = list(zip(("deepep", "hybridep", "deepep"), LAYOUTS, strict=True))
ONE_STEP = [(backend, case) for backend in BACKENDS for case in [*few(1, reverse=backend == "hybridep"), SINGLE]]


def over(backend, case):
    """The case over the flex dispatcher."""
    return dataclasses.replace(case, layout=dataclasses.replace(case.layout, dispatcher=backend))


def redundant_of(backend, case):
    """HybridEP wants a multiple of four slots."""
    base = case.layout.num_experts // case.layout.ep
    return next(r for r in (1, 2) if backend == "deepep" or (base + r) * case.layout.ep % 4 == 0)


def one_step(group, backend, case, options=None, hint=None, unknown=0, padded=0):
    """`compare.one_step` over the flex dispatcher; runs on a rank."""
    redundant = {"redundant": redundant_of(backend, case)}
    options_of = lambda: redundant | (options() if options else {})  # noqa: E731
    return compare.one_step(group, over(backend, case), options_of=options_of, hint=hint, unknown=unknown, padded=padded)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_backend_meets_every_value_of_a_layout(backend):
    choice_of = dict(zip(CASES, CHOICES, strict=True))
    tried = {value for over, case in ONE_STEP if over == backend for value in choice_of.get(case, {}).items()}
    assert tried >= {(name, value) for name, values in FACTORS.items() for value in values}


@pytest.mark.parametrize(("backend", "case"), ONE_STEP, ids=str)
def test_one_step_equals_the_program_without_foremoe(pool, case, backend):
    verdicts = pool.run(one_step, backend, case, num_ranks=case.num_ranks)
    for rank, verdict in enumerate(verdicts):
        assert verdict.equal and verdict.served and verdict.drift == 0 and verdict.fell_back == 0, (rank, verdict)
        assert verdict.known == (0, verdict.skew_ML[1].size)
    assert all(verdict.replicas and verdict.copies == 0 for verdict in verdicts)
    assert sum(v.returns for v in verdicts) * case.layout.ep == sum(v.replicas for v in verdicts)


@pytest.mark.parametrize(("backend", "case"), MIXED, ids=str)
def test_known_rows_with_holes_equal_the_program_without_foremoe(pool, case, backend):
    """The last tokens of every sequence are not known, the first ones have one expert twice, as trainers' padding has."""
    verdicts = pool.run(one_step, backend, case, None, None, 2, 1, num_ranks=case.num_ranks)
    for rank, verdict in enumerate(verdicts):
        assert verdict.equal and verdict.as_expected and verdict.fell_back == 0, (rank, verdict)
        assert verdict.known == (0, verdict.skew_ML[1].size) and verdict.drift > 0


@pytest.mark.parametrize(("backend", "case"), MIXED, ids=str)
def test_rows_whose_replicas_cannot_be_had_run_at_home_on_all_ranks(pool, case, backend):
    verdicts = pool.run(one_step, backend, case, host_down, num_ranks=case.num_ranks)
    assert all(verdict.equal and verdict.drift == 0 and verdict.fell_back > 0 for verdict in verdicts)
    assert not any(verdict.served for verdict in verdicts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_hint_the_skew_is_reported_as_served(pool, backend):
    verdicts = pool.run(one_step, backend, SINGLE, None, 0.2, num_ranks=SINGLE.num_ranks)
    assert all(verdict.equal and verdict.as_expected and verdict.drift > 0 for verdict in verdicts)
    served_XML = skew(np.stack([verdict.load_ML for verdict in verdicts], axis=-1))
    assert all(np.allclose(verdict.served_skew_ML, served_XML) for verdict in verdicts)


UNEVEN = ((20, 60), (48, 12), (30, 30))


def uneven(group, backend, unknown):
    """Outputs and gradients over all-to-all without foremoe, and over `backend` by plans, twice; known rows of each; drift.

    Args:
        unknown: tokens at the end of every micro-step whose routing is not known.
    """
    inputs = [
        torch.randn(tokens[group.rank], 1, 16, generator=torch.Generator().manual_seed(50 + 9 * m + group.rank))
        for m, tokens in enumerate(UNEVEN)
    ]
    plain = OneLayer(layers_of(group.size, "alltoall")[0])
    work, expected = choices(plain, inputs), run_layers(plain, inputs)
    deepep.install()
    model = OneLayer(layers_of(group.size, backend, options=PADDED if backend == "hybridep" else ())[0])
    model.load_state_dict(plain.state_dict())
    for topk_TLK in work:
        topk_TLK[len(topk_TLK) - unknown :] = -1
    moe = attach(model, redundant=2, cost=CostModel(objective="balance"))
    found = []
    for _ in range(2):
        for param in model.parameters():
            param.main_grad = torch.zeros(param.shape)  # as DDP has it, to which gradients of replicas are added
        outputs, grads = run_layers(model, inputs, moe.stage(work))
        whole = {name: grads.get(name, 0) + param.main_grad for name, param in model.named_parameters()}
        found.append(((outputs, whole), moe.metrics()))
    moe.detach()
    return expected, found


@pytest.mark.parametrize("unknown", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_may_have_different_numbers_of_tokens(pool, backend, unknown):
    """HybridEP itself takes equal numbers; Megatron fills up to the largest where an option says so."""
    if backend == "hybridep" and not hasattr(TransformerConfig, PADDED[0][0]):
        pytest.skip("this megatron-core does not even out what ranks give HybridEP; make test-megatron-newest")
    for (outputs, grads), found in pool.run(uneven, backend, unknown, num_ranks=2):
        for (planned, planned_grads), metrics in found:
            torch.testing.assert_close(planned, outputs, rtol=1e-4, atol=1e-6)
            for name, grad in grads.items():
                torch.testing.assert_close(planned_grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)
            assert metrics["replicas"] > 0 and metrics["fell_back"] == 0 and (metrics["drift"] > 0) == (unknown > 0)
        assert [metrics["known_rows"] for _, metrics in found] == [0, len(UNEVEN)]


def gives_different_numbers(group):
    deepep.install()
    buffer = deepep.HybridEPBuffer(dist.group.WORLD, 16, 64, 4)
    routing_TE = torch.ones(3 + group.rank, 8, dtype=torch.bool)
    with pytest.raises(AssertionError, match=r"ranks have \[3, 4\] tokens"):
        buffer.dispatch_with_permute(
            hidden=torch.ones(len(routing_TE), 16), routing_map=routing_TE, probs=routing_TE.float(), num_of_experts_per_rank=4
        )


def test_the_stand_in_takes_equal_numbers_of_tokens_as_hybridep_does(pool):
    pool.run(gives_different_numbers, num_ranks=2)


def in_blocks(group):
    """Rows of the two local experts in blocks of four, where each token of two has all four experts, and what comes back."""
    deepep.install()
    buffer = deepep.HybridEPBuffer(dist.group.WORLD, 16, 64, 2)
    hidden, probs_TE = torch.full((2, 16), group.rank + 1.0), torch.full((2, 4), 0.5)
    rows, probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=hidden, routing_map=torch.ones(2, 4, dtype=torch.bool), probs=probs_TE, num_of_experts_per_rank=2,
        pad_multiple=4, num_permuted_tokens=12, non_blocking=True,
    )  # fmt: skip
    back, _ = buffer.combine_with_unpermute(hidden=rows * probs[:, None], handle=handle, pad_multiple=4)
    return rows[:8, 0].tolist(), len(rows), counts.tolist(), bool((back == 2 * hidden).all())


def test_the_stand_in_fills_blocks_and_rows_in_advance(pool):
    for rows, num_rows, counts, same in pool.run(in_blocks, num_ranks=2):
        assert rows == [1.0, 1.0, 2.0, 2.0] * 2 and num_rows == 12 and counts == [4, 4] and same


def plain_step(_group, layout):
    """Losses and gradients of a step without foremoe."""
    program = Program(layout)
    program.zero()
    return program.forward_backward(0, program.routing(0)), program.main_grads()


@pytest.mark.parametrize("layout", [Layout(), Layout(ep=4, tp=2, recompute="full")], ids=str)
def test_the_stand_in_computes_what_all_to_all_computes(pool, layout):
    layouts = [dataclasses.replace(layout, dispatcher=dispatcher) for dispatcher in ("alltoall", *BACKENDS)]
    expected, *others = [pool.run(plain_step, each, num_ranks=4) for each in layouts]
    for found in others:
        for (losses, grads), (wanted, wanted_grads) in zip(found, expected, strict=True):
            torch.testing.assert_close(losses, wanted)
            torch.testing.assert_close(grads, wanted_grads)


def sharp_step(_group, case):
    """Loss and service of a step whose routers give most experts a probability of exactly 0."""
    program = Program(case.layout)
    for _, router in program.routers[0]:
        router.weight.data *= 1e4
    topk_MTLK = program.routing(0)
    with arms.attached(program, case, redundant=2) as moe:
        work = moe.plan([topk_TLK.numpy() for topk_TLK in topk_MTLK])
        with moe.stage(work):
            losses = program.forward_backward(0, topk_MTLK)
        served_MLS = arms.expected_service(program, work, topk_MTLK)[0]
        return losses, (moe.report.served_MLS == served_MLS).all(), moe.metrics()["replicas"]


def test_slots_serve_what_was_routed_whatever_its_probability(pool):
    losses = []
    for dispatcher in ("alltoall", *BACKENDS):
        found = pool.run(sharp_step, Case(2, Layout(dispatcher=dispatcher)), num_ranks=2)
        assert all(served and replicas for _, served, replicas in found)
        losses.append(found[0][0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


def indices(_group):
    """DeepEP's indices and weights of tokens with two experts, with one, and with none."""
    program = Program(Layout(dispatcher="deepep"))
    with arms.attached(program, Case(2, Layout())) as moe:
        dispatcher = moe._layers[0]._slot_dispatcher
        routing_TP = torch.zeros(3, 10, dtype=torch.bool)
        routing_TP[0, [3, 7]] = routing_TP[1, 9] = True
        probs_TP = torch.zeros(3, 10).index_put_((torch.tensor([0]), torch.tensor([3])), torch.tensor([0.5]))
        _, weights_TK = dispatcher.dispatch_preprocess(torch.ones(3, 1, 16), routing_TP, probs_TP.requires_grad_())
        weights_TK.sum().backward()
        return dispatcher._comm_manager.token_indices.tolist(), weights_TK.tolist(), probs_TP.grad.nonzero().tolist()


def test_a_token_with_fewer_experts_goes_to_no_other_slot(pool):
    for chosen, weights, reached in pool.run(indices, num_ranks=2):
        assert (chosen[0], sorted(chosen[1]), chosen[2]) == ([3, 7], [-1, 9], [-1, -1])
        assert weights == [[0.5, 0.0], [0.0, 0.0], [0.0, 0.0]] and reached == [[0, 3], [0, 7], [1, 9]]


def too_few_slots(_group):
    program = Program(Layout(dispatcher="hybridep"))
    with pytest.raises(InputError) as refused:
        arms.attached(program, Case(2, Layout())).__enter__()
    return str(refused.value), vars(program.bare[0].decoder.layers[0].mlp).keys() & {"_foremoe"}


def test_hybridep_refuses_a_number_of_slots_that_it_cannot_have(pool):
    for said, left in pool.run(too_few_slots, num_ranks=2):
        assert "2 ranks x 5 slots are 10; set redundant=2." in said and not left
