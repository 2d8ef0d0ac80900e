"""Megatron's virtual experts by a plan: gradients, refusals and what falls back."""

import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import virtual_experts as stand_in
from layouts import Case
from logged import logged
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from one_layer import OneLayer, choices, layers_of, run_layers
from program import Layout, Program

from foremoe.base.errors import InputError
from foremoe.integrations.megatron import virtual
from foremoe.integrations.once import warn_once
from foremoe.problem.cost import CostModel

# Letters: M micro-steps, L MoE layers, T tokens of a rank, K top-k, E experts, G ranks, B base slots, S slots.

BALANCE = CostModel(objective="balance")


# ---- gradients, over the stand-in of Megatron's manager and Megatron's own layers


def one_step(group, case, factor):
    """Losses and main gradients without foremoe and without virtual experts; the same with both; metrics; calls."""
    layout = case.layout
    plain = Program(layout)
    routing = plain.routing(0)
    plain.zero()
    expected = plain.forward_backward(0, routing), plain.main_grads()
    stand_in.install()
    program = Program(dataclasses.replace(layout, dispatcher="hybridep"))
    seen = stand_in.virtualize([m for part in program.bare for m in part.modules() if hasattr(m, "token_dispatcher")], factor)
    from foremoe.integrations.megatron import attach

    moe = attach(program.chunks, redundant=2, cost=BALANCE)
    try:
        program.zero()
        with moe.stage([topk_TLK.numpy() for topk_TLK in routing]):
            losses = program.forward_backward(0, routing)
        found = losses, program.main_grads()
        metrics, plan = moe.metrics(), moe.report.plan if moe.active else None
        assert stand_in.plan_virtual_expert_routes.calls == []
        used, num_calls = {tuple(table.ravel().tolist()) for table, _, _ in seen}, len(seen)
        # Outside a stage Megatron's own planner answers.
        program.zero()
        again = program.forward_backward(0, routing)
        assert stand_in.plan_virtual_expert_routes.calls
    finally:
        moe.detach()
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    return expected, found, metrics, num_calls, None if plan is None else (plan.M * plan.L, len(used))


LAYOUTS = [
    Case(2, Layout()),
    Case(4, Layout(ep=4)),
    Case(4, Layout(pp=2, num_layers=4)),
    Case(4, Layout(pp=2, vpp=2, num_layers=4)),
    Case(2, Layout(recompute="full")),
    Case(2, Layout(recompute="full2", num_layers=4)),
    Case(2, Layout(recompute="selective", overlap_grad=True)),
    Case(4, Layout(tp=2, recompute="full")),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_gradients_at_owners_equal_those_without_virtual_experts(pool, case):
    for expected, found, metrics, num_calls, rows in pool.run(one_step, case, 2.0, num_ranks=case.num_ranks):
        np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
        for name, grad in expected[1].items():
            torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6, msg=lambda said, name=name: f"{name}: {said}")
        num_rows, num_tables = rows
        assert metrics["drift"] == metrics["fell_back"] == 0 and metrics["replicas"] > 0 and num_tables > 1
        assert metrics["skew_after"] < metrics["skew_before"] and metrics["capacity_factor"] <= 2.0
        assert num_calls == num_rows * (2 if case.layout.recompute else 1)


# ---- one layer: uneven tokens, multi-token prediction, what is refused and what falls back


class WithPrediction(OneLayer):
    """One MoE layer, and one of multi-token prediction behind it."""

    def __init__(self, moe, predicting):
        super().__init__(moe)
        self.mtp = torch.nn.ModuleList([predicting])

    def forward(self, x):
        return self.mtp[0](super().forward(x))[0]


