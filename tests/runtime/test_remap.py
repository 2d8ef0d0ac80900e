"""Remapping meets quotas exactly, in token order, and sends the rest home."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from foremoe.distributed.group import ThreadGroup
from foremoe.runtime import remap
from foremoe.runtime.dispatch import exchange_counts
from foremoe.runtime.remap import DenseIntervals, Intervals, remap_dense, remap_dense_planned, remap_planned

# Letters: T tokens, K top-k, E experts, P physical slots, G ranks, S slots per rank.


def slow_remap(topk_TK: list[list[int]], split_P: list[int], expert_P: list[int], home_slot_E: list[int]) -> tuple[list, int]:
    """What `remap` promises, pair by pair."""
    left_P, slot_TK, num_drift = list(split_P), [], 0
    for topk_K in topk_TK:
        slot_TK.append([])
        for e in topk_K:
            p = next((p for p in range(len(left_P)) if expert_P[p] == e and left_P[p] > 0), -1)
            if p < 0:
                p, num_drift = home_slot_E[e], num_drift + 1
            else:
                left_P[p] -= 1
            slot_TK[-1].append(p)
    return slot_TK, num_drift


INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


@st.composite
def calls(draw: st.DrawFn) -> tuple[torch.Tensor, list[int], list[int], list[int]]:
    """Any placement with every expert at home somewhere: replicas, several slots of an expert, empty slots, splits of nothing."""
    E, extra = draw(st.integers(1, 6)), draw(st.integers(0, 6))
    expert_P = draw(st.permutations([*range(E), *draw(st.lists(st.integers(-1, E - 1), min_size=extra, max_size=extra))]))
    home_slot_E = [draw(st.sampled_from([p for p, x in enumerate(expert_P) if x == e])) for e in range(E)]
    split_P = [draw(st.integers(0, 5)) if e >= 0 else 0 for e in expert_P]
    T, K = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    topk = draw(st.lists(st.integers(0, E - 1), min_size=T * K, max_size=T * K))
    return torch.tensor(topk, dtype=draw(st.sampled_from(INTEGERS))).view(T, K), split_P, expert_P, home_slot_E


@given(calls(), st.sampled_from(INTEGERS[1:]))
def test_every_pair_goes_where_the_slow_reference_sends_it(call: tuple, dtype: torch.dtype) -> None:
    topk_TK, *tables = call
    slot_TK, num_drift = remap(topk_TK, *(torch.tensor(table, dtype=dtype) for table in tables))
    assert slot_TK.dtype == num_drift.dtype == torch.int64 and num_drift.dim() == 0
    assert slot_TK.shape == topk_TK.shape
    assert (slot_TK.tolist(), int(num_drift)) == slow_remap(topk_TK.tolist(), *tables)


def test_numbers_that_are_no_experts_get_no_slot() -> None:
    """On a GPU the host does not look at them: what the device does next with them must fail."""
    tables = [torch.tensor(table) for table in ([0, 2, 1], [0, 1, 0], [0, 1])]
    slot_TK, _ = remap(torch.tensor([[-1, 0], [1, -7]]), *tables)
    assert slot_TK.tolist() == [[-1, 2], [1, -1]]
    with pytest.raises(IndexError):
        remap(torch.tensor([[2]]), *tables)
    with pytest.raises(RuntimeError, match="out of bounds"):
        exchange_counts(slot_TK.reshape(-1), 3, ThreadGroup.of(1)[0], True)


@given(st.lists(calls(), min_size=1, max_size=3), st.integers(1, 4))
def test_rows_whose_intervals_were_made_together_go_the_same_way(rows: list, layers: int) -> None:
    """Rows of other sizes are padded: with slots that hold nothing, and experts that nobody asks for."""
    P, E = max(len(row[2]) for row in rows), max(len(row[3]) for row in rows)
    pad = lambda values, num, fill: [*values, *[fill] * (num - len(values))]  # noqa: E731
    split_XP, expert_XP = (torch.tensor([[pad(row[i], P, f)] * layers for row in rows]) for i, f in ((1, 0), (2, -1)))
    home_XE = torch.tensor([[pad(row[3], E, 0)] * layers for row in rows])
    sparse, dense = Intervals.of(split_XP, expert_XP, home_XE), DenseIntervals.of(split_XP, expert_XP, home_XE)
    for m, (topk_TK, *tables) in enumerate(rows):
        slot_TK, num_drift = remap_planned(topk_TK, sparse.row(m, layers - 1))
        assert (slot_TK.tolist(), int(num_drift)) == slow_remap(topk_TK.tolist(), *tables)
        routing_TE = torch.zeros(len(topk_TK), E, dtype=torch.bool).scatter_(1, topk_TK.long(), True)
        own, own_drift = remap_dense(routing_TE[:, : len(tables[2])], *map(torch.tensor, tables))
        together, drift = remap_dense_planned(routing_TE, dense.row(m, layers - 1))
        assert torch.equal(together[:, : own.shape[1]], own) and not together[:, own.shape[1] :].any() and drift == own_drift


class Operations(TorchDispatchMode):
    """Counts operations on elements."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


