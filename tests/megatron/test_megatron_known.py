"""Rows whose routing is known before the stage: nothing is counted, and what differs from it is never trained on."""

import os

import compare
import cpu
import program_arms as arms
import pytest
import slot_path
import torch
from layouts import Case, few
from logged import logged
from megatron.core.transformer.moe.moe_utils import permute
from program import Layout, Program
from test_megatron_faults import ByHost, FlakyHost

from foremoe.base.errors import InputError
from foremoe.integrations.megatron.known_rows import KnownDispatcher
from foremoe.planner.planner import Planner
from foremoe.testing.ranks import RankDied, run_processes
from foremoe.transfer.collective import Collective

PLAIN = Case(2, Layout())
# Later versions of Megatron's all-to-all dispatcher take every token to have K experts, and fail where it has one of them twice.
REPEATS = len(permute(torch.ones(1, 1), torch.tensor([[True, False]]), num_out_tokens=2)[0]) == 1


def test_a_known_row_neither_sorts_nor_counts_nor_waits(pool):
    """Operations, sorts, gathers between ranks and host waits, from the router's map to the slots and back."""
    for found, same in pool.run(slot_path.counts, num_ranks=2):
        assert same
        (num, *known), (num_counted, *counted) = found[slot_path.KNOWN], found[slot_path.COUNTED]
        assert num <= 25 and known == [0, 0, 0]  # 21 on the rank without a replica
        assert num_counted >= 2 * num and counted[1] == 1 and counted[2] >= 8
        assert num < found[slot_path.ALONE][0]  # less than Megatron does without foremoe
        num_holed, *holed = found[slot_path.HOLED]
        assert num_holed <= num + 10 and holed == [0, 0, 0]


def stages(group, case, works, routings, **options):
    """Losses, rows that went by known routes, drift and errors of updates, one of each work and routing; and losses without.

    Args:
        options: of `attach`.
    """
    program, found, alone = Program(case.layout), [], []
    with cpu.steady_rows():
        for topk_MTLK in routings:
            program.zero()
            alone.append(program.forward_backward(0, topk_MTLK))
        with arms.attached(program, case, **options) as moe:
            for work, topk_MTLK in zip(works, routings, strict=True):
                program.zero()
                try:
                    with moe.stage(work):
                        losses = program.forward_backward(0, topk_MTLK)
                    found.append((losses, moe.report.known_rows, moe.report.drift_ML.sum(), ""))
                except InputError as error:
                    found.append(([], moe.report.known_rows, 0, str(error)))
    return found, alone


def one_that_changes(group, case):
    """Stages of one routing, and one in which the routers of rank 1 do otherwise."""
    program = Program(case.layout)
    own, other = program.routing(0), program.routing(0, seed=7)
    if group.rank == 0:
        other = own
    work = [topk_TLK.numpy() for topk_TLK in own]
    return stages(group, case, [work] * 4, [own, own, other, own])


def test_routers_that_differ_end_the_step_on_all_ranks_and_the_next_one_counts(pool):
    for found, alone in pool.run(one_that_changes, PLAIN, num_ranks=2):
        counted, known, wrong, again = found
        num_rows = PLAIN.layout.M * PLAIN.layout.num_layers
        assert counted == (alone[0], 0, 0, "") and known == (alone[1], num_rows, 0, "") and again == (alone[3], 0, 0, "")
        assert "rank 1: " in wrong[3] and "differ from the experts given before the stage" in wrong[3]
        assert "the next stage counts" in wrong[3]


def always_another(group, case):
    program = Program(case.layout)
    own, other = program.routing(0), program.routing(0, seed=7)
    with logged() as said:
        answers = stages(group, case, [[topk_TLK.numpy() for topk_TLK in own]] * 3, [other if group.rank else own] * 3)
    return answers, [record.getMessage() for record in said]


