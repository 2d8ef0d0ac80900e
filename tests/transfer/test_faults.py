"""Fault drills: what fails is repaired where it can be, and otherwise ends the step on every rank with the cause named."""

import dataclasses
import os
import signal

import pytest
from engine_util import ToyBuffers, a_plan, check_grads, run_plan, run_uses
from engine_util import run_stage as run
from flaky import Flaky, FlakyHost, OverwrittenHost, Second, Shelf

from foremoe.base.errors import InputError, StaleWeights, TransferError
from foremoe.plan.transfers import Link
from foremoe.testing.ranks import run_processes, run_threads
from foremoe.transfer.collective import Collective
from foremoe.transfer.engine import Engine
from foremoe.transfer.local import Local
from foremoe.transfer.pinned_host import PinnedHost

RANKS = 3


def by_host(plan):
    """The same plan with every weight copy from the host store."""
    t = plan.transfers
    return dataclasses.replace(plan, transfers=t.replace(link_C=t.link_C * 0 + Link.HOST, src_C=t.src_C * 0 - 1))


def by_peer(plan):
    t = plan.transfers
    home_C = plan.home_LE[t.layer_C, t.expert_C] // plan.B
    return dataclasses.replace(plan, transfers=t.replace(link_C=t.link_C * 0 + Link.PEER, src_C=home_C))


def test_a_pull_that_fails_comes_another_way():
    plan = by_host(a_plan(ranks=RANKS, micro_steps=4))
    results = run_threads(lambda group: run(group, plan, (FlakyHost(1, 2), Shelf(), Local())), RANKS)
    assert all(fell_back == [] for fell_back, _ in results)
    outcomes = [[e.outcome for e in t.events if e.kind == "weights"] for _, t in results]
    assert "failed over" in outcomes[1] and set(outcomes[0] + outcomes[2]) == {"done"}


def test_an_overwritten_host_store_is_seen_without_debug():
    """Ranks take another way; `run` finds the right weights in every use."""
    plan = by_host(a_plan(ranks=RANKS, micro_steps=4))
    results = run_threads(lambda group: run(group, plan, (OverwrittenHost(1), Shelf(), Local()), debug=False), RANKS)
    assert all(fell_back == [] for fell_back, _ in results)
    lost = [e for _, t in results for e in t.events if e.outcome == "failed over"]
    assert lost and all(e.kind == "weights" for e in lost)


@pytest.mark.parametrize("stage", ["recompute", "update"])
def test_a_pull_with_no_way_left_sends_the_row_home_on_all_ranks(stage):
    plan = by_host(a_plan(ranks=RANKS, micro_steps=4, stage=stage))
    results = run_threads(lambda group: run(group, plan, (FlakyHost(1, 2), Local())), RANKS, errors=True)
    if stage == "recompute":
        assert results[0][0] and all(fell_back == results[0][0] for fell_back, _ in results)
        assert all(t.fell_back == tuple(fell_back) for fell_back, t in results)
    elif isinstance(results[0], TransferError):
        # The pull that failed was one of a backward, whose forward had run on the replica.
        assert all(isinstance(error, TransferError) and "rank 1" in str(error) for error in results)


def test_ranks_ask_each_other_at_a_pass_boundary_only_where_another_backend_could_take_over():
    def gathers(group, micro_steps, backends):
        asked, gather = [], group.gather
        group.gather = lambda value: asked.append(value) or gather(value)
        run(group, by_peer(a_plan(ranks=RANKS, micro_steps=micro_steps, stage="recompute")), backends)
        return len(asked)

    def per_boundary(*backends):
        """Gathers that three more micro-steps take, less those of the test's own exchange."""
        two, five = (run_threads(lambda group, m=m: gathers(group, m, [b() for b in backends]), RANKS) for m in (2, 5))
        (more,) = {b - a for a, b in zip(two, five, strict=True)}
        return more - 3 * a_plan(ranks=RANKS, micro_steps=2).L

    assert per_boundary(Second) == 0 and per_boundary(Second, Local) == 3


@pytest.mark.parametrize("stage", ["recompute", "update"])
def test_the_only_backend_fails_on_one_rank_and_its_rows_run_at_home_or_one_error_names_it(stage):
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=4, stage=stage))
    results = run_threads(lambda group: run(group, plan, (Flaky(1, 2),), timeout_s=0.5), RANKS, errors=True)
    if stage == "recompute":
        assert results[0][0] and all(fell_back == results[0][0] for fell_back, _ in results)
    elif any(isinstance(result, Exception) for result in results):
        assert all(isinstance(result, TransferError) and "Flaky" in str(result) for result in results)


def test_without_a_second_backend_later_rows_run_at_home():
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=5, stage="recompute"))
    results = run_threads(lambda group: run(group, plan, (Flaky(1, 2),), timeout_s=0.5), RANKS)
    assert all(fell_back == results[0][0] and len(fell_back) >= 3 * plan.L for fell_back, _ in results)


@pytest.mark.parametrize("starts", range(0, 12, 2))
def test_in_an_update_it_is_repaired_or_ends_on_all_ranks(starts):
    """Wherever it strikes: equal gradients (checked in run), or one error on every rank that names the cause."""
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=3))
    backends = (Flaky(1, starts), Second())
    results = run_threads(lambda group: run(group, plan, backends, timeout_s=3.0), RANKS, errors=True)
    ended = [isinstance(result, TransferError) for result in results]
    assert all(ended) or not any(ended)
    if all(ended):
        assert all("rank 1" in str(error) or error.ranks == (1,) or "link is down" in str(error) for error in results)
    else:
        assert all(fell_back == results[0][0] for fell_back, _ in results)


