"""The simulator against a slow one, closed forms, and what must hold for any plan."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from slow_simulator import exchange_seconds, stage_seconds

import foremoe
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase
from foremoe.simulate import PARTS, even_routing, force_balanced, simulate
from foremoe.simulate.traffic import exchange
from foremoe.testing import strategies as draws

PREFETCH = st.integers(0, 3)
KNOWN = st.sampled_from(["rollout", "router"])


@st.composite
def cases(draw, **limits):
    problem = draw(draws.problems(sources=True, max_micro_steps=3, max_layers=3, **limits))
    plan = draw(draws.plans(problem))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return problem, some_by_host(plan, rng, draw(st.sampled_from([0.0, 0.5, 1.0])))


def some_by_host(plan, rng, share):
    """The plan with a share of its copies from host stores."""
    t = plan.transfers
    host_C = rng.random(len(t)) < share
    link_C, src_C = np.where(host_C, Link.HOST, t.link_C), np.where(host_C, -1, t.src_C)
    return dataclasses.replace(plan, transfers=t.replace(link_C=link_C.astype(np.uint8), src_C=src_C.astype(np.int16)))


def faster(problem, factor=4.0):
    names = ("peer_bytes_per_s", "rdma_bytes_per_s", "host_bytes_per_s")
    cluster = dataclasses.replace(problem.cluster, **{name: factor * getattr(problem.cluster, name) for name in names})
    return dataclasses.replace(problem, cluster=cluster)


@pytest.mark.heavy
@examples(60)
@given(cases())
def test_exchanges_are_those_of_the_split_law(case):
    problem, plan = case
    sent = exchange(problem, plan, np.ones(problem.N, np.int64))
    for n in range(problem.N):
        assert np.allclose((sent.peer_N[n], sent.rdma_N[n]), exchange_seconds(problem, plan, n), rtol=1e-12, atol=1e-18)


@pytest.mark.heavy
@examples(80)
@given(st.one_of(cases(), cases(min_ranks=2, min_redundant=1)), PREFETCH, KNOWN, st.sampled_from([0.0, 1e-4]))
def test_equals_the_slow_simulator(case, prefetch, known, plan_s):
    problem, plan = case
    found = simulate(problem, plan, prefetch=prefetch, known=known, plan_s=plan_s, share_links=False)
    total_s, times = stage_seconds(problem, plan, prefetch, known, plan_s)
    assert found.total_s == pytest.approx(total_s, rel=1e-9)
    for c in range(len(plan.transfers)):
        assert (found.copy_start_C[c], found.copy_end_C[c]) == pytest.approx(times[c], rel=1e-9, abs=1e-15)


@examples(80)
@given(cases(), PREFETCH, KNOWN)
def test_time_goes_on_and_parts_add_up(case, prefetch, known):
    problem, plan = case
    found = simulate(problem, plan, prefetch=prefetch, known=known)
    steps = (found.start_U, found.window_U, found.dispatched_U, found.ready_U, found.computed_U, found.end_U)
    for before, after in itertools.pairwise(steps):
        assert (before <= after).all()
    assert (found.end_U[:-1] <= found.start_U[1:]).all()
    assert found.total_s == pytest.approx(max(found.end_U[-1], found.return_end_A.max(initial=0.0)), rel=1e-9)
    assert all(getattr(found.parts, name) >= 0.0 for name in PARTS)
    assert found.same_as(simulate(problem, plan, prefetch=prefetch, known=known))


@examples(80)
@given(cases(min_ranks=2, min_redundant=1), PREFETCH)
def test_weights_are_there_in_time_and_land_in_free_buffers(case, prefetch):
    problem, plan = case
    found, t = simulate(problem, plan, prefetch=prefetch), plan.transfers
    slack = 1e-9 * found.total_s
    assert (found.copy_end_C <= found.ready_U[t.need_C] + slack).all()
    alone_C = ~((found.phase_U == Phase.BACKWARD) & problem.schedule.reforward)[t.need_C]  # others wait in their re-forward
    own_C = found.dispatched_U[t.need_C] + found.wait_UG[t.need_C, t.dst_C]
    assert (found.copy_end_C <= own_C * (1 + 1e-6) + slack)[alone_C].all()
    # Behind the last exchange of the use that sets them free.
    over_U = np.where(found.phase_U == Phase.BACKWARD, found.computed_U, found.end_U)
    before_C = np.maximum(t.need_C - prefetch - 1, t.after_C)
    assert (found.copy_start_C >= over_U[before_C] - slack)[before_C >= 0].all()
    backward_U = np.flatnonzero(found.phase_U == Phase.BACKWARD)
    use_ML = np.zeros((problem.M, problem.L), np.int64)
    use_ML[found.micro_step_U[backward_U], found.layer_U[backward_U]] = backward_U
    sent_A = use_ML[found.return_micro_step_A, found.return_layer_A]
    assert (found.return_start_A >= found.computed_U[sent_A] - slack).all()
    # A host link carries one copy at a time.
    for g in range(problem.G):
        mine = np.flatnonzero((t.src_C < 0) & (t.dst_C == g))
        by_start = mine[np.argsort(found.copy_start_C[mine], kind="stable")]
        assert (found.copy_end_C[by_start][:-1] <= found.copy_start_C[by_start][1:] + slack).all()


@examples(80)
@given(cases(), PREFETCH, KNOWN, st.booleans())
def test_more_bandwidth_never_hurts(case, prefetch, known, share_links):
    problem, plan = case
    options = {"prefetch": prefetch, "known": known, "share_links": share_links}
    slow_s = simulate(problem, plan, **options).total_s
    assert simulate(faster(problem), plan, **options).total_s <= slow_s * (1 + 1e-9)


@examples(60)
@given(cases(min_ranks=2))
def test_looking_ahead_never_hurts_a_stage_without_contention(case):
    problem, plan = case
    problem = dataclasses.replace(problem, cluster=dataclasses.replace(problem.cluster, copy_contention=0.0))
    online_s = simulate(problem, plan, known="router", prefetch=0).total_s
    assert simulate(problem, plan, prefetch=0).total_s <= online_s * (1 + 1e-9)


@examples(60)
@given(cases())
def test_nothing_beats_force_balanced_where_links_are_free(case):
    problem, plan = case
    cluster = dataclasses.replace(
        problem.cluster, slot_overhead_s=0.0, slot_backward_s=0.0, peer_bytes_per_s=1e300, exchange_bytes_per_s=None,
        rdma_bytes_per_s=1e300, host_bytes_per_s=1e300, peer_latency_s=0.0, rdma_latency_s=0.0, host_latency_s=0.0,
    )  # fmt: skip
    # Windows follow one another in the plan's order, which even routing does not have.
    problem = dataclasses.replace(problem, cluster=cluster, tokens_MG=None, attention_MG=None)
    mean_NG = even_routing(problem).load_MLE.sum(axis=2) / problem.G
    pair_s = problem.model.flops_per_pair / cluster.expert_flops_per_s + cluster.pair_overhead_s
    rounding_s = pair_s * problem.B * mean_NG.size * (2.0 + cluster.backward_ratio)  # whole pairs: ranks differ by B at most
    assert simulate(problem, plan).total_s >= force_balanced(problem).total_s - rounding_s - 1e-12


@examples(40)
@given(draws.problems(sources=True))
def test_even_routing_keeps_pairs_and_is_even(problem):
    even = even_routing(problem)
    assert (even.load_MLGE.sum(axis=3) == problem.load_MLGE.sum(axis=3)).all()
    assert (even.load_MLE.max(axis=2) - even.load_MLE.min(axis=2) <= 1).all()


def two_ranks(**changes):
    """Two ranks of one node, one expert each and one redundant slot; all load on expert 0, half of it served by rank 1."""
    cluster = foremoe.Cluster(
        name="toy", num_ranks=2, flops_per_s=1e9, compute_efficiency=1.0, slot_overhead_s=0.0, peer_bytes_per_s=1e6,
        rdma_bytes_per_s=1e6, host_bytes_per_s=1e6, peer_latency_s=0.0, rdma_latency_s=0.0, host_latency_s=0.0,
        copy_contention=0.0, memory_bytes=10**9, source="made up",
    )  # fmt: skip
    model = foremoe.Model(
        name="toy", num_layers=3, first_moe_layer=0, num_experts=2, num_topk=1, hidden_size=10, ffn_size=10, num_matrices=1,
        attention_params=1, num_heads=1, qk_head_dim=1, v_head_dim=1, source="made up",
    )  # fmt: skip
    load_MLGE = np.zeros((2, 3, 2, 2), np.int32)
    load_MLGE[..., 0] = 50
    problem = foremoe.Problem(
        model=model, cluster=dataclasses.replace(cluster, **changes), load_MLE=load_MLGE.sum(axis=2), load_MLGE=load_MLGE,
        home_LE=[[0, 1]] * 3, schedule=foremoe.Schedule.forward_only(2), stage="recompute", slot_depth=1,
        cost=foremoe.CostModel(objective="balance"), moe_layer_L=[0, 1, 2],
    )  # fmt: skip
    plan = foremoe.Planner().plan(problem)[0]
    assert (plan.load_NG == 50).all()
    return problem, plan


def test_without_overlap_every_copy_is_exposed():
    problem, plan = two_ranks()
    copy_s, row_s = problem.model.expert_bytes / 1e6, 50 * problem.model.flops_per_pair / 1e9
    assert (plan.transfers.link_C == Link.PEER).all() and len(plan.transfers) == 6
    online = simulate(problem, plan, known="router", plan_s=0.25)
    assert online.parts.transfer_s == pytest.approx(6 * copy_s)
    assert online.parts.planning_s == pytest.approx(6 * 0.25)
    assert online.parts.compute_s == pytest.approx(6 * row_s)
    assert online.parts.dispatch_s == 0.0  # half of the pairs come from each rank: all are served where they are
    # Ahead of time a ring of one buffer still waits for the use before it to end.
    assert simulate(problem, plan).parts.transfer_s == pytest.approx(6 * copy_s)


def test_a_deeper_ring_hides_copies_under_compute():
    problem, _ = two_ranks()
    copy_s, row_s = problem.model.expert_bytes / 1e6, 50 * problem.model.flops_per_pair / 1e9
    problem = dataclasses.replace(problem, slot_depth=2)
    plan = foremoe.Planner().plan(problem)[0]
    assert len(plan.transfers) == 6
    # The first two copies start at once, one after the other; a buffer is free again when its use is over.
    arrived_s, over_s = [0.0], []
    for u in range(6):
        arrived_s.append(max(arrived_s[-1], over_s[u - 2] if u >= 2 else 0.0) + copy_s)
        over_s.append(max(over_s[-1] if over_s else 0.0, arrived_s[-1]) + row_s)
    found = simulate(problem, plan)
    assert found.copy_end_C == pytest.approx(arrived_s[1:])
    assert found.total_s == pytest.approx(over_s[-1])
    assert found.parts.transfer_s < 6 * copy_s


def test_copies_stand_still_while_an_exchange_needs_their_link():
    problem, plan = two_ranks()
    load_MLGE = np.zeros_like(problem.load_MLGE)
    load_MLGE[:, :, 1, 0] = 100  # all tokens on rank 1: rank 0's half travels
    problem = dataclasses.replace(problem, load_MLGE=load_MLGE, slot_depth=3)
    plan = foremoe.Planner().plan(problem)[0]
    together, apart = simulate(problem, plan), simulate(problem, plan, share_links=False)
    assert together.parts.dispatch_s == apart.parts.dispatch_s > 0.0
    assert together.total_s > apart.total_s


def test_copies_leave_behind_combine_hide_under_dispatch_and_hold_up_their_own_rank_alone():
    problem, _ = two_ranks()
    load_MLGE = np.zeros_like(problem.load_MLGE)
    load_MLGE[:, :, 1, 0] = 100  # all tokens on rank 1, which serves half of them
    problem = dataclasses.replace(problem, load_MLGE=load_MLGE)
    plan = foremoe.Planner().plan(problem)[0]
    copy_s, row_s = problem.model.expert_bytes / 1e6, 50 * problem.model.flops_per_pair / 1e9
    swap_s = 50 * problem.model.token_bytes / 1e6
    assert 0.0 < copy_s < swap_s
    hidden = simulate(problem, plan, share_links=False)
    # With one buffer a copy leaves when the use before is over, and is there before its tokens are.
    assert hidden.copy_start_C == pytest.approx((2 * swap_s + row_s) * np.arange(6))
    assert hidden.parts.transfer_s == 0.0 and hidden.total_s == pytest.approx(6 * (2 * swap_s + row_s))
    # On the link of the exchange a copy stands still meanwhile, and only the rank that gets it waits.
    found = simulate(problem, plan)
    assert found.wait_UG == pytest.approx(np.tile([0.0, copy_s], (6, 1)), rel=1e-6)
    assert found.ready_U - found.dispatched_U == pytest.approx(np.full(6, copy_s))
    assert found.total_s == pytest.approx(6 * (2 * swap_s + copy_s + row_s))


def test_work_outside_the_layers_and_its_backward():
    problem, plan = two_ranks()
    problem = dataclasses.replace(problem, stage="update", schedule=foremoe.Schedule.accumulate(2))
    plan = foremoe.Planner(rank=()).plan(problem)[0]
    outside_s_MG = np.array([[1.0, 2.0], [3.0, 1.0]])
    plain, found = simulate(problem, plan), simulate(problem, plan, outside_s_MG=outside_s_MG)
    assert found.parts.outside_s == pytest.approx((2.0 + 3.0) * (1 + problem.cluster.backward_ratio))
    assert found.total_s == pytest.approx(plain.total_s + found.parts.outside_s)


@pytest.mark.parametrize("wrong", [{"prefetch": -1}, {"plan_s": -1.0}, {"known": "tomorrow"}])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(foremoe.InputError):
        simulate(*two_ranks(), **wrong)


def test_a_plan_of_another_load_is_refused():
    problem, plan = two_ranks()
    other = dataclasses.replace(problem, load_MLE=problem.load_MLE[:, :, ::-1], load_MLGE=problem.load_MLGE[..., ::-1])
    with pytest.raises(foremoe.InputError, match="load differs"):
        simulate(other, plan)
    with pytest.raises(foremoe.InputError, match="source rank"):
        simulate(dataclasses.replace(problem, load_MLGE=None), plan)
