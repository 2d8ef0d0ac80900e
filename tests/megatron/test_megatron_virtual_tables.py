"""Tables of Megatron's virtual experts from a plan: every pair meets its expert, and ranks have room."""

import dataclasses
import threading
import types
from unittest.mock import patch

import numpy as np
import pytest
import torch
import virtual_experts as stand_in

import foremoe
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron import virtual
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.testing.ranks import run_threads

# Letters: M micro-steps, L MoE layers, T tokens of a rank, K top-k, E experts, G ranks, B base slots, S slots.

BALANCE = CostModel(objective="balance")


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

    assert all("pairs of micro-step 0, layer 0 differ from the experts" in fault for fault in run_threads(other, 2))


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
