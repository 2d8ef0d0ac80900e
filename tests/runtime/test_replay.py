"""Rows whose routing is known when the stage begins: the same bits without sorting, count exchanges and host reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operations import Work
from profiles import examples
from stage_util import Case, a_case, expected_counts, make_bank, on_host, prepare_device, run_case, run_passes
from test_equality import busy_cases, cases
from test_fall_back import Pulls
from test_products import BySlot

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group
from foremoe.runtime import Runtime
from foremoe.runtime.dispatch import Route, exchange_counts
from foremoe.runtime.remap import remap
from foremoe.runtime.replay import ReplayedRows
from foremoe.testing.ranks import get_pool, run_threads
from foremoe.transfer.local import Local

# Letters: M micro-steps, L layers, G ranks, S slots of a rank, T tokens, K top-k, P physical slots, Z pairs.

Rows = frozenset[tuple[int, int, int]]  # (micro-step, layer, rank) whose routing is not known


def routing_of(case: Case, rank: int, unknown: Rows = frozenset()) -> dict[tuple[int, int], torch.Tensor]:
    return {(m, layer): topk for (m, layer, g), topk in case.topk.items() if g == rank and (m, layer, g) not in unknown}


def run_known(group: Group, case: Case, unknown: Rows = frozenset(), backends: Any = ("local",), routing: Any = None) -> Any:
    """As `run_case`, with known routing; also how many exchanges carried counts."""
    prepare_device(group)
    bank, sizes = make_bank(case, group.rank, group.size), []
    routing = routing_of(case, group.rank, unknown) if routing is None else routing
    with Runtime(
        bank, group=group, backends=backends(group.rank) if callable(backends) else backends, timeout_s=20.0, debug=True
    ) as runtime:
        runtime.begin(case.plan, case.split(group.rank), routing=routing)
        all_to_all = group.all_to_all
        group.all_to_all = lambda got, sent, *sizes_G: (sizes.append(sent.dtype), all_to_all(got, sent, *sizes_G))  # type: ignore[method-assign]
        results = run_passes(case, group.rank, runtime.moe)
        group.all_to_all = all_to_all  # type: ignore[method-assign]
        report = runtime.end()
        return results, on_host(bank.gather(group, gradients=True)), report, sizes.count(torch.int64)


def assert_same_bits(ranks: list[Any], expected: list[Any]) -> None:
    for (results, grads, report, _), (other, other_grads, other_report) in zip(ranks, expected, strict=True):
        for part, other_part in ((grads, other_grads), *((results[kind], other[kind]) for kind in other)):
            assert part.keys() == other_part.keys() and all(torch.equal(part[key], other_part[key]) for key in part)
        assert (report.served_MLS == other_report.served_MLS).all() and (report.drift_ML == other_report.drift_ML).all()


def sizes(route: Route) -> tuple[list[int], list[int]]:
    return route.exchange.num_sent_G, route.exchange.num_received_G


def unplanned_rows(case: Case) -> np.ndarray:
    """bool [M, L]: some rank's routing has other counts than were planned."""
    work_MLG = expected_counts(case)[1]
    num_pairs = {key: topk.numel() for key, topk in case.topk.items()}
    short_MLG = [num_pairs[key] < case.load_MLGE[key].sum() for key in np.ndindex(work_MLG.shape)]
    return (work_MLG.any(2)) | np.reshape(short_MLG, work_MLG.shape).any(2)


@pytest.mark.heavy
@given(busy_cases(), st.data())
@examples(25)
def test_known_rows_compute_the_same_bits_and_exchange_no_counts(case: Case, data: st.DataObject) -> None:
    unknown = data.draw(st.frozensets(st.sampled_from(sorted(case.topk)), max_size=2))
    ranks = run_threads(run_known, case.plan.G, case, unknown)
    assert_same_bits(ranks, run_threads(run_case, case.plan.G, case))
    assert not unplanned_rows(case).any()
    exchanged = {(m, layer) for m, layer, _ in unknown}
    passes = 2 if case.mode != "kept" else 1  # forward, and with checkpointing once more
    assert {num for *_, num in ranks} == {passes * len(exchanged)}


