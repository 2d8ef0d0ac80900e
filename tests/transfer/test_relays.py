"""Relays in the engine: the same numbers as without, in one order on all ranks, and no new way to hang or to be wrong."""

import dataclasses
import time
from functools import partial

import numpy as np
import pytest
from engine_util import ToyBuffers, a_plan, check_grads, run_uses
from engine_util import run_stage as run
from flaky import Flaky, FlakyHost, Late, Lazy, Ordered, Second, Shelf, Slow
from hypothesis import assume, given, note
from hypothesis import strategies as st
from profiles import examples
from relayed_plans import with_relays

import foremoe
from foremoe.base.errors import InputError, TransferError
from foremoe.plan.programme import Programme
from foremoe.plan.relays import keep_executable, relays_of
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase
from foremoe.solvers import Deadline
from foremoe.testing import describe, problems
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.testing.samples import plan_of, random_placement
from foremoe.transfer.collective import Collective
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost

# Letters: C copies, P paths.

RANKS = 4


def num_relays(plan):
    t = plan.transfers
    return int(((t.src_C >= 0) & (t.src_C != plan.home_LE[t.layer_C, t.expert_C] // plan.B)).sum())


@st.composite
def relaying_plans(draw, **options):
    """Few experts, many copies of each: most can be relayed."""
    usual = {"min_ranks": 3, "max_ranks": 4, "max_base": 1, "min_redundant": 1, "max_redundant": 2, "min_micro_steps": 2}
    usual |= {"max_micro_steps": 3, "max_layers": 3, "max_pairs": 8, "row_kinds": ("flat", "skewed"), "replicas": ("any",)}
    problem = draw(problems(**(usual | options)))
    note(describe(problem))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    plan = plan_of(problem, random_placement(problem, rng, density=1.0, evenness=20.0)).rederived()
    plan = with_relays(plan, rng, density=draw(st.sampled_from([1.0, 0.5])))
    assume(num_relays(plan))
    return plan


def a_relaying_plan(seed=0, **options):
    """Every row copies one expert to all other ranks, which relay it at random."""
    plan = everywhere(ranks=RANKS, **options)
    plan = with_relays(plan, np.random.default_rng(seed))
    t = plan.transfers
    return dataclasses.replace(plan, transfers=t.replace(link_C=np.full(len(t), Link.PEER)))


def everywhere(*, ranks, micro_steps=3, stage="update", slot_depth=3):
    plan = a_plan(ranks=ranks, micro_steps=micro_steps, stage=stage, slot_depth=slot_depth)
    expert_MLGS, quota_MLGS = plan.expert_MLGS.copy(), plan.quota_MLGS.copy()
    expert_MLGS[..., plan.B :], quota_MLGS[..., plan.B :] = -1, 0
    quota_MLGS[..., : plan.B] = np.take_along_axis(plan.load_MLE[:, :, None], expert_MLGS[..., : plan.B].astype(np.int64), 3)
    for m, layer in np.ndindex(plan.M, plan.L):
        e = (m * plan.L + layer) % plan.E
        home, b = divmod(int(plan.home_LE[layer, e]), plan.B)
        for g in set(range(ranks)) - {home}:
            expert_MLGS[m, layer, g, plan.B], quota_MLGS[m, layer, g, plan.B] = e, 2
            quota_MLGS[m, layer, home, b] -= 2
    zero = np.zeros_like(plan.bound_ML)
    return dataclasses.replace(
        plan, expert_MLGS=expert_MLGS, quota_MLGS=quota_MLGS, bound_ML=zero, load_bound_ML=zero, stop_ML=plan.stop_ML * 0
    ).rederived()


def relayed(results, plan):
    """How many copies came from a rank that is not their expert's home."""
    homes = plan.home_LE // plan.B
    events = [e for _, t in results for e in t.events if e.kind == "weights"]
    return sum(e.src_rank >= 0 and e.src_rank != homes[e.layer, e.expert] for e in events)


@examples(60)
@given(st.data())
def test_relays_bring_what_homes_would(data):
    plan = data.draw(relaying_plans())
    assert plan.violations() == []
    backend = data.draw(st.sampled_from([Local, Late, Lazy, Ordered]))
    prefetch, debug = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    results = run_threads(lambda group: run(group, plan, (backend(),), prefetch=prefetch, timeout_s=20.0, debug=debug), plan.G)
    assert not any(fell_back for fell_back, _ in results)
    assert relayed(results, plan) == num_relays(plan)
    assert sum(e.kind == "weights" for _, t in results for e in t.events) == len(plan.transfers)


def test_buffers_keep_what_is_passed_on_until_it_has_left():
    """Destinations dawdle in backward, where no exchange of this test holds sources back."""
    plan = a_relaying_plan(micro_steps=2, slot_depth=1)
    relays = relays_of(plan, plan.transfers)
    assert (relays.relay_C & (plan.transfers.phase_C == Phase.BACKWARD)).any()

    def dawdles(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(Lazy(),), timeout_s=5.0, debug=True)
        try:
            engine.begin(plan)
            run_uses(engine, plan, group, on_use=lambda u: time.sleep(0.01 * (group.rank == u % RANKS)))
            engine.end()
        finally:
            engine.close()
        check_grads(plan, buffers)

    run_threads(dawdles, RANKS)


@examples(4)
@given(st.data())
def test_on_processes(data):
    plan = data.draw(relaying_plans(max_layers=2, max_micro_steps=2))
    prefetch = data.draw(st.integers(0, 2))
    results = get_pool(4).run(partial(run, prefetch=prefetch, timeout_s=20.0), plan, (Collective(),), num_ranks=plan.G)
    assert not any(fell_back for fell_back, _ in results) and relayed(results, plan) == num_relays(plan)


@given(st.data())
def test_all_ranks_have_one_order_in_which_relays_come_after_what_they_pass_on(data):
    plan = data.draw(relaying_plans())
    prefetch = data.draw(st.integers(0, 4))
    programmes = [Programme.of(plan, g, prefetch) for g in range(plan.G)]
    one, t = programmes[0], plan.transfers
    for other in programmes:
        assert (other.start_C == one.start_C).all() and (other.relays.depth_C == one.relays.depth_C).all()
        for position, copies in other.starts.items():
            keys = [(other.relays.depth_C[c], other.need_C[c]) for c in copies]
            assert keys == sorted(keys) and (other.start_C[copies] == position).all()
    assert (one.start_C > t.after_C).all() and (one.start_C <= one.need_C).all()
    for c, parent in enumerate(one.relays.parent_C.tolist()):
        if parent >= 0:
            before, after = ((one.start_C[x], one.relays.depth_C[x]) for x in (parent, c))
            assert before < after
            assert t.dst_C[parent] == t.src_C[c] and t.buffer_C[parent] == one.relays.buffer_C[c]
            assert (t.layer_C[parent], t.expert_C[parent]) == (t.layer_C[c], t.expert_C[c])
            # With room between after and need, a relay has a use of its own.
            assert one.start_C[c] > one.start_C[parent] or one.start_C[c] == one.need_C[c]


def test_deadlines_relays_run():
    plan = everywhere(ranks=RANKS, stage="update")
    cluster = dataclasses.replace(plan.header.cluster, node_of_rank_G=np.array([0, 0, 1, 1]), host_bytes_per_s=1.0)
    plan = dataclasses.replace(plan, header=dataclasses.replace(plan.header, cluster=cluster)).rederived()
    # On the engine's own links the relays are those of the plan, or chosen anew if a way is missing (here the host's).
    for deadline in (Deadline(relay=True), Deadline(relay=3)):
        problem = dataclasses.replace(a_problem(plan), cluster=cluster)
        made = dataclasses.replace(plan, transfers=deadline.solve(problem, plan.transfers))
        made.check()
        assert num_relays(made)
        results = run_threads(lambda group, made=made: run(group, made, (Local(),)), RANKS)
        assert relayed(results, made) == num_relays(made)
    t = made.transfers
    host_C = np.arange(len(t)) == np.flatnonzero(relays_of(made, t).parent_C < 0)[-1]
    some_by_host = made.transfers.replace(link_C=np.where(host_C, Link.HOST, t.link_C), src_C=np.where(host_C, -1, t.src_C))
    if dataclasses.replace(made, transfers=some_by_host).violations() == []:
        results = run_threads(lambda group: run(group, dataclasses.replace(made, transfers=some_by_host), (PairOnly(),)), RANKS)
        assert relayed(results, made) > 0


class PairOnly(Local):
    links = frozenset({Link.PEER, Link.RDMA})


def a_problem(plan):
    head = plan.header
    return foremoe.Problem(
        model=head.model, cluster=head.cluster, cost=head.cost, stage=head.key.stage, schedule=head.schedule,
        redundant=head.redundant, slot_depth=head.slot_depth, home_LE=plan.home_LE, load_MLE=plan.load_MLE,
        moe_layer_L=head.moe_layer_L,
    )  # fmt: skip


def test_a_relay_needs_one_two_sided_backend_for_itself_and_for_what_it_passes_on():
    plan = a_relaying_plan()
    t, relays = plan.transfers, relays_of(plan, plan.transfers)
    first = int(relays.parent_C[np.argmax(relays.depth_C == 1)])
    link_C = t.link_C.copy()
    link_C[first] = Link.RDMA
    two = plan.transfers.replace(link_C=link_C)
    both, one, none = np.array([0, 0, -1]), np.array([0, 1, -1]), np.array([True, True, True])
    assert keep_executable(plan, two, both, none).same_as(two)
    assert (keep_executable(plan, two, both, ~none).src_C == plan.home_LE[t.layer_C, t.expert_C] // plan.B).all()
    found = keep_executable(plan, two, one, none)
    dropped_C = found.src_C != two.src_C
    assert dropped_C.any() and (relays.parent_C[dropped_C] >= 0).all()
    # What is left is of one backend with what it passes on.
    left = relays_of(plan, found)
    mixed_C = left.relay_C & (one[found.link_C] != one[found.link_C[left.parent_C]])
    assert not mixed_C.any()
    assert dataclasses.replace(plan, transfers=found.replace(link_C=t.link_C)).violations() == []


def test_one_sided_backends_pull_from_home():
    plan = a_relaying_plan(stage="recompute")
    results = run_threads(lambda group: run(group, plan, (Shelf(),)), RANKS)
    assert relayed(results, plan) == 0 and not any(fell_back for fell_back, _ in results)
    assert sum(e.backend == "Shelf" for _, t in results for e in t.events) == len(plan.transfers)


def test_relays_without_a_source_are_refused_on_all_ranks():
    plan = a_relaying_plan()
    t, relays = plan.transfers, relays_of(plan, plan.transfers)
    c = int(np.argmax(relays.depth_C))
    nobody, circle = t.src_C.copy(), t.src_C.copy()
    nobody[c] = t.dst_C[c]
    circle[relays.parent_C[c]] = t.dst_C[c]

    def refused(group, broken, match):
        engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(Local(),))
        with pytest.raises(InputError, match=match):
            engine.begin(dataclasses.replace(plan, transfers=t.replace(src_C=broken)))
        engine.close()

    run_threads(refused, RANKS, nobody, r"breaks a law: \[residency\]")
    run_threads(refused, RANKS, circle, "passed on in a circle")


@pytest.mark.parametrize(("rank", "starts"), [(1, 0), (2, 1), (1, 3)])
def test_a_relay_that_fails_is_given_up_by_all_ranks(rank, starts):
    plan = a_relaying_plan(stage="recompute", micro_steps=4)
    results = run_threads(lambda group: run(group, plan, (Flaky(rank, starts), Second()), timeout_s=1.0), RANKS)
    assert all(t.retired == ("Flaky",) for _, t in results)
    assert all(fell_back == results[0][0] for fell_back, _ in results) and len(results[0][0]) < plan.N
    assert any(e.backend == "Second" and e.outcome == "done" for _, t in results for e in t.events)


@pytest.mark.parametrize("starts", [1, 3, 5])
def test_nothing_of_a_retired_backend_lands_later(starts):
    plan = a_relaying_plan(stage="recompute", micro_steps=4, slot_depth=1)
    results = run_threads(lambda group: run(group, plan, (Slow(1, starts), Second()), timeout_s=1.0), RANKS)
    assert all(t.retired == ("Slow",) for _, t in results)


def test_a_host_store_takes_over():
    plan = a_relaying_plan(stage="recompute", micro_steps=4)
    results = run_threads(lambda group: run(group, plan, (Flaky(2, 2), PinnedHost()), timeout_s=1.0), RANKS)
    assert all(t.retired == ("Flaky",) for _, t in results)
    assert any(e.backend == "PinnedHost" for _, t in results for e in t.events)


def test_a_failed_pull_costs_no_two_sided_backend():
    """Copies whose source had its own from the host store come from home, so nobody waits for what failed there."""
    plan = a_relaying_plan(stage="recompute", micro_steps=4)
    t, relays = plan.transfers, relays_of(plan, plan.transfers)
    first_C = (relays.parent_C == -1) & ~relays.relay_C
    t = t.replace(link_C=np.where(first_C, Link.HOST, t.link_C), src_C=np.where(first_C, -1, t.src_C))
    plan = dataclasses.replace(plan, transfers=t)
    assert plan.violations() == []
    pulls = int((first_C & (t.dst_C == 1)).sum())
    assert pulls
    results = run_threads(lambda group: run(group, plan, (FlakyHost(1, pulls - 1), PairOnly()), timeout_s=2.0), RANKS)
    assert all(not t.retired for _, t in results)
    # Those that pass on what a rank got from its home remain.
    assert 0 < relayed(results, plan) < num_relays(plan)
    assert results[0][0] and all(fell_back == results[0][0] for fell_back, _ in results)


def test_a_relay_that_stops_answering_is_named():
    plan = a_relaying_plan(micro_steps=3)

    stops = partial(run, plan=plan, backends=(Local(),), timeout_s=0.5, stop_rank=2, stop_use=3, debug=False)
    results = run_threads(stops, RANKS, errors=True, timeout_s=2.0)
    for g in (0, 1, 3):
        assert isinstance(results[g], TransferError) and "rank 2" in str(results[g])