def one_model(group, tokens_MG, predicting, options, factor=4.0):
    """Plain outputs and gradients, those by a plan, why it was refused, metrics, calls of their planner, what was said."""
    from foremoe.integrations.megatron import attach

    warn_once.cache_clear()
    inputs = [
        torch.randn(tokens[group.rank], 1, 16, generator=torch.Generator().manual_seed(50 + m * 9 + group.rank))
        for m, tokens in enumerate(tokens_MG)
    ]
    model_of = lambda layers: WithPrediction(*layers) if predicting else OneLayer(layers[0])  # noqa: E731
    plain = model_of(layers_of(group.size, "alltoall"))
    work = choices(plain, inputs)
    expected = run_layers(plain, inputs)
    stand_in.install()
    model = model_of(layers_of(group.size, "hybridep"))
    model.load_state_dict(plain.state_dict())
    stand_in.virtualize([m for m in model.modules() if hasattr(m, "token_dispatcher")], factor)
    options = dict(options)
    change, replay, told = options.pop("change", 0), options.pop("replay", True), options.pop("told", True)
    again, moved = options.pop("again", False), options.pop("home_LE", False)
    error = ""
    with logged() as said:
        moe = attach(model, **{"redundant": 2, "cost": BALANCE} | options)
        try:
            given = [topk.copy() for topk in work]
            if change and group.rank == 1:
                given[0][:change] = (given[0][:change] + 1) % 8
            if not told:
                planned = moe.plan(given)
                stage = moe.stage(planned.plan, split_MLP=planned.split_MLP, replay=replay)
            else:
                stage = moe.stage(given, replay=replay, home_LE=np.arange(8)[None, ::-1].copy() if moved else None)
            found = run_layers(model, inputs, stage)
        except InputError as refused:
            error, found = str(refused), None
            model.zero_grad()
        if again:
            found = run_layers(model, inputs, moe.stage(work))
        metrics = moe.metrics()
        moe.detach()
    assert not any("plan_dispatch" in vars(m._comm_manager) for m in [model.decoder.layers[0].mlp.token_dispatcher])
    calls = len(stand_in.plan_virtual_expert_routes.calls)
    return expected, found, error, metrics, calls, [record.getMessage() for record in said]


UNEVEN = [(20, 60), (48, 12), (30, 30)]


