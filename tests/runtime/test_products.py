"""Experts of all slots at once compute the bits of the loop over slots, in a number of operations that hardly knows of slots."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from operations import Work
from profiles import examples
from torch.nn import functional

from foremoe.base.errors import TransferError
from foremoe.problem.schedule import Phase
from foremoe.runtime import ExpertMath, SwiGLU, experts, products
from foremoe.runtime.experts import ComputeTime, GroupedExperts, Row, end_of_slots
from foremoe.runtime.products import SlotProducts
from foremoe.transfer.base import Tensors
from foremoe.transfer.residency import Residency

CPU = torch.device("cpu")
# Letters: S slots, B base slots, X buffers, Y pairs, H hidden size, F ffn size.

H, F = 16, 8


class BySlot(SwiGLU):
    """The same formula, which the runtime does not know and so gives one slot at a time."""


class Slots:
    """As a bank holds them: base slots in one memory, redundant ones in the buffers of another, None where they are empty."""

    def __init__(
        self, num_base: int, buffer_R: list[int | None], dtype: torch.dtype, sizes: tuple[int, int] = (H, F), seed: int = 0
    ) -> None:
        generator, self.shapes = torch.Generator().manual_seed(seed), tuple(SwiGLU().shapes(*sizes).values())

        def memory(num: int, dtype: torch.dtype) -> list[Tensors]:
            flat = (torch.randn(num, a * b, generator=generator) / a**0.5 for a, b in self.shapes)
            return list(zip(*(tensor.to(dtype).unbind() for tensor in flat), strict=True))

        def slots(dtype: torch.dtype) -> tuple[Tensors | None, ...]:
            base, buffer_X = memory(num_base, dtype), memory(4, dtype)
            return (*base, *(None if x is None else buffer_X[x] for x in buffer_R))

        self.dtype, self.weights_S = dtype, slots(dtype)
        self.grads_S = slots(torch.float64 if dtype == torch.float64 else torch.float32)  # sums of earlier micro-steps

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        return Residency(tuple(range(len(self.weights_S))), self.weights_S, self.grads_S, True)

    def gradients(self, micro_step: int, layer: int) -> None:
        """They stay here."""

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        """They stay here."""


def run(slots: Slots, num_S: list[int], math: ExpertMath, seed: int = 0) -> tuple[list[torch.Tensor], int, int]:
    """Output and all gradients; operations of forward and of backward."""
    generator = torch.Generator().manual_seed(seed)
    x_YH, grad_YH = torch.randn(2, sum(num_S), slots.shapes[0][0], generator=generator).to(slots.dtype)
    x_YH.requires_grad_()
    row = Row(0, 0, num_S, slots.shapes, math, slots, ComputeTime(), end_of_slots(num_S, CPU))  # type: ignore[arg-type]
    with Work() as forward:
        y_YH = GroupedExperts.apply(x_YH, row, Phase.FORWARD)
    with Work() as backward:
        y_YH.backward(grad_YH)
    grads = [grad for grads in slots.grads_S if grads is not None for grad in grads]
    return [y_YH.detach(), x_YH.grad, *grads], forward.num, backward.num


def equal_bits(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def grouped_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The number of slots in each grouped product that was called."""
    calls, real = [], functional.grouped_mm

    def call(rows: torch.Tensor, weights: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        calls.append(len(weights))
        return real(rows, weights, offs=offs)

    able = [products._has_grouped_product(torch.device("cpu"), dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    assert able == [True, True, False]  # a later torch may do more
    monkeypatch.setattr(functional, "grouped_mm", call)
    return calls


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=6),
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, None]), st.integers(0, 5)), max_size=4, unique_by=lambda slot: slot[0]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 1000),
)
@examples(60)
def test_equals_the_loop_bit_for_bit(
    base: list[int], redundant: list[tuple[int | None, int]], dtype: torch.dtype, seed: int
) -> None:
    num_S = base + [0 if buffer is None else num for buffer, num in redundant]
    make = lambda: Slots(len(base), [buffer for buffer, _ in redundant], dtype, seed=seed)  # noqa: E731
    ours, *_ = run(make(), num_S, SwiGLU(), seed)
    assert equal_bits(ours, run(make(), num_S, BySlot(), seed)[0])


@pytest.mark.parametrize(
    ("buffer_R", "runs"),
    [([], [3]), ([2], [3]), ([1, 2], [3, 2]), ([2, 1], [3]), ([0, 1, 3], [3, 2]), ([0, None, 1], [3]), ([None], [3])],
)
def test_slots_side_by_side_take_one_grouped_product(
    buffer_R: list[int | None], runs: list[int], grouped_calls: list[int]
) -> None:
    """A slot whose neighbours lie elsewhere takes a plain product."""
    num_S = [2, 0, 3] + [0 if buffer is None else 1 for buffer in buffer_R]
    make = lambda: Slots(3, buffer_R, torch.float32)  # noqa: E731
    ours, *_ = run(make(), num_S, SwiGLU())
    assert grouped_calls == runs * 4  # two products forward, two backward
    assert equal_bits(ours, run(make(), num_S, BySlot())[0])


