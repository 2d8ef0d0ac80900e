"""Megatron's virtual experts by a plan: tables, gradients, refusals and what falls back."""

import dataclasses
import os
import threading
import types
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed; make test-megatron installs it")

import torch
import virtual_experts as stand_in
from layouts import Case
from logged import logged
from one_layer import OneLayer
from program import Layout, Program, model_config

import foremoe
from foremoe.base.errors import InputError
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron import virtual
from foremoe.integrations.once import warn_once
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.testing.ranks import run_threads

# Letters: M micro-steps, L MoE layers, T tokens of a rank, K top-k, E experts, G ranks, B base slots, S slots.

BALANCE = CostModel(objective="balance")


# ---- tables: 200 random rows and more, decoded by themselves


def random_work(seed, num_ranks, num_experts, topk, num_tokens_MG, num_layers):
    """By rank: experts [T, L, K] of every micro-step, some hot; the last tokens are not known."""
    rng = np.random.default_rng(seed)
    work = []
    for g in range(num_ranks):
        micro_steps = []
        for m in range(len(num_tokens_MG)):
            heat_LE = rng.gamma(0.4, size=(num_layers, num_experts)) + 1e-3
            gumbel = rng.gumbel(size=(num_tokens_MG[m, g], num_layers, num_experts))
            micro_steps.append(np.argsort(-(np.log(heat_LE) + gumbel), axis=2)[:, :, :topk].astype(np.int16))
        work.append(micro_steps)
    return work


def planned_of(work, num_experts, redundant):
    """The plan of the work of all ranks."""
    M, L, G, K = len(work[0]), work[0][0].shape[1], len(work), work[0][0].shape[2]
    load_MLGE = np.zeros((M, L, G, num_experts), np.int32)
    for m, layer, g in np.ndindex(M, L, G):
        known = work[g][m][:, layer]
        load_MLGE[m, layer, g] = np.bincount(known[known >= 0], minlength=num_experts)
    counts = foremoe.Workload.from_counts(load_MLGE, num_topk=K)
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_experts=num_experts, num_topk=K)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=G)
    problem = foremoe.Problem.of(
        counts, cluster, redundant=redundant, model=model, cost=BALANCE, replicas="node", schedule=Schedule.accumulate(M)
    )
    return counts, foremoe.Planner().plan(problem)[0]


MET = []  # threads, once for every time that the ranks met


@pytest.fixture
def meeting():
    """Ranks are threads: their collectives are counted."""
    MET.clear()
    with patch.object(virtual.dist, "all_reduce", lambda _, group: MET.append(threading.get_ident())):
        yield


def tables(group, work, counts, plan):
    """Every call of a stage on one rank: (row, table, runtime experts, experts), and whether ranks met before weights moved."""
    mine, rng = work[group.rank], np.random.default_rng(group.rank)
    routing = {(m, layer): mine[m][:, layer] for m in range(plan.M) for layer in range(plan.L)}
    planned = Planned(
        plan=plan, split_MLP=plan.rows_for(counts, group.rank), plan_s=0.0, share_s=0.0, agreed=True, routing=routing
    )
    module = types.SimpleNamespace(VirtualExpertPlan=stand_in.VirtualExpertPlan, plan_virtual_expert_routes=None)
    stage = virtual.VirtualStage(planned, group, "EP group", torch.device("cpu"), 2**30, module)
    found = []
    for m in range(plan.M):
        for layer in range(plan.L):
            topk_TK = torch.from_numpy(mine[m][:, layer].astype(np.int64))
            unknown = topk_TK < 0
            topk_TK[unknown] = torch.from_numpy(rng.integers(0, plan.E, int(unknown.sum())))
            order = torch.from_numpy(rng.permutation(topk_TK.shape[1]))  # routers have another order than rollout
            stage.layer = layer
            before = MET.count(threading.get_ident())
            made = stage(topk_TK[:, order], None)
            num_met = MET.count(threading.get_ident()) - before
            found.append(((m, layer), made.experts_to_copy, made.virtual_experts, topk_TK[:, order], num_met))
    return found, stage.rows.fault(), stage.drift, int(sum((t < 0).sum() for t in routing.values()))


@pytest.mark.parametrize("seed", range(8))
def test_no_route_is_wrong_in_random_rows_and_plans(meeting, seed):
    """8 x 3 micro-steps x 10 layers: 240 rows, by a decoder that knows the interface alone."""
    rng = np.random.default_rng(100 + seed)
    G, B, K = [(2, 4, 2), (4, 2, 2), (4, 4, 4), (8, 2, 3)][seed % 4]
    tokens_MG = rng.integers(3, 40, (3, G))
    work = random_work(seed, G, G * B, K, tokens_MG, 10)
    if seed % 2:
        for of_rank in work:
            for topk_TLK in of_rank:
                topk_TLK[-2:] = -1
    counts, plan = planned_of(work, G * B, redundant=1 + seed % B)
    results = run_threads(tables, G, work, counts, plan)
    served_MLGS = np.zeros(plan.quota_MLGS.shape, np.int64)
    for found, fault, drift, num_unknown in results:
        assert fault == "" and drift == num_unknown
        for (m, layer), table_GB, virtual_TK, topk_TK, num_met in found:
            assert virtual_TK.dtype == torch.int16 and table_GB.dtype == torch.int32 and table_GB.shape == (G, B)
            assert (stand_in.decoded(virtual_TK, table_GB, B) == topk_TK).all()
            assert num_met == bool((table_GB >= 0).any())
            rank, local = np.divmod(virtual_TK.numpy().ravel(), 2 * B)
            np.add.at(served_MLGS[m, layer], (rank, local), 1)
    for (row, *of_first), *others in zip(*(found for found, *_ in results), strict=True):
        assert all(other[0] == row and torch.equal(other[1], of_first[0]) for other in others)
    assert plan.num_replicas > 0
    if not seed % 2:  # all is known: every slot serves its quota
        assert (served_MLGS == plan.quota_MLGS).all()
    replicas_MLGS = served_MLGS[..., B:]
    assert (replicas_MLGS == plan.quota_MLGS[..., B:]).all()  # no slot of the table stays without tokens