@pytest.mark.heavy
@given(busy_cases(unplanned=0.05))
@examples(15)
def test_rows_with_drift_exchange_counts_on_all_ranks(case: Case) -> None:
    ranks = run_threads(run_known, case.plan.G, case)
    assert_same_bits(ranks, run_threads(run_case, case.plan.G, case))
    passes = 2 if case.mode != "kept" else 1
    assert {num for *_, num in ranks} == {passes * int(unplanned_rows(case).sum())}


@pytest.mark.heavy
@given(busy_cases(unplanned=0.1, dropped=0.2, max_ranks=3))
@examples(5)
def test_on_processes(case: Case) -> None:
    ranks = get_pool(3).run(run_known, case, frozenset(), ("collective",), num_ranks=case.plan.G)
    assert_same_bits(ranks, get_pool(3).run(run_case, case, ("collective",), num_ranks=case.plan.G))


@given(cases())
@examples(30)
def test_routes_are_those_of_remapping_and_an_exchange(case: Case) -> None:
    """Permutation by permutation, with several slots of an expert on a rank, empty slots, and sources without tokens."""
    plan = case.plan

    def run(group: Group) -> None:
        split_MLP, home_LE = case.split(group.rank), plan.home_LE // plan.B * plan.S + plan.home_LE % plan.B
        received_GMLS = np.stack([x.reshape(plan.M, plan.L, plan.G, plan.S)[:, :, group.rank] for x in group.gather(split_MLP)])
        known = routing_of(case, group.rank)
        rows = ReplayedRows(
            known, plan.expert_MLGS, split_MLP, received_GMLS, num_experts=plan.E, group=group, device=torch.device("cpu")
        )
        for (m, layer), topk_TK in known.items():
            tables = (split_MLP[m, layer], plan.expert_MLGS[m, layer].ravel(), home_LE[layer])
            slot_TK, _ = remap(topk_TK, *(torch.from_numpy(np.array(table)) for table in tables))
            expected = Route.of(slot_TK, exchange_counts(slot_TK.reshape(-1), plan.S, group, True))
            found = rows.route(m, layer, topk_TK.shape)
            assert found is not None and torch.equal(found[0], topk_TK)
            route = found[1]
            assert route.num_S == expected.num_S and sizes(route) == sizes(expected)
            for name in ("end_S", "by_slot_Z", "by_token_Z", "by_slot_Y", "by_arrival_Y"):
                assert torch.equal(getattr(route, name).long(), getattr(expected, name)), name

    run_threads(run, plan.G)


def slot_path(group: Group, case: Case, known: bool) -> tuple[int, int, int, int]:
    """Operations, sorts, host reads and messages of a layer's forward besides its experts, which here do nothing."""
    bank = make_bank(case, group.rank, 2, Nothing())
    messages, all_to_all = [], group.all_to_all
    with Runtime(bank, group=group, backends=("local",)) as runtime:
        runtime.begin(case.plan, case.split(group.rank), routing=routing_of(case, group.rank) if known else None)
        group.all_to_all = lambda *args: (messages.append(args), all_to_all(*args))  # type: ignore[method-assign]
        with Work() as work, work.reads:
            runtime.moe(0, case.x[0, 0, group.rank], case.topk[0, 0, group.rank], case.weight[0, 0, group.rank])
        group.all_to_all = all_to_all  # type: ignore[method-assign]
        return work.num, work.num_sorts, work.reads.num, len(messages)


class Nothing:
    """Experts that give back what they get: one operation a slot, which copies."""

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        return {"none": (1,)}

    def forward(self, x_NH: torch.Tensor, weights: Any) -> Any:
        return x_NH, ()


def test_a_known_row_costs_no_sort_no_host_read_and_no_count_exchange() -> None:
    case = a_case("recompute")
    (num, num_sorts, num_reads, num_messages), _ = run_threads(slot_path, 2, case, True)
    (num_found, *found), _ = run_threads(slot_path, 2, case, False)
    assert (num_sorts, num_reads, num_messages) == (0, 0, 2)
    assert num <= 18 and num_found >= 2 * num
    assert found[0] >= 1 and found[1] >= 1 and found[2] == 3