@pytest.mark.parametrize(("num_S", "runs"), [([3, 3, 3], [3]), ([3, 0, 4], [1]), ([4, 3, 3], [1]), ([3, 0, 3], [3])])
def test_slots_with_many_pairs_take_products_of_their_own(
    num_S: list[int], runs: list[int], grouped_calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than three pairs for each slot that has any count as many here; a run of one slot is no grouped product."""
    monkeypatch.setattr(products, "MANY_PAIRS", 3)
    ours, *_ = run(Slots(3, [], torch.float32), num_S, SwiGLU())
    assert grouped_calls == (runs * 4 if runs != [1] else [])
    assert equal_bits(ours, run(Slots(3, [], torch.float32), num_S, BySlot())[0])


def test_neighbours_of_another_allocation_are_not_run_together() -> None:
    """No tensor may reach over the end of its storage, even where another one follows at once."""
    memory = bytearray(4 * H * 4)
    whole = torch.frombuffer(memory, dtype=torch.float32).view(4, H)
    apart = [(torch.frombuffer(memory, dtype=torch.float32, count=H, offset=4 * H * i),) for i in range(4)]
    assert apart[1][0].data_ptr() == whole[1].data_ptr()
    runs_of = lambda rows: [run.last - run.first for run in products.find_runs(rows, [(H // 4, 4)])]  # noqa: E731
    assert runs_of([(row,) for row in whole]) == [4]
    assert runs_of(apart) == [1] * 4


@pytest.mark.parametrize("why", ["float64", "rows of 12 bytes", "another math", "torch is old", "torch cannot"])
def test_the_loop_runs_where_grouped_products_cannot(why: str, grouped_calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (3, 8) if why == "rows of 12 bytes" else (H, F)
    dtype = torch.float64 if why == "float64" else torch.float32

    def refuse(*_: Any, **__: Any) -> None:
        grouped_calls.append(0)
        raise NotImplementedError("grouped_mm is not implemented for this device")

    if why.startswith("torch"):
        products._has_grouped_product.cache_clear()
        if why == "torch is old":
            monkeypatch.setattr(products, "_GROUPED", False)
        else:
            monkeypatch.setattr(functional, "grouped_mm", refuse)
    try:
        make = lambda: Slots(3, [1], dtype, sizes)  # noqa: E731
        ours, *_ = run(make(), [2, 0, 3, 1], BySlot() if why == "another math" else SwiGLU())
        assert grouped_calls == ([0] if why == "torch cannot" else [])
        assert equal_bits(ours, run(make(), [2, 0, 3, 1], BySlot())[0])
    finally:
        products._has_grouped_product.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "capability", "hip", "one_kernel"),
    [
        (torch.bfloat16, (9, 0), None, True),
        (torch.float32, (9, 0), None, False),
        (torch.bfloat16, (8, 0), None, False),
        (torch.bfloat16, (10, 0), None, True),
        (torch.bfloat16, (10, 3), None, True),
        (torch.bfloat16, (12, 0), None, False),
        (torch.bfloat16, (9, 0), "6.2", False),
    ],
)
def test_on_gpus_grouped_products_are_used_where_they_are_one_kernel(
    dtype: torch.dtype, capability: tuple[int, int], hip: str | None, one_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert products._has_grouped_product.__wrapped__(torch.device("cuda"), dtype) == one_kernel


def test_pairs_for_an_empty_slot_are_an_error_here_too() -> None:
    with pytest.raises(TransferError, match="slot 3 got 1 pairs"):
        run(Slots(3, [None], torch.float32), [2, 1, 3, 1], SwiGLU())


def test_rows_that_autograd_expands_are_laid_out() -> None:
    slots = Slots(3, [1], torch.float32)
    x_YH = torch.randn(7, H).requires_grad_()
    ends = end_of_slots([2, 1, 3, 1], CPU)
    row = Row(0, 0, [2, 1, 3, 1], slots.shapes, SwiGLU(), slots, ComputeTime(), ends)  # type: ignore[arg-type]
    GroupedExperts.apply(x_YH, row, Phase.FORWARD).sum().backward()
    assert SlotProducts.of(slots.weights(0, 0, 0), row, x_YH) is not None
    assert x_YH.grad.isfinite().all()


@pytest.mark.parametrize(
    ("num_base", "dtype", "loop", "grouped"),
    [
        (16, torch.float32, (86, 188), (6, 44)),
        (16, torch.bfloat16, (86, 256), (6, 48)),
        (64, torch.float32, (326, 716), (6, 140)),
    ],
)
def test_operations(num_base: int, dtype: torch.dtype, loop: tuple[int, int], grouped: tuple[int, int]) -> None:
    """Forward and backward with one redundant slot. Only sums in float32 are made slot by slot, two for each."""
    assert products._has_grouped_product(torch.device("cpu"), dtype)  # it tries once, which must not be counted
    for math, expected in ((BySlot(), loop), (SwiGLU(), grouped)):
        _, *nums = run(Slots(num_base, [1], dtype), [3] * (num_base + 1), math)
        assert tuple(nums) == expected


def test_few_runs_are_kept_however_many_ways_buffers_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a row found anew are those that were kept."""
    monkeypatch.setattr(experts, "MOST_KEPT", 3)
    kept = dict[tuple[int, ...], list[products.Run]]()
    for x, y in [(0, 1), (1, 0), (2, 3), (3, 2), (0, 1), (1, 2)]:
        slots = Slots(2, [x, y], torch.float32)
        row = Row(0, 0, [1] * 4, slots.shapes, SwiGLU(), slots, ComputeTime(), end_of_slots([1] * 4, CPU), 2, kept)
        found = row.runs(0, slots.weights_S)
        assert [run[:2] for run in found] == [run[:2] for run in products.find_runs(slots.weights_S, slots.shapes)]
        assert 0 < len(kept) <= 3