def test_routers_that_always_differ_are_served_and_never_trusted(pool):
    answers, said = zip(*pool.run(always_another, PLAIN, num_ranks=2), strict=True)
    assert [len(texts) for texts in said] == [1, 0] and "count and sort every row" in said[0][0] and "rank 1: " in said[0][0]
    for found, alone in answers:
        assert [(losses, known, error) for losses, known, _, error in found] == [(losses, 0, "") for losses in alone]
    assert all(drift > 0 for _, _, drift, _ in answers[1][0])


def in_another_order(group, case):
    """`work` has the rows of a batch sequence by sequence, layers token by token; warnings, and metrics of two stages."""
    program, metrics = Program(case.layout), []
    own = program.routing(0)
    by_sequence = own.unflatten(1, (case.layout.sequence, case.layout.batch)).transpose(1, 2).flatten(1, 2)
    with logged() as said, arms.attached(program, case) as moe:
        for _ in range(2):
            program.zero()
            with moe.stage([topk_TLK.numpy() for topk_TLK in by_sequence]):
                program.forward_backward(0, own)
            metrics.append(moe.metrics())
    return [record.getMessage() for record in said], metrics


def test_rows_in_another_order_are_told_of_once_with_the_likely_causes(pool):
    for rank, (said, (first, later)) in enumerate(pool.run(in_another_order, PLAIN, num_ranks=2)):
        assert len(said) == (rank == 0)
        if said:
            assert "of micro-step 0, layer 0" in said[0] and "token 1 first" in said[0]
            assert "sequence-first" in said[0] and "padding that layers do not receive" in said[0]
        num_rows = PLAIN.layout.M * PLAIN.layout.num_layers
        assert first["counted/first"] == num_rows and first["drift"] == 0
        assert later["counted/differs"] == num_rows and later["known_rows"] == 0


def reasons(group, case, asked):
    """Returns the reasons for counted rows in two stages, for each of some options of `attach`."""
    program = Program(case.layout)
    own = program.routing(0)
    work = [topk_TLK.numpy().copy() for topk_TLK in own]
    work[1][:3, 0, 0] = -1
    return [reasons_with(program, case, own, work, options, workload) for options, workload, _ in asked]


def reasons_with(program, case, own, work, options, workload):
    found = []
    with arms.attached(program, case, **options) as moe:
        for _ in range(2):
            planned = moe.plan(work, "recompute")
            given = (planned.plan, {"split_MLP": planned.split_MLP}) if workload else (work, {})
            with moe.stage(given[0], "recompute", **given[1]):
                program.forward_backward(0, own, forward_only=True)
            metrics = moe.metrics()
            counted = {name.partition("/")[2]: int(n) for name, n in metrics.items() if name.startswith("counted/") and n}
            found.append((int(metrics["known_rows"]), counted, metrics["route_bytes"]))
    return found


WHY = [  # options of attach, whether a workload is given, and known rows and reasons of the second stage
    ({}, False, (8, {})),
    ({"spare": 3}, False, (8, {})),
    ({"spare": 2}, False, (7, {"unknown": 1})),
    ({"route_bytes": 1}, False, (0, {"memory": 8})),
    ({"route_bytes": 4000}, False, (3, {"memory": 5})),
    ({}, True, (0, {"untold": 8})),
]


def test_why_rows_count_is_in_the_metrics(pool):
    for answers in pool.run(reasons, PLAIN, WHY, num_ranks=2):
        for (options, _, second), (first, found) in zip(WHY, answers, strict=True):
            assert found[:2] == second and found[2] <= options.get("route_bytes", 2**20), options
            num_counted = sum(second[1].values())
            assert first[:2] == (0, {**second[1]} | ({"first": 8 - num_counted} if num_counted < 8 else {})), options


def partly_known(group, case, spare):
    """A token of rank 1 in micro-step 1, layer 0 is not known."""
    program = Program(case.layout)
    own = program.routing(0)
    work = [topk_TLK.numpy().copy() for topk_TLK in own]
    if group.rank:
        work[1][3, 0, 0] = -1
    return stages(group, case, [work] * 2, [own] * 2, spare=spare)


