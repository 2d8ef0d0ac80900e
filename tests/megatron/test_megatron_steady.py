"""What the comparisons of one step rest on: with `steady_rows`, a token's result does not depend on the tokens beside it."""

import cpu
import pytest
import torch
from torch.nn import functional

HIDDEN, FFN, Y = 16, 24, 40


def expert(x_YH, probs_Y, first, second):
    """As Megatron's experts compute; with the gradients of input and probabilities."""
    x_YH, probs_Y = x_YH.clone().requires_grad_(), probs_Y.clone().requires_grad_()
    gate, up = torch.matmul(x_YH, first.t()).chunk(2, -1)
    output = torch.matmul((functional.silu(gate) * up * probs_Y.unsqueeze(-1)).to(x_YH.dtype), second.t())
    output.backward(torch.ones_like(output).cumsum(1) / HIDDEN)
    return output.detach(), x_YH.grad, probs_Y.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(dtype):
    torch.manual_seed(0)
    first, second = torch.randn(2 * FFN, HIDDEN).to(dtype), torch.randn(HIDDEN, FFN).to(dtype)
    x_YH, probs_Y = torch.randn(Y, HIDDEN).to(dtype), torch.rand(Y).to(dtype)
    with cpu.steady_rows():
        whole = expert(x_YH, probs_Y, first, second)
        for begin in range(Y):
            for end in {begin + 1, begin + 2, Y}:
                part = expert(x_YH[begin:end], probs_Y[begin:end], first, second)
                assert all(torch.equal(one, all_[begin:end]) for one, all_ in zip(part, whole, strict=True))


def test_products_are_right_and_nothing_stays_patched():
    matmul = torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    with cpu.steady_rows():
        found = torch.autograd.grad((a @ b).square().sum(), (a, b))
        assert torch.matmul is not matmul[0]
    expected = torch.autograd.grad((a @ b).square().sum(), (a, b))
    torch.testing.assert_close(found, expected)
    assert (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) == matmul