def test_a_row_of_a_stage_costs_no_operation_that_the_plan_alone_decides() -> None:
    topk_TK, tables = (
        torch.arange(24).view(12, 2) % 4,
        [torch.tensor(x) for x in ([3, 3, 9, 3, 6], [0, 1, 2, 3, 0], [0, 1, 2, 3])],
    )
    routing_TE = torch.zeros(12, 4, dtype=torch.bool).scatter_(1, topk_TK, True)
    sparse, dense = Intervals.of(*tables), DenseIntervals.of(*tables)
    for expected, alone, staged in (
        (12, lambda: remap(topk_TK, *tables), lambda: remap_planned(topk_TK, sparse)),
        (16, lambda: remap_dense(routing_TE, *tables), lambda: remap_dense_planned(routing_TE, dense)),
    ):
        with Operations() as before:
            alone()
        with Operations() as after:
            staged()
        assert after.num <= expected and before.num >= 36


@given(calls(), st.integers(0, 2**32 - 1), st.sampled_from(INTEGERS[1:]))
def test_routing_by_yes_and_no_goes_to_the_same_slots(call: tuple, seed: int, dtype: torch.dtype) -> None:
    """Any number of experts per token, none and all of them included."""
    topk_TK, split_P, expert_P, home_slot_E = call
    T, E = len(topk_TK), len(home_slot_E)
    routing_TE = torch.rand(T, E, generator=torch.Generator().manual_seed(seed)) < 0.5
    token_Z, expert_Z = routing_TE.nonzero(as_tuple=True)
    tables = [torch.tensor(table, dtype=dtype) for table in (split_P, expert_P, home_slot_E)]
    slot_Z1, num_drift = remap(expert_Z[:, None], *tables)
    expected_TP = torch.zeros(T, len(expert_P), dtype=torch.bool)
    expected_TP[token_Z, slot_Z1[:, 0]] = True
    routing_TP, dense_drift = remap_dense(routing_TE, *tables)
    assert routing_TP.dtype == torch.bool and dense_drift.dtype == torch.int64 and dense_drift.dim() == 0
    assert torch.equal(routing_TP, expected_TP) and dense_drift == num_drift
    assert torch.equal(routing_TP.sum(1), routing_TE.sum(1))


class Scans(TorchFunctionMode):
    """Notes every running sum that does not go along adjacent memory."""

    def __init__(self) -> None:
        super().__init__()
        self.num, self.outer = 0, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if "cumsum" in getattr(func, "__name__", ""):
            values, axis = args[0], (kwargs or {}).get("dim", args[1] if len(args) > 1 else None)
            self.num += 1
            if values.stride(axis) != 1:
                self.outer.append((func.__name__, list(values.shape), axis))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("function", [remap, remap_dense])
def test_running_sums_go_along_adjacent_memory(function: Callable) -> None:
    """On a GPU one across rows has one thread per column, however many rows there are."""
    routing_TE = torch.rand(64, 8, generator=torch.Generator().manual_seed(0)) < 0.5
    tables = [torch.tensor(table) for table in ([30, 2] * 8, [*range(8), *range(8)], [*range(8)])]
    with Scans() as scans:
        slots, _ = function(routing_TE.nonzero()[:, 1:] if function is remap else routing_TE, *tables)
    assert scans.num >= 2 and not scans.outer
    assert slots.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_many_tokens(dtype: torch.dtype) -> None:
    """A size at which a loop over tokens or experts in Python would be felt."""
    E, S, G, T, K = 128, 4, 64, 8192, 8
    generator = torch.Generator().manual_seed(0)
    topk_TK = torch.rand(T, E, generator=generator).topk(K).indices.to(dtype)
    expert_P = torch.full((G, S), -1)
    expert_P[:, :2] = torch.arange(E).view(G, 2)
    expert_P[:, 2] = torch.randint(E, (G,), generator=generator)
    split_P = torch.where(expert_P >= 0, torch.randint(0, 600, (G, S), generator=generator), 0).view(-1)
    home_slot_E = torch.arange(E) // 2 * S + torch.arange(E) % 2
    slot_TK, num_drift = remap(topk_TK, split_P, expert_P.view(-1), home_slot_E)
    assert (expert_P.view(-1)[slot_TK] == topk_TK).all()
    occurs_E = torch.bincount(topk_TK.view(-1).long(), minlength=E)
    planned_E = torch.zeros(E + 1, dtype=torch.int64).index_add_(0, expert_P.view(-1) % (E + 1), split_P)[:E]
    assert num_drift == (occurs_E - planned_E).clamp(min=0).sum()