def require_same(expected, found):
    for one, other in zip(expected[0], found[0], strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    for name, grad in expected[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("predicting", [False, True])
@pytest.mark.parametrize("tokens_MG", [UNEVEN, [(24, 24)] * 3], ids=["uneven", "even"])
def test_tokens_of_any_number_and_layers_of_prediction(pool, tokens_MG, predicting):
    results = pool.run(one_model, tokens_MG, predicting, {}, num_ranks=2)
    for expected, found, error, metrics, calls, said in results:
        assert error == ""
        require_same(expected, found)
        assert metrics["replicas"] > 0 and metrics["drift"] == 0 and metrics["fell_back"] == (3 if predicting else 0)
        even = tokens_MG is not UNEVEN
        assert calls == (3 if predicting and even else 0)
        assert len(said) == predicting
        if predicting:
            assert ("Megatron's planner is used" in said[0]) == even and "prediction" in said[0]


def test_routers_that_did_otherwise_drop_the_step_on_all_ranks_and_megatron_plans_the_next(pool):
    options = {"change": 3, "again": True}
    for expected, found, error, _, calls, said in pool.run(one_model, [(24, 24)] * 2, False, options, num_ranks=2):
        assert "rank 1: " in error and "drop this step on all ranks" in error
        require_same(expected, found)
        assert calls == 2 and len(said) == 1 and "routers differed from the known routing before" in said[0]


def test_homes_and_rows_without_room_for_tables_are_refused_with_the_cure(pool):
    for options, cure in (({"home_LE": True}, "omit home_LE."), ({"route_bytes": 600}, "raise route_bytes.")):
        for _, found, error, _, _, _ in pool.run(one_model, UNEVEN, False, options, num_ranks=2):
            assert found is None and error.endswith(cure)


def test_rows_beyond_route_bytes_are_planned_by_megatron_with_one_warning(pool):
    for expected, found, error, metrics, calls, said in pool.run(
        one_model, [(24, 24)] * 3, False, {"route_bytes": 1000}, num_ranks=2
    ):
        assert error == "" and 0 < metrics["fell_back"] == calls < 3 and len(said) == 1
        require_same(expected, found)


@pytest.mark.parametrize("options", [{"replay": False}, {"told": False}], ids=str)
def test_what_is_not_known_is_planned_by_megatron_with_one_warning(pool, options):
    for expected, found, error, metrics, calls, said in pool.run(one_model, [(24, 24)] * 2, False, options, num_ranks=2):
        assert error == "" and metrics == {} and calls == 2
        require_same(expected, found)
        assert len(said) == 1 and "Megatron's own planner runs update stages" in said[0]


def test_with_no_redundant_slots_megatron_plans_and_foremoe_watches(pool):
    for expected, found, _, metrics, calls, _ in pool.run(one_model, [(24, 24)] * 2, False, {"redundant": 0}, num_ranks=2):
        require_same(expected, found)
        assert calls == 2 and "skew_at_2" in metrics


def test_a_plan_that_needs_more_room_names_the_factor(pool):
    config = SimpleNamespace(use_transformer_engine_op_fuser=True, fp8=None, fp4=None)
    tokens = 8, 25 * get_align_size_for_quantization(config)  # more than blocks leave free
    for _, _, error, _, calls, _ in pool.run(one_model, [tokens], False, {}, 1.0, num_ranks=2):
        assert "does not fit into moe_expert_rank_capacity_factor=1; set moe_expert_rank_capacity_factor=" in error and calls == 0


def refused(_group, what):
    from foremoe.integrations.megatron import attach

    module = stand_in.install()
    model = OneLayer(layers_of(2, "alltoall" if what == "dispatcher" else "hybridep")[0])
    moe = model.decoder.layers[0].mlp
    if what == "dispatcher":
        moe.config.moe_virtual_expert_load_balance = True
    else:
        stand_in.virtualize([moe])
    if what == "interface":
        module.plan_virtual_expert_routes = lambda top_indices, probs, workspace: None
    if what == "paged":
        moe.config.moe_paged_stash = True
    try:
        attach(model, redundant=5 if what == "slots" else 1).detach()
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", ""),
        (
            "slots",
            "redundant=5 is more than the 4 virtual slots that Megatron has on a rank, one per expert at home; set redundant=4.",
        ),
        ("interface", "set moe_virtual_expert_load_balance=False."),
        ("dispatcher", "set moe_virtual_expert_load_balance=False."),
        ("paged", "set moe_paged_stash=False."),
    ],
)
def test_what_is_refused_says_what_to_set(pool, what, said):
    for error in pool.run(refused, what, num_ranks=2):
        assert error.endswith(said) and bool(error) == bool(said)


CHECKOUT = os.environ.get("MEGATRON_LM_VIRTUAL", "")


@pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_VIRTUAL to a checkout of Megatron-LM with virtual experts")
def test_a_checkout_has_the_interface():
    """Read, not imported: its module wants Triton and the rest of its megatron-core."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(CHECKOUT, *virtual.MODULE.split(".")).with_suffix(".py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    planner = functions[virtual.FUNCTION]
    assert [arg.arg for arg in planner.args.args] == ["top_indices", "workspace"]
    called = [node for node in ast.walk(functions["plan_dispatch"]) if isinstance(node, ast.Call)]
    assert any(ast.unparse(node.func) == virtual.FUNCTION for node in called)
    plan = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "VirtualExpertPlan")
    fields = [node for node in plan.body if isinstance(node, ast.AnnAssign)]
    assert [field.target.id for field in fields][:2] == ["virtual_experts", "experts_to_copy"]
    assert all(field.value is not None for field in fields[2:])  # foremoe gives the first two
