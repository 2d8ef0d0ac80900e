"""Rows with holes and rows for dispatchers of their own: every token meets the experts that its weights name, and these alone."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.base.arrays import Array
from foremoe.distributed.group import Group
from foremoe.plan.plan import Plan
from foremoe.runtime.holes import Holes, Lack
from foremoe.runtime.kernels import holes as hole_kernels
from foremoe.runtime.kernels import routes, slots
from foremoe.runtime.permute import Permute
from foremoe.runtime.replay import ReplayedRows
from foremoe.runtime.slotted import SlottedRows
from foremoe.runtime.stage import exchange_splits
from foremoe.runtime.warm import warm_routes
from foremoe.testing.ranks import run_threads

# Letters: G ranks, E experts, K top-k, T tokens of a rank, H hidden size, P physical slots.

G, E, H = 3, 6, 4
CPU = torch.device("cpu")


def made(seed: int, K: int, share: float) -> tuple[Plan, list[Array], list[Array], list[Array]]:
    """A plan of one row, and by rank what is known of the routing, the routing itself, and what the plan gives.

    A token has one expert, K times, or K.
    """
    rng = np.random.default_rng(seed)
    own = [np.argsort(rng.random((int(rng.integers(0, 12)), E)) - np.eye(E)[0], axis=1)[:, :K] for _ in range(G)]
    own = [np.where(rng.random((len(x), 1)) < share, x[:, :1], x) for x in own]
    known = [np.where(rng.random((len(x), 1)) < share, -1, x).astype(np.int16) for x in own]
    load_MLGE = np.zeros((1, 1, G, E), np.int64)
    for g, topk_TK in enumerate(known):
        for token in topk_TK:
            load_MLGE[0, 0, g, np.unique(token[token >= 0])] += 1
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_layers=1, num_experts=E, num_topk=K)
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=K)
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, host_store=True)
    problem = foremoe.Problem.of(work, cluster, model=model, cost=foremoe.CostModel(objective="balance"))
    plan, _ = foremoe.Planner().plan(problem)
    return plan, known, own, [plan.rows_for(work, g) for g in range(G)]


def weights_of(own_TK: Array) -> torch.Tensor:
    """float64 [T, E]: weights of routed experts, exact in floating point."""
    weight_TE = torch.zeros(len(own_TK), E, dtype=torch.float64)
    return weight_TE.scatter_(1, torch.from_numpy(own_TK).long(), 0.5) * (1 + torch.arange(len(own_TK)).view(-1, 1))


@given(seed=st.integers(0, 10**6), K=st.integers(1, E), share=st.sampled_from([0.0, 0.3, 1.0]))
@examples(40)
def test_tokens_meet_their_experts(seed: int, K: int, share: float) -> None:
    plan, known, own, splits = made(seed, K, share)
    home_slot_LE = plan.home_LE // plan.B * plan.S + plan.home_LE % plan.B

    def run(group: Group) -> None:
        topk_TK, rank = known[group.rank], group.rank
        holes = Holes.of({(0, 0): topk_TK}, splits[rank], home_slot_LE, spare=99, most_bytes=2**20)
        both = exchange_splits(group, np.concatenate([splits[rank], holes.extra_MLP]), CPU)
        received_GMLS, extra_GMLS = np.split(both, 2, axis=1)
        rows = ReplayedRows(
            {(0, 0): topk_TK}, plan.expert_MLGS, splits[rank], received_GMLS, num_experts=E, group=group, device=CPU,
            holes=(holes, extra_GMLS),
        )  # fmt: skip
        assert not rows.lack_ML.any()
        weight_TE, x_TH = (
            weights_of(own[rank]).requires_grad_(),
            torch.randn(len(topk_TK), H, dtype=torch.float64, requires_grad=True),
        )
        route = rows.holed_route(0, 0, torch.Size(topk_TK.shape))
        if route is None:  # no rank has a hole
            assert rows.route(0, 0, torch.Size(topk_TK.shape)) is not None
            return
        num_holes = int((np.array([len(set(t.tolist()) - {-1}) for t in topk_TK]) < K).sum()) if len(topk_TK) else 0
        assert len(route.hole_I) == num_holes and len(route.extra_X) == sum(route.num_S) - sum(route.num_planned_S)
        assert route.num_planned_S == plan.quota_MLGS[0, 0, rank].tolist()
        arrived_YH = route.exchange.there(route.rows_of(x_TH).detach())
        weight_Z = weight_TE.reshape(-1).index_select(0, route.prob_Z)
        arrived_Y1 = route.exchange.there(weight_Z.detach()[:, None])
        expert_Y = torch.repeat_interleave(
            torch.from_numpy(plan.expert_MLGS[0, 0, rank].astype(np.int64)), torch.tensor(route.num_S)
        )
        served_YH = arrived_YH[route.by_slot_Y.long()] * arrived_Y1[route.by_slot_Y.long()] * (1 + expert_Y[:, None])
        back_ZH = route.exchange.back(Permute.apply(served_YH, route.by_arrival_Y, route.by_slot_Y))
        wanted_TH = x_TH * (weight_TE * (1 + torch.arange(E))).sum(1, keepdim=True)
        torch.testing.assert_close(route.tokens_of(back_ZH), wanted_TH)
        # The adjoint: every pair's gradient comes back to its token.
        (grad_TH,) = torch.autograd.grad(route.rows_of(x_TH), x_TH, weight_Z.detach()[:, None].expand(-1, H))
        torch.testing.assert_close(grad_TH, weight_TE.detach().sum(1, keepdim=True).expand(-1, H))

    run_threads(run, G)


@given(seed=st.integers(0, 10**6), K=st.integers(1, E), share=st.sampled_from([0.0, 0.3, 1.0]))
@examples(40)
def test_slots_are_those_of_the_plan(seed: int, K: int, share: float) -> None:
    plan, known, _, splits = made(seed, K, share)

    def run(group: Group) -> None:
        topk_TK, split = known[group.rank], splits[group.rank]
        shape = torch.Size(topk_TK.shape)
        rows = SlottedRows({(0, 0): topk_TK}, plan.expert_MLGS, split, num_experts=E, most_bytes=2**20, group=group, device=CPU)
        row = rows.row(0, 0, shape)
        assert row is not None and row.num_known == split.sum()
        slot_TK, hole_I = row.slot_TK.numpy(), row.hole_I.tolist()
        assert hole_I == np.flatnonzero((topk_TK < 0).any(1)).tolist() and (slot_TK[hole_I] == -1).all()
        served = slot_TK >= 0
        assert (plan.expert_MLGS[0, 0].ravel()[slot_TK[served]] == topk_TK[served]).all()
        assert np.bincount(slot_TK[served], minlength=split.size).tolist() == split.ravel().tolist()
        for t in set(range(len(topk_TK))) - set(hole_I):
            assert set(topk_TK[t][served[t]]) == set(topk_TK[t]) and served[t].sum() == len(set(topk_TK[t]))

    run_threads(run, G)


@pytest.mark.parametrize(("spare", "most_bytes", "lack"), [(0, 2**20, Lack.HOLES), (99, 10, Lack.MEMORY)])
def test_rows_beyond_the_limits_are_left_out_on_all_ranks(spare: int, most_bytes: int, lack: Lack) -> None:
    plan, known, _, splits = made(3, 2, 0.5)

    def run(group: Group) -> Any:
        routing = {(0, 0): known[group.rank]}
        holes = Holes.of(routing, splits[group.rank], plan.home_LE, spare, most_bytes)
        extra_GMLS = np.zeros((G, 1, 1, plan.S), np.int64)
        return ReplayedRows(
            routing, plan.expert_MLGS, splits[group.rank], extra_GMLS, num_experts=E, group=group, device=CPU,
            holes=(holes, extra_GMLS),
        ).lack_ML.tolist()  # fmt: skip

    assert run_threads(run, G) == [[[lack]]] * G


def test_what_is_compiled_ahead_is_what_stages_run() -> None:
    kernels = routes.route_rows, hole_kernels.find_holes, hole_kernels.route_holed_rows, slots.slot_rows
    if not all(hasattr(kernel, "signatures") for kernel in kernels):
        pytest.skip("nothing is compiled")
    warm_routes()
    before = [set(kernel.signatures) for kernel in kernels]
    test_tokens_meet_their_experts.hypothesis.inner_test(5, 2, 0.3)  # type: ignore[attr-defined]
    test_tokens_meet_their_experts.hypothesis.inner_test(5, 2, 0.0)  # type: ignore[attr-defined]
    test_slots_are_those_of_the_plan.hypothesis.inner_test(5, 2, 0.3)  # type: ignore[attr-defined]
    assert [set(kernel.signatures) for kernel in kernels] == before