def whole_layer(group: Group, case: Case, math: Any) -> list[tuple[int, int]]:
    """Operations and waits of a layer whose routing is known, with its experts: forward and backward; without the copies of
    messages, which either rank may make, at any time."""
    bank, g = make_bank(case, group.rank, 2, math), group.rank
    with Runtime(bank, group=group, backends=("local",)) as runtime:
        runtime.begin(case.plan, case.split(g), routing=routing_of(case, g))
        x_TH, weight_TK = (values[0, 0, g].clone().requires_grad_() for values in (case.x, case.weight))
        with Work() as forward, forward.reads:
            y_TH = runtime.moe(0, x_TH, case.topk[0, 0, g], weight_TK)
        runtime.moe(1, case.x[0, 0, g], case.topk[0, 1, g], case.weight[0, 1, g]).sum().backward()
        with Work() as backward, backward.reads:
            y_TH.backward(case.coefficient[0, 0, g])
        return [(work.num - work.num_copies, work.num_waits + work.reads.num) for work in (forward, backward)]


def test_a_known_layer_takes_few_operations_and_waits_for_nothing() -> None:
    """16 experts and a replica on rank 1, in float32."""
    case = a_case(base=16, dtype=torch.float32)
    run_threads(whole_layer, 2, case, None)  # torch is asked once what it can do
    ranks = run_threads(whole_layer, 2, case, None)
    (forward, forward_waits), (backward, backward_waits) = ranks[1]
    assert forward <= 17 and backward <= 62 and forward_waits == backward_waits == 0
    (loop_forward, _), (loop_backward, _) = run_threads(whole_layer, 2, case, BySlot())[1]
    assert loop_forward > 4 * forward and loop_backward > 3 * backward
    more = run_threads(whole_layer, 2, a_case(base=64, dtype=torch.float32), None)
    for phase, num_more in enumerate((0, 2 * 2 * 48)):
        assert sum(rank[phase][0] for rank in more) == sum(rank[phase][0] for rank in ranks) + num_more
    assert [waits for rank in more for _, waits in rank] == [0] * 4


def test_other_routing_than_was_known_is_an_error() -> None:
    case = a_case("recompute")

    def run(group: Group, changed: torch.Tensor) -> None:
        routing = routing_of(case, group.rank)
        if group.rank == 1:
            routing[1, 0] = changed
        run_known(group, case, routing=routing)

    topk_TK = case.topk[1, 0, 1]
    other_TK = topk_TK.flip(0)
    num = int((other_TK != topk_TK).sum())
    wrong = run_threads(run, 2, other_TK, errors=True)[1]
    assert isinstance(wrong, InputError)
    assert f"{num} pairs of micro-step 1, layer 0 differ from the experts" in str(wrong)
    short = run_threads(run, 2, topk_TK.view(1, -1), errors=True)[1]
    assert isinstance(short, InputError) and "and was given [1, " in str(short)


@pytest.mark.parametrize(
    ("row", "value", "message"),
    [((2, 0), torch.zeros(1, 1, dtype=torch.int8), "has the row (2, 0)"), ((0, 0), torch.zeros(3), "must be integers")],
)
def test_routing_that_fits_no_plan_is_refused_on_all_ranks(row: Any, value: torch.Tensor, message: str) -> None:
    case = a_case("recompute")

    def run(group: Group) -> None:
        run_known(group, case, routing={row: value} if group.rank == 1 else {})

    for error in run_threads(run, 2, errors=True):
        assert isinstance(error, InputError) and f"rank 1: routing {message}" in str(error).replace(" of (0, 0)", "")


def test_a_known_row_without_its_replica_ends_the_step_on_all_ranks() -> None:
    case = a_case("recompute")
    backends = lambda rank: [Pulls(frozenset({1})), Local()]  # noqa: E731
    for error in run_threads(run_known, 2, case, frozenset(), backends, errors=True, timeout_s=5.0):
        assert isinstance(error, TransferError) and "is missing, and its routing was known" in str(error)
