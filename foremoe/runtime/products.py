"""Products of pairs with the weights of their slots: one call for slots that lie side by side in memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, Self

import torch
from torch.nn import functional

from foremoe.runtime.fused import fuses
from foremoe.runtime.outer import add_products, even_runs
from foremoe.transfer.base import Tensors
from foremoe.transfer.residency import Residency

# Letters: N pairs of one slot; Y pairs that a rank serves, sorted by slot; S slots of a rank; I, O rows and columns of a matrix.

_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()  # torch 2.8 and later, on GPUs
_GROUPED = hasattr(functional, "grouped_mm")  # torch 2.10 and later; since then addmm adds to a wider total, too
_ALIGNED_BYTES = 16  # rows of all matrices in a grouped product
FEW_PAIRS = 2048  # a slot, below which one kernel for all adds gradients sooner than cuBLAS slot by slot
MANY_PAIRS = 4096  # a slot, above which cuBLAS slot by slot multiplies sooner than a grouped product


class Products(Protocol):
    """The matrices of experts, by their place in `ExpertMath.shapes`, as a formula meets them."""

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        """``rows @ weight``."""

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        """``rows @ weight.T``."""

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """``gradient += left.T @ right``."""


@dataclass(frozen=True, slots=True, eq=False)
class OneExpert:
    """`Products` of one expert's pairs."""

    weights: Tensors
    grads: Tensors = ()

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return rows @ self.weights[i]

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return rows @ self.weights[i].T

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        add_product(self.grads[i], left.T, right)


@dataclass(frozen=True, slots=True, eq=False)
class SlotProducts:
    """`Products` of all pairs of a row, each with the expert of its slot.

    A run of slots that lie side by side takes one grouped product: base slots do, so with one redundant slot a product is two
    calls, whatever the number of slots. Only where slots have very many pairs is each multiplied by itself. Torch's grouped
    product is no wider than its factors, so gradients are added by a kernel of our own where Triton is and slots have few pairs,
    and otherwise slot by slot.
    """

    runs: list[_Run]
    totals: list[_Run]  # of gradients, in backward

    @classmethod
    def of(
        cls, residency: Residency, shapes: Sequence[tuple[int, ...]], num_S: list[int], end_S: torch.Tensor, like: torch.Tensor
    ) -> Self | None:
        """Products of rows such as `like`, or None where torch has no grouped product that is one operation.

        `end_S`, int32 on the device, is where the pairs of slots end; slots with pairs have weights.
        """
        aligned = all(size * like.element_size() % _ALIGNED_BYTES == 0 for shape in shapes for size in shape)
        if not (aligned and len(like) and _has_grouped_product(like.device, like.dtype)):
            return None
        totals = list[_Run]()
        if residency.grads_S is not None:
            wide = next(grads[0].dtype for grads in residency.grads_S if grads is not None)
            few = FEW_PAIRS if fuses(like) and wide == torch.float32 else 0
            totals = _runs(residency.grads_S, shapes, num_S, end_S, few)
        return cls(_runs(residency.weights_S, shapes, num_S, end_S, MANY_PAIRS), totals)

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [run.stacks[i] for run in self.runs])

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [run.stacks[i].transpose(1, 2) for run in self.runs])

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        if not left.is_cuda:  # all at once, and not slot by slot
            left, right = (rows.to(self.totals[0].stacks[i].dtype) for rows in (left, right))
        for run in self.totals:
            total_SIO = run.stacks[i]
            if len(total_SIO) > 1:
                add_products(total_SIO, left[run.pairs], right[run.pairs], run.end_S)
            else:
                add_product(total_SIO[0], left[run.pairs].T, right[run.pairs])

    def _multiply(self, rows_YI: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        out_YO: torch.Tensor | None = None
        for run, weight_SIO in zip(self.runs, weights, strict=True):
            if run.pairs.start == 0 and len(weight_SIO) > 1:
                # The rows behind it are left as they are, for the runs that follow.
                out_YO = functional.grouped_mm(rows_YI, weight_SIO, offs=run.end_S)
                continue
            if out_YO is None:
                out_YO = rows_YI.new_empty(len(rows_YI), weight_SIO.shape[2])
            if len(weight_SIO) == 1:
                torch.mm(rows_YI[run.pairs], weight_SIO[0], out=out_YO[run.pairs])
            else:
                out_YO[run.pairs] = functional.grouped_mm(rows_YI[run.pairs], weight_SIO, offs=run.end_S)
        assert out_YO is not None
        return out_YO


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``total += left @ right``; where the total is wider than the factors, nothing is rounded to their dtype on the way."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and _GROUPED:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda and _WIDE_PRODUCTS:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Slots one behind the other, whose tensors lie at equal distances in memory."""

    stacks: list[torch.Tensor]  # [slots, I, O] each
    pairs: slice
    end_S: torch.Tensor  # int32, where the pairs of its slots end, from the run's first


def _runs(
    tensors_S: Sequence[Tensors | None], shapes: Sequence[tuple[int, ...]], num_S: list[int], end_S: torch.Tensor, most: int
) -> list[_Run]:
    """The runs with pairs; slots by themselves where there are more than `most` pairs for each slot that has any."""
    found, place_S = list[_Run](), [0, *itertools.accumulate(num_S)]
    for first, last, strides in even_runs(tensors_S):
        busy = sum(num > 0 for num in num_S[first:last])
        length = last - first if place_S[last] - place_S[first] <= most * busy else 1
        for s in range(first, last, length):
            begin, end, tensors = place_S[s], place_S[s + length], tensors_S[s]
            if begin == end:
                continue
            assert tensors is not None
            sizes = [((length, *shape), (stride, shape[1], 1)) for shape, stride in zip(shapes, strides, strict=True)]
            stacks = [tensor.as_strided(*size) for tensor, size in zip(tensors, sizes, strict=True)]
            ends = end_S[s : s + length]
            found.append(_Run(stacks, slice(begin, end), ends - begin if begin and length > 1 else ends))
    return found


@cache
def _has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a grouped product for it, which on a GPU is one kernel."""
    if not _GROUPED:
        return False
    if device.type == "cuda":
        # On other GPUs, and for other dtypes, torch reads the counts back and makes a product for each.
        return dtype == torch.bfloat16 and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    try:
        eye = torch.eye(8, dtype=dtype, device=device)
        functional.grouped_mm(eye, eye[None], offs=torch.tensor([8], dtype=torch.int32, device=device))
    except RuntimeError:
        return False
    return True
