"""The price of a row: by differences it is what it is as a whole, and without copies it is what the simulator takes."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

import foremoe
from foremoe.base.compiled import kernel
from foremoe.machine.cluster import DISPATCHES
from foremoe.problem.kernels.dispatch import keep, put, restore, settle
from foremoe.problem.kernels.row_price import Windows, clear_traffic, fill_traffic, row_seconds, set_quota
from foremoe.problem.pricing import price, problem_rows
from foremoe.problem.rows import empty_of, row_of, sources_of
from foremoe.simulate import simulate
from foremoe.testing import strategies as draws


@kernel
def move_pairs(e, src, dst, num, row, t):
    """Rank `dst` serves `num` pairs of an expert that rank `src` served, by differences."""
    put(e, -1, row, t)
    set_quota(e, src, t.quota_EG[e, src] - num, row, t)
    set_quota(e, dst, t.quota_EG[e, dst] + num, row, t)
    put(e, 1, row, t)


@kernel
def moved(num, seed, n, rows, expert_GS, quota_GS):
    """Makes `num` random moves in row `n`, every second one undone; what is left, as slots, and the sums of its traffic."""
    np.random.seed(seed)
    G, E = expert_GS.shape[0], rows.counts.load_NE.shape[1]
    t, sources = empty_of(rows), sources_of(rows)
    row = row_of(rows, n, sources)
    fill_traffic(expert_GS, quota_GS, rows.num_base, row, t)
    for i in range(num):
        e = np.random.randint(E)
        src, dst = t.holder_EG[e, np.random.randint(t.num_E[e])], np.random.randint(G)
        pairs = t.quota_EG[e, src]
        if src == dst or pairs == 0:
            continue
        pairs = np.random.randint(pairs) + 1
        keep(t)
        move_pairs(e, src, dst, pairs, row, t)
        if i % 3:
            settle(row, t)
        if i % 2:
            set_quota(e, src, t.quota_EG[e, src] + pairs, row, t)
            set_quota(e, dst, t.quota_EG[e, dst] - pairs, row, t)
            restore(i % 3 != 0, row, t)
        elif i % 3 == 0:
            settle(row, t)
    num_slots = rows.num_base + E
    expert_GX, quota_GX = np.full((G, num_slots), -1, np.int16), np.zeros((G, num_slots), np.int32)
    used_G = np.full(G, rows.num_base)
    base_G = np.zeros(G, np.int64)
    for e in range(E):
        for i in range(t.num_E[e]):
            g = t.holder_EG[e, i]
            at = used_G[g] if i else base_G[g]
            used_G[g] += i > 0
            base_G[g] += i == 0
            expert_GX[g, at], quota_GX[g, at] = e, t.quota_EG[e, g]
    w = rows.window_N3[n]
    seconds = row_seconds(rows.prices, Windows(w[0], w[1], w[2]), row, t)
    return expert_GX, quota_GX, t.sum_XG, seconds


@kernel
def whole(n, rows, expert_GS, quota_GS):
    """The sums and seconds of a row, from nothing; and whether clearing leaves nothing."""
    t, sources = empty_of(rows), sources_of(rows)
    row, w = row_of(rows, n, sources), rows.window_N3[n]
    fill_traffic(expert_GS, quota_GS, rows.num_base, row, t)
    seconds = row_seconds(rows.prices, Windows(w[0], w[1], w[2]), row, t)
    sum_XG = t.sum_XG.copy()
    clear_traffic(row, t)
    left = np.abs(t.sum_XG).sum() + np.abs(t.quota_EG).sum() + t.num_E.sum() + np.abs(t.messages.flow_GG).sum()
    return sum_XG, seconds, left


def law(problem, n, num, seed):
    """The law of differences on one row, from home; what moves make may not fit into slots, which the price does not know."""
    rows, static = problem_rows(problem), problem.static()
    expert_GX, quota_GX, by_moves_XG, moved_s = moved(num, seed, n, rows, static.expert_NGS[n], static.quotas_NGS[n])
    at_once_XG, whole_s, left = whole(n, rows, expert_GX, quota_GX)
    assert left == 0.0
    if problem.cluster.dispatch == "pairs" or problem.load_MLGE is None:
        np.testing.assert_array_equal(by_moves_XG, at_once_XG)
        assert moved_s == whole_s
    else:
        scale = max(1.0, float(problem.load_NE[n].sum()))
        np.testing.assert_allclose(by_moves_XG, at_once_XG, rtol=1e-9, atol=1e-12 * scale)
        assert moved_s == pytest.approx(whole_s, rel=1e-9, abs=1e-15)


@examples(60)
@given(st.data(), st.integers(0, 2**31), st.integers(1, 40))
def test_differences_add_up_to_the_whole(data, seed, num):
    problem = data.draw(draws.problems())
    law(problem, data.draw(st.integers(0, problem.N - 1)), num, seed)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(("num_ranks", "kind"), [(16, "8xh100"), (16, "8xpcie"), (12, "8xa100")])
def test_so_they_do_after_ten_thousand_moves(dispatch, num_ranks, kind):
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_experts=48)
    work = foremoe.synthetic_workload(
        model, num_ranks=num_ranks, tokens_per_rank=1024, micro_steps=1, num_layers=1, seed=3, regime="mid"
    )
    law(foremoe.Problem.of(work, foremoe.Cluster.preset(kind, num_ranks, dispatch=dispatch), model=model), 0, 10_000, 5)


@examples(60)
@given(st.data())
def test_rows_without_copies_are_what_the_simulator_takes(data):
    problem = data.draw(draws.problems(sources=True))
    problem = dataclasses.replace(problem, redundant=0, slot_depth=3)
    plan, _ = foremoe.resolve("static").plan(problem)
    cost, parts = price(problem, problem.static()).sum(), simulate(problem, plan).parts
    # In backward, a rank whose window is over begins the next one while others are still in theirs: that couples rows.
    for name in ("dispatch", "compute", "combine", *(["window"] if problem.stage == "recompute" else [])):
        assert float(getattr(cost, f"{name}_s")) == pytest.approx(getattr(parts, f"{name}_s"), rel=1e-9, abs=1e-15), name
    assert float(cost.transfer_s) == float(cost.gradient_s) == 0.0


@pytest.mark.parametrize("depth", [3, 2, 1])
def test_copies_cost_what_does_not_hide_by_hand(depth):
    """Rank 0 sends its expert to one rank of its node and to one of the other: over RDMA a copy takes 5 s, of a row of less."""
    model = dataclasses.replace(foremoe.Model.preset("mixtral-8x7b"), num_experts=4)
    cluster = dataclasses.replace(
        foremoe.Cluster.preset("8xh100", 4, 2), rdma_bytes_per_s=model.expert_bytes / 5.0, rdma_latency_s=0.0, copy_contention=0.0
    )
    load_MLGE = np.full((1, 1, 4, 4), 64, np.int32)
    problem = foremoe.Problem(
        model=model, cluster=cluster, schedule=foremoe.Schedule.plain("recompute", 1), stage="recompute", redundant=1,
        slot_depth=depth, home_LE=np.arange(4)[None], load_MLE=load_MLGE.sum(axis=2), load_MLGE=load_MLGE,
        moe_layer_L=np.arange(1),
    )  # fmt: skip
    expert_NGS, quota_NGS = np.array([[[0, -1], [1, 0], [2, 0], [3, -1]]]), np.array([[[100, 0], [256, 78], [256, 78], [256, 0]]])
    cost = price(problem, foremoe.Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS))
    # RDMA is busy all through both exchanges.
    hide_s = float(cost.window_s[0]) + (float(cost.compute_s[0]) if depth > 1 else 0.0)
    # With two rows ahead, the neighbour's busy rank is as likely this one as any other.
    tops = [5.0, 2.5, 2.5, 2.5] if depth > 2 else [5.0]
    expected = sum(max(0.0, top - hide_s) for top in tops) / len(tops)
    assert float(cost.transfer_s[0]) == pytest.approx(expected, rel=1e-9)


def test_a_source_may_have_more_pairs_than_int32_holds():
    """Twice 4e9 pairs cost twice as much to send as 4e9, under node dispatch, too."""
    cluster = foremoe.Cluster.preset("8xh100", 2, ranks_per_node=1, dispatch="node")
    model = dataclasses.replace(foremoe.Model.preset("qwen3-30b-a3b"), num_experts=8, num_topk=2)

    def sent_s(pairs):
        load_MLGE, schedule = np.full((1, 1, 2, 8), pairs), foremoe.Schedule.accumulate(1)
        problem = foremoe.Problem(
            model=model, cluster=cluster, load_MLE=load_MLGE.sum(axis=2), load_MLGE=load_MLGE, schedule=schedule,
            home_LE=np.arange(8)[None], moe_layer_L=np.zeros(1, int),
        )  # fmt: skip
        return float(price(problem, problem.static()).dispatch_s[0])

    assert sent_s(1_000_000_000) == pytest.approx(2.0 * sent_s(500_000_000), rel=1e-3)