def test_rows_with_more_unknown_tokens_than_spare_places_count_and_the_others_do_not(pool):
    for spare, lack in ((0, 1), (1, 0)):
        answers = pool.run(partly_known, PLAIN, spare, num_ranks=2)
        for found, alone in answers:
            assert [losses for losses, *_ in found] == alone
            assert [known for _, known, _, _ in found] == [0, PLAIN.layout.M * PLAIN.layout.num_layers - lack]
        assert [[drift for _, _, drift, _ in found] for found, _ in answers] == [[0, 0], [1, 1]]


@pytest.mark.parametrize("case", few(1, ("grid", "tp", "recompute", "experts")), ids=str)
@pytest.mark.parametrize(("unknown", "padded"), [(0, 1), (2, 1)] if REPEATS else [(2, 0)])
def test_known_rows_with_holes_equal_the_program_without_foremoe(pool, case, unknown, padded):
    """The last tokens of every sequence are not known, the first ones have one expert twice, as trainers' padding has."""
    for rank, verdict in enumerate(pool.run(holed, case, unknown, padded, num_ranks=case.num_ranks)):
        assert verdict.equal and verdict.as_expected and verdict.fell_back == 0, (rank, verdict)
        assert verdict.known == (0, verdict.skew_ML[1].size) and (verdict.drift > 0) == (unknown > 0)
        assert verdict.replicas > 0


def holed(group, case, unknown, padded):
    return compare.one_step(group, case, unknown=unknown, padded=padded)


def loses_a_replica(group, case):
    """What rank 1 leaves word of when its host store fails in a stage whose routing is known; its process ends then."""
    host, program = FlakyHost(10**9, 0), Program(case.layout)
    topk_MTLK = program.routing(0)
    work = [topk_TLK.numpy() for topk_TLK in topk_MTLK]
    with arms.attached(program, case, planner=Planner(path=ByHost()), backends=(host, Collective()), timeout_s=20.0) as moe:
        with moe.stage(work, "recompute"):
            program.forward_backward(0, topk_MTLK, forward_only=True)
        host.pulls, host.failing = 0, 10**9
        try:
            with moe.stage(work, "recompute"):
                program.forward_backward(0, topk_MTLK, forward_only=True)
        except Exception:
            if group.rank == 1:
                os._exit(3)
            return moe.group._roll.reports()[1]


def test_a_known_row_without_its_replica_ends_the_step():
    told, ended = run_processes(loses_a_replica, 2, PLAIN, timeout_s=30.0, errors=True)
    assert isinstance(ended, RankDied)
    assert "TransferError" in told and "is missing, and its routing was known" in told


def swapped(group, case):
    """One step compared with the program alone, if tokens of the first two micro-steps go by each other's routes."""
    preprocess, rows = KnownDispatcher.dispatch_preprocess, []

    def other_row(self, *args):
        rows.append(self.row)
        self.row = rows[-2] if len(rows) % 2 == 0 else self.row
        return preprocess(self, *args)

    KnownDispatcher.dispatch_preprocess = other_row
    try:
        return compare.one_step(group, case)
    finally:
        KnownDispatcher.dispatch_preprocess = preprocess


def test_a_wrong_route_shows_in_losses(pool):
    assert all(verdict.loss > 1e-4 for verdict in pool.run(swapped, Case(2, Layout(num_layers=1)), num_ranks=2))


def by_a_plan(group, case):
    """Rows that went by known routes in two stages that were given a plan and its split."""
    program, known = Program(case.layout), []
    topk_MTLK = program.routing(0)
    with arms.attached(program, case) as moe:
        planned = moe.plan([topk_TLK.numpy() for topk_TLK in topk_MTLK], "recompute")
        for _ in range(2):
            with moe.stage(planned.plan, "recompute", split_MLP=planned.split_MLP):
                program.forward_backward(0, topk_MTLK, forward_only=True)
            known.append(moe.report.known_rows)
    return known


def test_stages_without_routing_by_token_count(pool):
    assert pool.run(by_a_plan, PLAIN, num_ranks=2) == [[0, 0]] * 2
