"""Permutations of rows by known orders, differentiable: backward gathers by the inverse, so nothing is scattered or sorted."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

# Letters: T tokens, K top-k, Z = T*K pairs in the order of their slots, X rows of any kind, H hidden size.


class Permute(torch.autograd.Function):
    """Rows [X] or [X, H] in another order; ``inverse_X`` is the inverse of ``order_X``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order_X: torch.Tensor, inverse_X: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse_X)
        return rows.index_select(0, order_X)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (inverse_X,) = ctx.saved_tensors
        return grad.index_select(0, inverse_X), None, None


class TokensToPairs(torch.autograd.Function):
    """x_TH -> rows_ZH, a row for every pair, sorted by slot."""

    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, by_slot_Z: torch.Tensor, by_token_Z: torch.Tensor, num_topk: int) -> torch.Tensor:
        ctx.save_for_backward(by_token_Z)
        ctx.num_topk = num_topk
        return x_TH.index_select(0, by_slot_Z // num_topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ZH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (by_token_Z,) = ctx.saved_tensors
        return _sum_of_tokens(grad_ZH, by_token_Z, ctx.num_topk), None, None, None


class PairsToTokens(torch.autograd.Function):
    """rows_ZH, sorted by slot -> y_TH, sums over the pairs of each token."""

    @staticmethod
    def forward(ctx: Any, rows_ZH: torch.Tensor, by_slot_Z: torch.Tensor, by_token_Z: torch.Tensor, num_topk: int) -> torch.Tensor:
        ctx.save_for_backward(by_slot_Z)
        ctx.num_topk = num_topk
        return _sum_of_tokens(rows_ZH, by_token_Z, num_topk)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (by_slot_Z,) = ctx.saved_tensors
        return grad_TH.index_select(0, by_slot_Z // ctx.num_topk), None, None, None


def _sum_of_tokens(rows_ZH: torch.Tensor, by_token_Z: torch.Tensor, num_topk: int) -> torch.Tensor:
    return rows_ZH.index_select(0, by_token_Z).view(-1, num_topk, rows_ZH.shape[1]).sum(1)
