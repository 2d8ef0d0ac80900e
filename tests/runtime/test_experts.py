"""Grouped expert compute equals the plain formula, keeps no weights, and asks for them again in backward."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from rounding import gamma
from runtime_util import relative, swiglu

from foremoe.base.errors import TransferError
from foremoe.problem.schedule import Phase
from foremoe.runtime import SwiGLU, products
from foremoe.runtime.experts import ComputeTime, GroupedExperts, Row, end_of_slots
from foremoe.runtime.products import add_product
from foremoe.transfer.residency import Residency

CPU = torch.device("cpu")
# Letters: S slots, Y pairs, H hidden size, F ffn size.

H, F = 5, 3


@dataclass
class Slots:
    """Residencies of one row in memory of its own, which `overwrite` replaces as a ring of buffers would."""

    weights_S: list[tuple[torch.Tensor, ...]]
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory_S = [tuple(w.detach().flatten().clone() for w in weights) for weights in self.weights_S]
        self.grads_S = [tuple(torch.zeros_like(w) for w in weights) for weights in self.memory_S]

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        self.calls.append(f"weights {micro_step} {layer} {Phase(phase).name}")
        for memory, weights in zip(self.memory_S, self.weights_S, strict=True):
            for flat, weight in zip(memory, weights, strict=True):
                flat.copy_(weight.detach().flatten())
        grads = tuple(self.grads_S) if phase == Phase.BACKWARD else None
        return Residency(tuple(range(len(self.memory_S))), tuple(self.memory_S), grads, True)

    def gradients(self, micro_step: int, layer: int) -> None:
        self.calls.append(f"gradients {micro_step} {layer}")

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        self.calls.append(f"release {micro_step} {layer} {Phase(phase).name}")

    def overwrite(self) -> None:
        for flat in (flat for memory in self.memory_S for flat in memory):
            flat.fill_(float("nan"))


def make(
    num_S: list[int], seed: int = 0, dtype: torch.dtype = torch.float64, H: int = H, F: int = F
) -> tuple[Slots, Row, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=dtype)  # noqa: E731
    slots = Slots([tuple(draw(*shape).requires_grad_() for shape in SwiGLU().shapes(H, F).values()) for _ in num_S])
    row = Row(3, 2, num_S, tuple(SwiGLU().shapes(H, F).values()), SwiGLU(), slots, ComputeTime(), end_of_slots(num_S, CPU))
    return slots, row, draw(sum(num_S), H).requires_grad_()


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.integers(0, 1000))
@examples(30)
def test_equals_autograd_of_the_plain_formula(num_S: list[int], seed: int) -> None:
    slots, row, x_YH = make(num_S, seed)
    y_YH = GroupedExperts.apply(x_YH, row, Phase.FORWARD)
    slots.overwrite()
    grad_YH = torch.randn(y_YH.shape, generator=torch.Generator().manual_seed(seed), dtype=y_YH.dtype)
    y_YH.backward(grad_YH)
    parts = [swiglu(x, *weights) for x, weights in zip(x_YH.split(num_S), slots.weights_S, strict=True)]
    assert relative(y_YH, torch.cat(parts)) < 1e-13
    mine, x_YH.grad = x_YH.grad, None
    torch.cat(parts).backward(grad_YH)
    assert relative(mine, x_YH.grad) < 1e-13
    for grads, weights in zip(slots.grads_S, slots.weights_S, strict=True):
        for grad, weight in zip(grads, weights, strict=True):
            assert relative(grad.view(weight.shape), torch.zeros_like(weight) if weight.grad is None else weight.grad) < 1e-13


ONE_BY_ONE = {"dtype": torch.float64, "H": 5, "F": 3}
AT_ONCE = {"dtype": torch.float32, "H": 8, "F": 4}


@pytest.mark.parametrize(("how", "kept"), [(ONE_BY_ONE, [(5, 5), (2, 6), (3, 6)]), (AT_ONCE, [(5, 8), (5, 8)])])
def test_keeps_the_input_and_the_pre_activations_and_asks_for_weights_again(how: dict[str, Any], kept: list[Any]) -> None:
    slots, row, x_YH = make([2, 3], **how)
    packed: list[tuple[int, ...]] = []
    addresses = {flat.untyped_storage().data_ptr() for memory in slots.memory_S for flat in memory}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        assert tensor.untyped_storage().data_ptr() not in addresses
        packed.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y_YH = GroupedExperts.apply(x_YH, row, Phase.FORWARD)
    assert packed == kept
    slots.overwrite()
    y_YH.sum().backward()
    assert x_YH.grad.isfinite().all()
    assert slots.calls == ["weights 3 2 FORWARD", "weights 3 2 BACKWARD", "gradients 3 2", "release 3 2 BACKWARD"]


def test_gradients_are_added_in_the_wider_dtype() -> None:
    slots, row, x_YH = make([4], dtype=torch.bfloat16)
    slots.grads_S = [tuple(torch.ones(g.shape) for g in grads) for grads in slots.grads_S]
    GroupedExperts.apply(x_YH, row, Phase.FORWARD).sum().backward()
    swiglu(x_YH, *slots.weights_S[0]).sum().backward()
    for grad, weight in zip(slots.grads_S[0], slots.weights_S[0], strict=True):
        assert relative(grad.view(weight.shape), 1 + weight.grad.float()) < 0.02


@pytest.mark.parametrize("num_parts", [1, 5])
def test_products_of_bfloat16_are_rounded_in_float32_alone(num_parts: int) -> None:
    """So that replicas, which add them up part by part, lose nothing: the bound is that of float32, whatever the parts."""
    left_IN, right_NO = (torch.randn(*shape).bfloat16() for shape in ((6, 300), (300, 7)))
    total_IO = torch.zeros(6, 7)
    for left, right in zip(left_IN.chunk(num_parts, 1), right_NO.chunk(num_parts), strict=True):
        add_product(total_IO, left, right)
    bound_IO = gamma(300 + num_parts) * (left_IN.double().abs() @ right_NO.double().abs())
    assert ((total_IO.double() - left_IN.double() @ right_NO.double()).abs() <= bound_IO).all()


class OnGpu(torch.Tensor):
    """Claims to be on a GPU, and multiplies as GPUs do: the result has the dtype that is asked for."""

    is_cuda = True
    asked: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.mm, torch.addmm):
            return super().__torch_function__(func, types, args, kwargs)
        cls.asked.append(func.__name__)
        left, right = (value.as_subclass(torch.Tensor).to(kwargs["out_dtype"]) for value in args[-2:])
        return left @ right if func is torch.mm else kwargs["out"].copy_(args[0] + left @ right)


@pytest.mark.parametrize(("newest", "calls"), [(True, ["addmm"]), (False, ["mm"])])
def test_on_a_gpu_factors_are_not_widened(newest: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "_GROUPED", newest)
    monkeypatch.setattr(OnGpu, "asked", [])
    left, right = (torch.randint(-8, 9, shape).bfloat16() for shape in ((3, 4), (4, 2)))  # whole numbers: no sum is rounded
    on_host, on_gpu = torch.ones(2, 3, 2)
    add_product(on_host, left, right)
    add_product(on_gpu, left.as_subclass(OnGpu), right.as_subclass(OnGpu))
    assert torch.equal(on_host, on_gpu) and OnGpu.asked == calls


def test_pairs_for_an_empty_slot_are_an_error() -> None:
    slots, row, x_YH = make([2, 1])
    full = slots.weights
    slots.weights = lambda *use: Residency((0, -1), (full(*use).weights_S[0], None), None, True)  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="slot 1 got 1 pairs in micro-step 3, layer 2"):
        GroupedExperts.apply(x_YH, row, Phase.FORWARD)


def test_time_is_counted_by_pass() -> None:
    _, row, x_YH = make([200])
    y_YH = GroupedExperts.apply(x_YH, row, Phase.FORWARD)
    assert row.time.forward_s > 0.0 and row.time.backward_s == 0.0
    y_YH.sum().backward()
    before = row.time.backward_s
    assert before > 0.0 and row.time.num_backward == 1
    GroupedExperts.apply(x_YH, row, Phase.BACKWARD)  # a re-forward
    assert row.time.backward_s > before


@pytest.mark.parametrize("how", [ONE_BY_ONE, AT_ONCE])
def test_the_graph_keeps_nothing_alive_after_it_is_gone(how: dict[str, Any]) -> None:
    slots, row, x_YH = make([2], **how)
    gone = weakref.ref(slots.memory_S[0][0])
    y_YH = GroupedExperts.apply(x_YH, row, Phase.FORWARD)
    del slots, row, y_YH
    assert gone() is None