def test_the_sole_two_sided_backend_fails_in_an_update():
    """Rows still to come run at home if no row is left halfway; otherwise all ranks end with one cause. Never wrong gradients."""
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=3))
    outcomes = set()
    for starts in range(9):
        results = run_threads(lambda group, n=starts: run(group, plan, (Flaky(1, n),), timeout_s=0.5), RANKS, errors=True)
        ended = [isinstance(result, TransferError) for result in results]
        assert all(ended) or not any(ended), results
        outcomes.add(all(ended))
    assert outcomes == {True, False}


def test_after_the_only_way_home_is_gone_later_plans_run_at_home():
    forward, update = by_peer(a_plan(ranks=RANKS, stage="recompute")), by_peer(a_plan(ranks=RANKS))

    def two_plans(group):
        buffers = ToyBuffers(forward, group.rank, num_buffers=8)
        engine = Engine(buffers, group=group, backends=(Flaky(1, 1),), timeout_s=0.5)
        engine.begin(forward)
        run_uses(engine, forward, group)
        assert engine.end().retired == ("Flaky",)
        fell_back, _ = run_plan(engine, update, group)
        engine.close()
        check_grads(update, buffers, fell_back=fell_back)
        return fell_back

    assert all(len(fell_back) == update.N for fell_back in run_threads(two_plans, RANKS))


def test_gradients_without_a_two_sided_backend_are_refused():
    plan = by_host(a_plan(ranks=RANKS))

    def refused(group):
        engine = Engine(ToyBuffers(plan, group.rank), group=group, backends=(PinnedHost(),))
        with pytest.raises(InputError, match="needs a two-sided backend"):
            engine.begin(plan)
        engine.close()

    run_threads(refused, RANKS)


def test_a_store_of_an_earlier_version_is_no_way_out():
    """The second plan sends nothing by host; when a copy fails, what the store still has of the first must not be used."""
    first, second = by_host(a_plan(ranks=RANKS, stage="recompute")), by_peer(a_plan(ranks=RANKS, stage="recompute"))

    def two_plans(group):
        buffers = ToyBuffers(first, group.rank)
        engine = Engine(buffers, group=group, backends=(PinnedHost(), Flaky(1, 1)), timeout_s=0.5)
        run_plan(engine, first, group)
        buffers.update(1)
        fell_back, _ = run_plan(engine, second, group, version=1)  # compares what slots hold
        engine.close()
        return fell_back

    assert any(run_threads(two_plans, RANKS))


def test_one_failed_pull_does_not_disable_a_backend_for_later_plans():
    plan = by_host(a_plan(ranks=RANKS, stage="recompute"))

    def two_plans(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(FlakyHost(1, 2, pulls_failing=1),), timeout_s=2.0)
        found = [run_plan(engine, plan, group)[0] for _ in range(2)]
        engine.close()
        return found

    for first, second in run_threads(two_plans, RANKS):
        assert first and not second


class Quits(Local):
    """Ends the program on rank 1 when the first copies start."""

    def start(self, copies):
        if self._rank == 1 and copies:
            raise SystemExit("no more")
        return super().start(copies)


def quits(group, plan):
    try:
        run(group, plan, (Quits(),), timeout_s=0.5)
    except BaseException as error:  # the harness would report it
        return type(error), str(error)


def test_whatever_ends_a_rank_in_a_transfer_ends_the_others():
    """They need not wait for the thirty seconds of their group."""
    plan = by_peer(a_plan(ranks=RANKS, micro_steps=3))
    first, (own, _), last = run_threads(quits, RANKS, plan)
    assert own is SystemExit
    for kind, text in (first, last):
        assert kind is TransferError and "rank 1: SystemExit: no more" in text, text


def killed(group, plan):
    buffers = ToyBuffers(plan, group.rank)
    engine = Engine(buffers, group=group, backends=(Collective(), PinnedHost()), timeout_s=5.0)
    engine.begin(plan)

    def kill(u):
        if group.rank == 1 and u == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    run_uses(engine, plan, group, on_use=kill)


def test_a_killed_rank_ends_the_others_without_a_hang():
    plan = a_plan(ranks=RANKS, micro_steps=3)
    results = run_processes(killed, RANKS, plan, errors=True, timeout_s=1200.0)
    for rank in (0, 2):
        assert isinstance(results[rank], TransferError), results[rank]
    assert any("rank 1" in str(results[rank]) for rank in (0, 2)), results


def test_a_hidden_optimizer_step_is_seen_in_debug():
    """A write that no version counter sees: replicas would keep the old weights while homes have the new ones."""
    plan = by_host(a_plan(ranks=RANKS, micro_steps=3, stage="recompute"))

    def hidden(group):
        buffers = ToyBuffers(plan, group.rank)
        engine = Engine(buffers, group=group, backends=(PinnedHost(),), debug=True)
        engine.begin(plan)
        run_uses(engine, plan, group)
        for tensors in buffers.homes.values():
            tensors[0].numpy()[:] += 1.0
        try:
            engine.end()
        finally:
            engine.close()

    errors = run_threads(hidden, RANKS, errors=True)
    assert any(isinstance(error, StaleWeights) for error in errors)
    assert all(isinstance(error, TransferError) and "changed after the plan began" in str(error) for error in errors)