def test_a_router_that_does_otherwise_is_found_and_every_pair_still_meets_its_expert(meeting):
    tokens_MG = np.array([[20, 30]])
    work = random_work(1, 2, 8, 2, tokens_MG, 1)
    counts, plan = planned_of(work, 8, redundant=2)

    def other(group):
        assert tables(group, work, counts, plan)[1] == ""
        mine = work[group.rank][0][:, 0]
        routing = {(0, 0): mine}
        planned = Planned(plan=plan, split_MLP=plan.rows_for(counts, group.rank), plan_s=0.0, share_s=0.0, routing=routing)
        module = types.SimpleNamespace(VirtualExpertPlan=stand_in.VirtualExpertPlan, plan_virtual_expert_routes=None)
        stage = virtual.VirtualStage(planned, group, None, torch.device("cpu"), 2**30, module)
        topk_TK = torch.from_numpy(mine.astype(np.int64))
        topk_TK[0] = (topk_TK[0] + 1) % 8
        stage.layer = 0
        made = stage(topk_TK, None)
        assert (stand_in.decoded(made.virtual_experts, made.experts_to_copy, 4) == topk_TK).all()
        return stage.rows.fault()

    assert all("pairs of micro-step 0, layer 0 have other experts" in fault for fault in run_threads(other, 2))


def test_slots_that_serve_nothing_are_not_in_the_table():
    """Megatron would add what such a slot's gradient was in an earlier step to its owner's."""
    _, plan = planned_of(random_work(1, 2, 8, 2, np.array([[20, 30]]), 1), 8, redundant=2)
    table_GB = virtual.experts_to_copy(plan)[0, 0]
    g, s = np.argwhere(table_GB >= 0)[0]
    quota_MLGS = plan.quota_MLGS.copy()
    quota_MLGS[0, 0, g, plan.B + s] = 0
    changed_GB = virtual.experts_to_copy(dataclasses.replace(plan, quota_MLGS=quota_MLGS))[0, 0]
    assert changed_GB[g, s] == -1 and (changed_GB != table_GB).sum() == 1


def test_the_least_capacity_factor():
    quota_MLGS = np.array([[[[30, 0], [10, 0]]]], np.int32)
    assert virtual.capacity_factor(quota_MLGS, np.array([[20, 20]]), 1, 1, 1) == 1.5
    assert virtual.capacity_factor(quota_MLGS, np.array([[20, 20]]), 1, 1, 16) == 1.0  # blocks leave room for as many
    assert virtual.capacity_factor(quota_MLGS, np.array([[30, 10]]), 1, 1, 1) == 1.0
    assert virtual.capacity_factor(quota_MLGS, np.array([[0, 40]]), 1, 1, 1) == float("inf")
    unknown = virtual.capacity_factor(quota_MLGS, np.array([[21, 21]]), 1, 1, 1)
    assert unknown == pytest.approx(32 / 21, abs=1e-3) and int(21 * unknown) >= 32  # two pairs more, which could go to rank 0


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


def layers_of(num_ranks, dispatcher, number=2):
    """MoE layers of all ranks as one EP group, the same for each dispatcher."""
    import cpu
    import process_groups
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_layer import MoELayer

    cpu.run_on_cpu()
    process_groups.take_down(parallel_state, parallel_state.destroy_model_parallel)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=num_ranks)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(3)
    config = model_config(Layout(ep=num_ranks, dispatcher=dispatcher))
    layers = []
    for i in range(number):
        mlp = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False).submodules.mlp
        layers.append(mlp(config=config) if not hasattr(mlp, "submodules") else MoELayer(config, mlp.submodules))
        layers[-1].set_layer_number(i + 1)
    return layers


def run_layers(model, inputs, stage=None):
    """Accumulates gradients over micro-steps; outputs and gradients."""
    import contextlib

    outputs = []
    with stage or contextlib.nullcontext():
        for x in inputs:
            y = model(x)
            y.square().sum().backward()
            outputs.append(y.detach().clone())
    grads = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return outputs, grads


def choices(model, inputs):
    """Experts [T, 1, K] that the first layer's router chooses by itself, for each micro-step."""
    router, found = model.decoder.layers[0].mlp.router, []
    hook = router.register_forward_hook(lambda _, args, out: found.append(out[1].nonzero()[:, 1].view(len(out[1]), 1, -1)))
    with torch.no_grad():
        for x in inputs:
            model(x)
    hook.remove()
    return [topk.numpy() for topk in found]


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
            assert ("Megatron's planner answers" in said[0]) == even and "prediction" in said[0]


def test_routers_that_did_otherwise_drop_the_step_on_all_ranks_and_megatron_plans_the_next(pool):
    options = {"change": 3, "again": True}
    for expected, found, error, _, calls, said in pool.run(one_model, [(24, 24)] * 2, False, options, num_ranks=2):
        assert "rank 1: " in error and "drop this step on all ranks" in error
        require_same(expected, found)
        assert calls == 2 and len(said) == 1 and "routers did otherwise before" in said[0]


def test_homes_and_rows_without_room_for_tables_are_refused_with_the_cure(pool):
    for options, cure in (({"home_LE": True}, "leave home_LE out."), ({"route_bytes": 600}, "raise route_bytes.")):
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
    for _, _, error, _, calls, _ in pool.run(one_model, [(8, 400)], False, {}, 1.0, num_ranks=2):
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
