"""Differentiable permutations with known inverses. The backward pass gathers in the inverse order and never scatters or sorts."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from foremoe.runtime.pairs import sum_of_pairs

# Letters: T tokens, K top-k, Z = T*K pairs in the order of their slots, X entries of any kind, H hidden size.


class Permute(torch.autograd.Function):
    """Permutes the first axis of a tensor [X] or [X, H]. ``inverse_X`` is the inverse of ``order_X``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order_X: torch.Tensor, inverse_X: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse_X)
        return rows.index_select(0, order_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse_X,) = ctx.saved_tensors
        return grad.index_select(0, inverse_X), None, None


class Divide(torch.autograd.Function):
    """Permutes the first axis of a tensor [X] or [X, H] and cuts it into two separate tensors. It is the adjoint of `Join`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, first: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(first, rest)
        return rows.index_select(0, first), rows.index_select(0, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_first: torch.Tensor, grad_rest: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _joined(grad_first, grad_rest, *ctx.saved_tensors), None, None


class Join(torch.autograd.Function):
    """Puts the entries of two tensors where `Divide` took them from. The tensors are not concatenated first."""

    @staticmethod
    def forward(
        ctx: Any, rows_first: torch.Tensor, rows_rest: torch.Tensor, first: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(first, rest)
        return _joined(rows_first, rows_rest, first, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        first, rest = ctx.saved_tensors
        return grad.index_select(0, first), grad.index_select(0, rest), None, None


class TokensToPairs(torch.autograd.Function):
    """Maps x_TH to rows_ZH, the hidden state of every pair, sorted by slot."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, by_slot_Z: torch.Tensor, by_token_Z: torch.Tensor, num_topk: int) -> torch.Tensor:
        ctx.save_for_backward(by_token_Z)
        ctx.num_topk = num_topk
        return x_TH.index_select(0, by_slot_Z // num_topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ZH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (by_token_Z,) = ctx.saved_tensors
        return sum_of_pairs(grad_ZH, by_token_Z, ctx.num_topk), None, None, None


class PairsToTokens(torch.autograd.Function):
    """Maps rows_ZH, sorted by slot, to y_TH, the sum over each token's pairs."""

    @staticmethod
    def forward(
        ctx: Any, rows_ZH: torch.Tensor, by_slot_Z: torch.Tensor, by_token_Z: torch.Tensor, num_topk: int
    ) -> torch.Tensor:
        ctx.save_for_backward(by_slot_Z)
        ctx.num_topk = num_topk
        return sum_of_pairs(rows_ZH, by_token_Z, num_topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (by_slot_Z,) = ctx.saved_tensors
        return grad_TH.index_select(0, by_slot_Z // ctx.num_topk), None, None, None


def _joined(rows_first: torch.Tensor, rows_rest: torch.Tensor, first: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    rows = rows_first.new_empty(len(first) + len(rest), *rows_first.shape[1:])
    rows[first], rows[rest] = rows_first, rows_rest
    return rows
