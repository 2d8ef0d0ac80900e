"""Triton's kernels, run by its interpreter, against float64; where triton is installed. On a GPU bench.gpu compares layers."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foremoe.runtime import activation, outer, pairs

# Letters: T tokens, K top-k, Z = T*K pairs, H hidden size, S slots, I, O rows and columns of a matrix.

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="test_kernels_in_triton_s_interpreter runs it with TRITON_INTERPRET=1")
NEEDS = "triton is not installed; pip install triton (no GPU is needed)"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or INTERPRETED, reason=NEEDS)
def test_kernels_in_triton_s_interpreter() -> None:
    """In a process of its own: whether kernels are interpreted is settled when triton is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0", str(Path(__file__).resolve())]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


OF_SUMS, OF_ACTIVATION = {"K": 8, "COLUMNS": pairs._COLUMNS}, {"COLUMNS": activation._COLUMNS}
# Kernel -> the types of its arguments, and its constants.
COMPILED = {
    "sums": ("*bf16 *i32 *fp32 *bf16 i32", OF_SUMS | {"WEIGHTED": True}),
    "backward of sums": ("*bf16 *i32 *fp32 *bf16 *bf16 *fp32 i32", OF_SUMS | {"DOT": True}),
    "add": ("*bf16 *bf16 *fp32 *i32 i64 i32 i32 i32 i32", outer._TILE),
    "activation": ("*bf16 *bf16 i32", OF_ACTIVATION),
    "backward of activation": ("*bf16 *bf16 *bf16 *bf16 i32", OF_ACTIVATION),
}


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or INTERPRETED, reason=NEEDS)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("name", COMPILED)
def test_kernels_compile_for_ampere_hopper_and_blackwell(name: str, capability: int) -> None:
    """To machine code, without a GPU; shared memory is what a multiprocessor of an H100 has at most."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernels = dict(zip(COMPILED, [*pairs._kernels(), outer._kernel(), *activation._kernels()], strict=True))
    types, constants = COMPILED[name]
    typed = dict(zip(kernels[name].arg_names, [*types.split(), *["constexpr"] * len(constants)], strict=True))
    source, options = ASTSource(kernels[name], typed, constants), outer._OPTIONS if name == "add" else {}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert made.asm["cubin"] and made.metadata.shared <= 227 * 1024


def drawn(T: int, K: int, H: int) -> tuple[torch.Tensor, ...]:
    """Rows sorted by slot, weights, gradient of the sums, and both orders, int32."""
    generator = torch.Generator().manual_seed(T + H)
    rows_ZH, grad_TH = (torch.randn(n, H, generator=generator).half() for n in (T * K, T))
    by_slot_Z = torch.randperm(T * K, generator=generator)
    by_token_Z = torch.empty_like(by_slot_Z).index_copy_(0, by_slot_Z, torch.arange(T * K))
    return rows_ZH, torch.rand(T, K, generator=generator), grad_TH, by_slot_Z.int(), by_token_Z.int()


@interpreted
@pytest.mark.parametrize(("T", "K", "H"), [(3, 2, 16), (2, 3, 1500), (1, 1, 1024), (0, 2, 8)])
def test_sums_and_their_backward(T: int, K: int, H: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded once to fp16; gradients of weights are sums over H, so bounded by float32 alone."""
    rows_ZH, weight_TK, grad_TH, by_slot_Z, by_token_Z = drawn(T, K, H)
    wide_ZH, wide_TK = rows_ZH.double().requires_grad_(), weight_TK.double().requires_grad_()
    exact_TH = (wide_ZH[by_token_Z.long()].view(T, K, H) * wide_TK[:, :, None]).sum(1)
    exact_ZH, exact_TK = torch.autograd.grad(exact_TH, [wide_ZH, wide_TK], grad_TH.double())
    monkeypatch.setattr(pairs, "fuses", lambda tensor: True)
    found_ZH, found_TK = pairs.sum_of_pairs_backward(grad_TH, rows_ZH, by_slot_Z, weight_TK)
    only_ZH, nothing = pairs.sum_of_pairs_backward(grad_TH, None, by_slot_Z, weight_TK)
    assert nothing is None and torch.equal(only_ZH, found_ZH)
    plain_TH = wide_ZH[by_token_Z.long()].view(T, K, H).sum(1)
    for ours, exact, bound in (
        (pairs.sum_of_pairs(rows_ZH, by_token_Z, K, weight_TK), exact_TH, 6e-4),
        (pairs.sum_of_pairs(rows_ZH, by_token_Z, K), plain_TH, 6e-4),
        (found_ZH, exact_ZH, 6e-4),
        (found_TK, exact_TK, 1e-5),
    ):
        assert ours is not None and ours.shape == exact.shape
        assert float((ours.double() - exact).detach().abs().max().item() if ours.numel() else 0.0) <= bound * float(
            exact.detach().abs().max() if exact.numel() else 1.0
        )


