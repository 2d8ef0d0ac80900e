"""Sums over each token's pairs, which are stored in slot order, and their gradients, with torch or in one Triton kernel.

The kernel computes in float32 and rounds only once. It avoids two intermediate results that torch's own operations spend most of
their time writing to memory: the vectors in token order and the products in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from foremoe.runtime.fused import fuses, launch

# Letters: T tokens, K top-k, Z = T*K pairs, H hidden size.

_COLUMNS = 1024  # columns per Triton program


def sum_of_pairs(
    rows_ZH: torch.Tensor, by_token_Z: torch.Tensor, num_topk: int, weight_TK: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns each token's sum over its pairs, [T, H], weighted if `weight_TK` is given. `rows_ZH` is sorted by slot."""
    H = rows_ZH.shape[1]
    if fuses(rows_ZH):
        y_TH = rows_ZH.new_empty(len(by_token_Z) // num_topk, H)
        weight = by_token_Z if weight_TK is None else weight_TK.contiguous()
        grid, constants = (len(y_TH), -(-H // _COLUMNS)), {"COLUMNS": _COLUMNS, "WEIGHTED": weight_TK is not None}
        launch(_kernels()[0], grid, rows_ZH.contiguous(), by_token_Z, weight, y_TH, H, K=num_topk, **constants)
        return y_TH
    rows_TKH = rows_ZH.index_select(0, by_token_Z).view(-1, num_topk, H)
    return rows_TKH.sum(1) if weight_TK is None else (rows_TKH * weight_TK.unsqueeze(2)).sum(1).to(rows_ZH.dtype)


def sum_of_pairs_backward(
    grad_TH: torch.Tensor, rows_ZH: torch.Tensor | None, by_slot_Z: torch.Tensor, weight_TK: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns the gradients of the rows, sorted by slot, and of the weights. The second is None if `rows_ZH` is None."""
    (T, K), H = weight_TK.shape, grad_TH.shape[1]
    if fuses(grad_TH):
        grad_ZH = grad_TH.new_empty(T * K, H)
        grad_TK = None if rows_ZH is None else torch.empty_like(weight_TK, memory_format=torch.contiguous_format)
        tensors = (grad_TH.contiguous(), by_slot_Z, weight_TK.contiguous(), grad_ZH if rows_ZH is None else rows_ZH.contiguous())
        launch(
            _kernels()[1], (T * K,), *tensors, grad_ZH, grad_ZH if grad_TK is None else grad_TK, H,
            K=K, COLUMNS=_COLUMNS, DOT=rows_ZH is not None,
        )  # fmt: skip
        return grad_ZH, grad_TK
    wide = torch.promote_types(grad_TH.dtype, weight_TK.dtype)
    from_token_ZH = grad_TH.index_select(0, by_slot_Z // K).to(wide)
    grad_ZH = (from_token_ZH * weight_TK.reshape(-1).index_select(0, by_slot_Z)[:, None]).to(grad_TH.dtype)
    if rows_ZH is None:
        return grad_ZH, None
    grad_Z = (from_token_ZH * rows_ZH).sum(1).to(weight_TK.dtype)
    return grad_ZH, torch.empty_like(grad_Z).index_copy_(0, by_slot_Z.long(), grad_Z).view(T, K)


@functools.cache
def _kernels() -> tuple[Any, Any]:
    """Returns the kernels of the sums and of their backward. They compute in float32 and round once, when storing."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def sums(rows, by_token, weight, out, num_columns, K: tl.constexpr, COLUMNS: tl.constexpr, WEIGHTED: tl.constexpr):  # type: ignore[no-untyped-def]
        token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < num_columns
        total = tl.zeros((COLUMNS,), tl.float32)
        for k in tl.static_range(K):
            place = tl.load(by_token + token * K + k).to(tl.int64)
            row = tl.load(rows + place * num_columns + column, mask=inside, other=0.0).to(tl.float32)
            if WEIGHTED:
                row *= tl.load(weight + token * K + k).to(tl.float32)
            total += row
        tl.store(out + token * num_columns + column, total, mask=inside)

    @triton.jit  # type: ignore[untyped-decorator, unused-ignore]
    def backward(  # type: ignore[no-untyped-def]
        grad, by_slot, weight, rows, grad_rows, grad_weight, num_columns,
        K: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr,
    ):  # fmt: skip
        place = tl.program_id(0).to(tl.int64)
        pair = tl.load(by_slot + place).to(tl.int64)
        factor = tl.load(weight + pair).to(tl.float32)
        products = tl.zeros((COLUMNS,), tl.float32)
        for first in range(0, num_columns, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            inside = column < num_columns
            mine = tl.load(grad + pair // K * num_columns + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(grad_rows + place * num_columns + column, mine * factor, mask=inside)
            if DOT:
                products += mine * tl.load(rows + place * num_columns + column, mask=inside, other=0.0).to(tl.float32)
        if DOT:
            tl.store(grad_weight + pair, tl.sum(products))

    return sums, backward
