"""Weight copies of random plans in the engine: they come from homes, in one order on all ranks, whatever fails."""

import dataclasses

import numpy as np
import pytest
from engine_util import ToyBuffers, a_plan
from engine_util import run_stage as run
from flaky import Flaky, FlakyHost, Late, Lazy, Ordered, Second, Slow
from hypothesis import given
from hypothesis import strategies as st
from mutations import copying_plans
from profiles import examples
from test_faults import by_host, by_peer

from foremoe.base.errors import InputError
from foremoe.plan.programme import Programme
from foremoe.plan.transfers import Link
from foremoe.testing.ranks import run_threads
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost

# Letters: C copies.

RANKS = 4
# Few experts, many copies of each.
PLANS = copying_plans(min_ranks=3, max_base=1, max_micro_steps=3, max_layers=3)


class PairOnly(Local):
    links = frozenset({Link.PEER, Link.RDMA})


def weights(results):
    return [e for _, t in results for e in t.events if e.kind == "weights"]


@examples(60)
@given(st.data())
def test_copies_come_from_homes(data):
    _, plan = data.draw(PLANS)
    backend = data.draw(st.sampled_from([Local, Late, Lazy, Ordered]))
    prefetch, debug = data.draw(st.integers(0, 4)), data.draw(st.booleans())
    results = run_threads(lambda group: run(group, plan, (backend(),), prefetch=prefetch, timeout_s=20.0, debug=debug), plan.G)
    assert not any(fell_back for fell_back, _ in results)
    assert len(weights(results)) == len(plan.transfers)
    assert all(e.src_rank == plan.home_LE[e.layer, e.expert] // plan.B for e in weights(results))


@given(st.data())
def test_all_ranks_have_one_order(data):
    _, plan = data.draw(PLANS)
    prefetch = data.draw(st.integers(0, 4))
    programmes = [Programme.of(plan, g, prefetch) for g in range(plan.G)]
    one, t = programmes[0], plan.transfers
    seen = set()
    for other in programmes:
        assert (other.start_C == one.start_C).all()
        for position, copies in other.starts.items():
            assert other.need_C[copies].tolist() == sorted(other.need_C[copies]) and (other.start_C[copies] == position).all()
            seen |= set(copies)
    assert seen == set(range(len(t)))
    assert (one.start_C > t.after_C).all() and (one.start_C <= one.need_C).all()


def test_copies_of_a_link_without_a_backend_take_other_links():
    plan = by_host(a_plan(ranks=RANKS))
    results = run_threads(lambda group: run(group, plan, (PairOnly(),)), RANKS)
    assert len(weights(results)) == len(plan.transfers)
    assert all(e.src_rank == plan.home_LE[e.layer, e.expert] // plan.B for e in weights(results))


def test_weights_from_a_rank_that_received_them_are_refused_on_all_ranks():
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=3))
    t = plan.transfers
    same = (t.layer_C[:, None] == t.layer_C) & (t.expert_C[:, None] == t.expert_C) & (t.dst_C[:, None] != t.dst_C)
    c, before = np.argwhere(same & (t.need_C[:, None] >= t.need_C))[0]
    src_C = t.src_C.copy()
    src_C[c] = t.dst_C[before]
    passed_on = dataclasses.replace(plan, transfers=t.replace(src_C=src_C))

    def refused(group):
        engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(Local(),))
        with pytest.raises(InputError, match=r"breaks a law: \[residency\] .* neither its home"):
            engine.begin(passed_on)
        engine.close()

    run_threads(refused, RANKS)


@pytest.mark.parametrize(("rank", "starts"), [(1, 0), (2, 1), (1, 3)])
def test_a_backend_that_fails_is_given_up_by_all_ranks(rank, starts):
    plan = by_peer(a_plan(ranks=RANKS, stage="recompute", micro_steps=4))
    results = run_threads(lambda group: run(group, plan, (Flaky(rank, starts), Second()), timeout_s=1.0), RANKS)
    assert all(t.retired == ("Flaky",) for _, t in results)
    assert all(fell_back == results[0][0] for fell_back, _ in results) and len(results[0][0]) < plan.N
    assert any(e.backend == "Second" and e.outcome == "done" for e in weights(results))


@pytest.mark.parametrize("starts", [1, 3, 5])
def test_nothing_of_a_retired_backend_lands_later(starts):
    plan = by_peer(a_plan(ranks=RANKS, stage="recompute", micro_steps=4, slot_depth=1))
    results = run_threads(lambda group: run(group, plan, (Slow(1, starts), Second()), timeout_s=1.0), RANKS)
    assert all(t.retired == ("Slow",) for _, t in results)


def test_a_host_store_takes_over():
    plan = by_peer(a_plan(ranks=RANKS, stage="recompute", micro_steps=4))
    results = run_threads(lambda group: run(group, plan, (Flaky(2, 2), PinnedHost()), timeout_s=1.0), RANKS)
    assert all(t.retired == ("Flaky",) for _, t in results)
    assert any(e.backend == "PinnedHost" for e in weights(results))


def test_a_failed_pull_costs_no_two_sided_backend():
    plan = by_peer(a_plan(ranks=RANKS, stage="recompute", micro_steps=4))
    t = plan.transfers
    host_C = np.arange(len(t)) % 2 == 0
    plan = dataclasses.replace(
        plan, transfers=t.replace(link_C=np.where(host_C, Link.HOST, t.link_C), src_C=np.where(host_C, -1, t.src_C))
    )
    pulls = int((host_C & (t.dst_C == 1)).sum())
    assert pulls
    results = run_threads(lambda group: run(group, plan, (FlakyHost(1, pulls - 1), PairOnly()), timeout_s=2.0), RANKS)
    assert all(not t.retired for _, t in results)
    assert results[0][0] and all(fell_back == results[0][0] for fell_back, _ in results)
