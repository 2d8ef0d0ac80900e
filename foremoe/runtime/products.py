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
    calls, whatever the number of slots. Torch's grouped product is no wider than its factors, so gradients are added by a kernel
    of our own where Triton is and slots have few pairs, and otherwise slot by slot.
    """

    runs: list[_Run]
    grads_S: Sequence[Tensors | None] | None
    shapes: Sequence[tuple[int, ...]]
    num_S: list[int]
    end_S: torch.Tensor

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
        return cls(_runs(residency.weights_S, shapes, num_S, end_S), residency.grads_S, shapes, num_S, end_S)

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [run.weights[i] for run in self.runs])

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [run.weights[i].transpose(1, 2) for run in self.runs])

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        assert self.grads_S is not None
        total_S = [None if grads is None else grads[i] for grads in self.grads_S]
        wide = next(total.dtype for total in total_S if total is not None)
        if not left.is_cuda:  # all at once, and not slot by slot
            left, right = left.to(wide), right.to(wide)
        few = fuses(left) and wide == torch.float32 and len(left) < FEW_PAIRS * len(total_S)
        end_S = [0, *itertools.accumulate(self.num_S)]
        for first, last, stride in even_runs(total_S) if few else [(s, s + 1, 0) for s in range(len(total_S))]:
            begin, end, total = end_S[first], end_S[last], total_S[first]
            if begin == end:
                continue
            assert total is not None
            total_IO = total.view(self.shapes[i])
            if last - first > 1:
                add_products(total_IO, stride, left, right, self.end_S[first:last], begin)
            else:
                add_product(total_IO, left[begin:end].T, right[begin:end])

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
    """Slots one behind the other, also in memory."""

    weights: list[torch.Tensor]  # [slots, I, O] each
    pairs: slice
    end_S: torch.Tensor  # int32, where the pairs of its slots end, from the run's first


def _runs(
    weights_S: Sequence[Tensors | None], shapes: Sequence[tuple[int, ...]], num_S: list[int], end_S: torch.Tensor
) -> list[_Run]:
    """The runs with pairs."""
    place_S = [[(w.untyped_storage().data_ptr(), w.data_ptr()) for w in weights or ()] for weights in weights_S]
    found, first, begin, end = list[_Run](), 0, 0, 0
    for s, num in enumerate(num_S):
        end += num
        weights = weights_S[first]
        if weights is not None and s + 1 < len(num_S):
            behind = [(memory, at + w.nbytes) for (memory, at), w in zip(place_S[s], weights, strict=True)]
            if place_S[s + 1] == behind:
                continue
        if end > begin:
            assert weights is not None
            length = s + 1 - first
            stacks = [w.as_strided((length, *shape), (w.numel(), shape[1], 1)) for w, shape in zip(weights, shapes, strict=True)]
            ends = end_S[first : s + 1]
            found.append(_Run(stacks, slice(begin, end), ends - begin if begin and length > 1 else ends))
        first, begin = s + 1, end
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
