"""Dispatch and combine: every pair reaches its slot, and backward is the transpose of forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from foremoe.distributed.group import Group
from foremoe.runtime.dispatch import Combine, Counts, Dispatch, Route, exchange_counts
from foremoe.testing.ranks import get_pool, run_threads

# Letters: T tokens, K top-k, H hidden size, S slots per rank, Y pairs that a rank serves.


def routed(group: Group, slot_TK: torch.Tensor, num_slots: int, complete: bool = True) -> tuple[Counts, Route]:
    counts = exchange_counts(slot_TK.reshape(-1), num_slots, group, complete)
    return counts, Route.of(slot_TK, counts)


def there_and_back(group: Group, slots: list[torch.Tensor], num_slots: int) -> dict[str, Any]:
    """Each token's row names its rank and number, so that a row in the wrong place shows."""
    slot_TK = slots[group.rank]
    T, K = slot_TK.shape
    x_TH = torch.stack([torch.full((T,), float(group.rank)), torch.arange(T).double()], dim=1).double().requires_grad_()
    anchor = torch.zeros((), requires_grad=True)
    counts, route = routed(group, slot_TK, num_slots)
    x_YH = Dispatch.apply(x_TH, anchor, route.by_token_Z, route.by_arrival_Y, route, lambda: None)
    slot_Y = torch.repeat_interleave(torch.arange(num_slots), torch.tensor(counts.num_S))
    # A different linear map in every slot of every rank: y = (1 + slot) * x.
    factor_Y = 1.0 + group.rank * num_slots + slot_Y
    scale_TK = torch.arange(1.0, T * K + 1).view(T, K).double().requires_grad_()
    y_TH = Combine.apply(x_YH * factor_Y[:, None], scale_TK, route.by_slot_Z, route.by_slot_Y, route)
    y_TH.sum().backward()
    found = {"y_TH": y_TH.detach(), "grad": x_TH.grad, "grad_scale": scale_TK.grad, "x_TH": x_TH.detach()}
    return {"x_YH": x_YH.detach(), "counts": counts.num_S} | found


def check(slots: list[torch.Tensor], num_slots: int, results: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(results):
        served = [
            [float(source), float(t)]
            for s in range(num_slots)
            for source, slot_TK in enumerate(slots)
            for t, k in (slot_TK == rank * num_slots + s).nonzero().tolist()
        ]
        assert result["x_YH"].tolist() == served
        assert result["counts"] == [sum(int((x == rank * num_slots + s).sum()) for x in slots) for s in range(num_slots)]
        T, K = slots[rank].shape
        factor_TK, scale_TK = 1.0 + slots[rank].double(), torch.arange(1.0, T * K + 1).view(T, K).double()
        weight_T1 = (scale_TK * factor_TK).sum(1, keepdim=True)  # whole numbers, so that no sum is rounded
        assert torch.equal(result["y_TH"], result["x_TH"] * weight_T1)
        assert torch.equal(result["grad"], weight_T1.expand(T, 2))
        assert torch.equal(result["grad_scale"], result["x_TH"].sum(1, keepdim=True) * factor_TK)


@given(st.data())
@examples(25)
def test_every_pair_reaches_its_slot_and_returns(data: st.DataObject) -> None:
    G, S, K = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32 - 1)))
    num_tokens = data.draw(st.lists(st.sampled_from([0, 1, 7]), min_size=G, max_size=G))
    slots = [torch.randint(G * S, (T, K), generator=generator) for T in num_tokens]
    check(slots, S, run_threads(there_and_back, G, slots, S))


@pytest.mark.parametrize("num_tokens", [(3, 5), (0, 4), (0, 0)])
def test_on_processes(num_tokens: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    slots = [torch.randint(4, (T, 2), generator=generator) for T in num_tokens]
    check(slots, 2, get_pool(2).run(there_and_back, slots, 2, num_ranks=2))


def test_all_ranks_learn_that_one_is_incomplete() -> None:
    def complete(group: Group, bad: int) -> bool:
        return exchange_counts(torch.zeros(3, dtype=torch.int64), 2, group, group.rank != bad).complete

    assert run_threads(complete, 3, -1) == [True] * 3
    for bad in range(3):
        assert run_threads(complete, 3, bad) == [False] * 3


def test_a_rank_whose_tokens_need_no_gradient_takes_part_in_backward() -> None:
    def run(group: Group) -> torch.Tensor | None:
        x_TH = torch.ones(2, 3, requires_grad=group.rank == 0)
        anchor = torch.zeros((), requires_grad=True)
        _, route = routed(group, torch.tensor([[0], [1]]), 1)
        x_YH = Dispatch.apply(x_TH, anchor, route.by_token_Z, route.by_arrival_Y, route, lambda: None)
        (x_YH * (group.rank + 1)).sum().backward()
        assert anchor.grad is None
        return x_TH.grad

    grads = run_threads(run, 2)
    assert grads[1] is None and grads[0].tolist() == [[1.0] * 3, [2.0] * 3]