@pytest.mark.parametrize("weighted", [True, False])
def test_torch_s_own_way_is_the_same_law(weighted: bool) -> None:
    rows_ZH, weight_TK, grad_TH, by_slot_Z, by_token_Z = drawn(5, 3, 8)
    rows_ZH, weight_TK, grad_TH = rows_ZH.double().requires_grad_(), weight_TK.double().requires_grad_(), grad_TH.double()
    exact_TKH = rows_ZH[by_token_Z.long()].view(5, 3, 8)
    exact_TH = (exact_TKH * weight_TK[:, :, None]).sum(1) if weighted else exact_TKH.sum(1)
    assert torch.equal(pairs.sum_of_pairs(rows_ZH, by_token_Z, 3, weight_TK if weighted else None), exact_TH)
    if weighted:
        exact = torch.autograd.grad(exact_TH, [rows_ZH, weight_TK], grad_TH)
        for ours, theirs in zip(pairs.sum_of_pairs_backward(grad_TH, rows_ZH, by_slot_Z, weight_TK), exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)


@interpreted
@pytest.mark.parametrize("num_S", [[3, 0, 70, 1], [0, 0, 2], [64, 65]])
@pytest.mark.parametrize(("I", "O"), [(16, 24), (130, 8)])
def test_outer_products_are_added_to_each_total(num_S: list[int], I: int, O: int) -> None:  # noqa: E741
    """Slots whose totals lie apart; what lies between them stays as it was."""
    generator = torch.Generator().manual_seed(I)
    left, right = (torch.randn(sum(num_S), n, generator=generator).half() for n in (I, O))
    memory = torch.randn(len(num_S), 2, I, O, generator=generator)
    expected = memory.double()
    ends = torch.tensor(num_S).cumsum(0)
    for s, end in enumerate(ends.tolist()):
        mine = slice(end - num_S[s], end)
        expected[s, 0] += left[mine].double().T @ right[mine].double()
    outer.add_products(memory[:, 0], left, right, ends.int())
    torch.testing.assert_close(memory.double(), expected, rtol=1e-5, atol=1e-4)


def test_even_runs() -> None:
    (wide, narrow), other = (torch.zeros(6, 4), torch.zeros(6, 2)), (torch.zeros(4), torch.zeros(2))
    slots = list(zip(wide.unbind(), narrow.unbind(), strict=True))
    assert outer.even_runs(slots) == [(0, 6, [4, 2])]
    assert outer.even_runs(slots[::2]) == [(0, 3, [8, 4])]
    assert outer.even_runs([slots[0], slots[1], slots[3], other]) == [(0, 2, [4, 2]), (2, 3, [0, 0]), (3, 4, [0, 0])]
    assert outer.even_runs([slots[1], None, slots[0]]) == [(0, 1, [0, 0]), (1, 2, []), (2, 3, [0, 0])]
    assert outer.even_runs([slots[1], slots[0]]) == [(0, 1, [0, 0]), (1, 2, [0, 0])]
    # Both tensors must agree.
    assert outer.even_runs([slots[0], (wide[1], narrow[2]), (wide[2], narrow[3])]) == [(0, 2, [4, 4]), (2, 3, [0, 0])]
    assert outer.even_runs([]) == []
