"""Matrix products of pairs with the weights in their slots. Slots that are adjacent in memory share one call."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import torch
from torch.nn import functional

from foremoe.runtime.fused import fuses
from foremoe.runtime.outer import add_products, even_runs
from foremoe.transfer.base import Tensors
from foremoe.transfer.residency import Residency

if TYPE_CHECKING:
    from foremoe.runtime.experts import Row

# Letters: N pairs of one slot; Y pairs that a rank serves, sorted by slot; S slots of a rank; I, O rows and columns of a matrix.

_WIDE_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()  # torch 2.8 and later, on GPUs
_GROUPED = hasattr(functional, "grouped_mm")  # torch 2.10 and later, whose addmm also adds to a wider total
_ALIGNED_BYTES = 16  # alignment of matrix rows in a grouped product
FEW_PAIRS = 2048  # pairs per slot below which one kernel for all slots adds gradients faster than cuBLAS per slot
MANY_PAIRS = 4096  # pairs per slot above which cuBLAS per slot is faster than a grouped product


class Products(Protocol):
    """Interface through which an expert's formula uses its matrices, which are numbered as in `ExpertMath.shapes`."""

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        """Returns ``rows @ weight``."""

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        """Returns ``rows @ weight.T``."""

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adds ``left.T @ right`` to the gradient of the weight."""


@dataclass(frozen=True, slots=True, eq=False)
class OneExpert:
    """`Products` for the pairs of one expert."""

    weights: Tensors
    grads: Tensors = ()

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return rows @ self.weights[i]

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return rows @ self.weights[i].T

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        add_product(self.grads[i], left.T, right)


class Run(NamedTuple):
    """Run of consecutive slots whose tensors are equally spaced in memory."""

    first: int
    last: int  # exclusive
    matrices: list[torch.Tensor]  # each [slots, I, O], or [I, O] for one slot


class _Part(NamedTuple):
    """A run of slots that has pairs, or one slot of it."""

    begin: int
    num: int  # number of pairs
    matrices: list[torch.Tensor]
    end_S: torch.Tensor  # int32, end of each slot's pairs, counted from the run's first pair


@dataclass(frozen=True, slots=True, eq=False)
class SlotProducts:
    """`Products` for all pairs of a row, each with the expert in its slot.

    Each run of adjacent slots takes one grouped product. Because base slots are adjacent, a rank with one redundant slot needs
    two calls, however many base slots it has. Slots with more than `MANY_PAIRS` pairs are multiplied separately. The result of
    torch's grouped product has the dtype of its factors, which is too narrow for gradients. Gradients are therefore added by
    foremoe's own kernel if Triton is available and the slots have few pairs, and otherwise slot by slot.
    """

    parts: list[_Part]
    totals: list[_Part]  # gradients to add to, in backward

    @classmethod
    def of(cls, residency: Residency, row: Row, like: torch.Tensor) -> Self | None:
        """Returns the products of a row whose pairs have the device and dtype of `like`.

        Returns None if torch has no grouped product that runs as a single operation, or if a slot with pairs lacks its weights.
        """
        if not _has_grouped_product(like.device, like.dtype):
            return None
        parts, totals = _parts(row.runs(0, residency.weights_S), row.num_S, row.end_S, MANY_PAIRS), list[_Part]()
        if not parts or sum(part.num for part in parts) < len(like):
            return None
        if residency.grads_S is not None:
            runs = row.runs(1, residency.grads_S)
            few = FEW_PAIRS if fuses(like) and runs[0].matrices[0].dtype == torch.float32 else 0
            totals = _parts(runs, row.num_S, row.end_S, few)
            assert sum(part.num for part in totals) == len(like), "every slot with weights has totals"
        return cls(parts, totals)

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [part.matrices[i] for part in self.parts])

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [part.matrices[i].mT for part in self.parts])

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        if not left.is_cuda:  # convert all slots at once
            left, right = (rows.to(self.totals[0].matrices[i].dtype) for rows in (left, right))
        for begin, num, totals, end_S in self.totals:
            mine, to_mine = left.narrow(0, begin, num), right.narrow(0, begin, num)
            if totals[i].dim() == 3:
                add_products(totals[i], mine, to_mine, end_S)
            else:
                add_product(totals[i], mine.t(), to_mine)

    def _multiply(self, rows_YI: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        out_YO: torch.Tensor | None = None
        for (begin, num, _, end_S), weight in zip(self.parts, weights, strict=True):
            if begin == 0 and weight.dim() == 3:
                # The rest of the output is not written and is filled by the runs that follow.
                out_YO = functional.grouped_mm(rows_YI, weight, offs=end_S)
                continue
            if out_YO is None:
                out_YO = rows_YI.new_empty(len(rows_YI), weight.shape[-1])
            mine, out = rows_YI.narrow(0, begin, num), out_YO.narrow(0, begin, num)
            if weight.dim() == 3:
                out.copy_(functional.grouped_mm(mine, weight, offs=end_S))
            else:
                torch.mm(mine, weight, out=out)
        assert out_YO is not None
        return out_YO


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds ``left @ right`` to `total`, without rounding to the dtype of the factors if `total` is wider."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and _GROUPED:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda and _WIDE_PRODUCTS:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def find_runs(tensors_S: Sequence[Tensors | None], shapes: Sequence[tuple[int, ...]]) -> list[Run]:
    """Returns the runs of slots that have tensors, or an empty list if matrix rows are not aligned for a grouped product."""
    found = list[Run]()
    size = next((tensors[0].element_size() for tensors in tensors_S if tensors is not None), 0)
    if any(length * size % _ALIGNED_BYTES for shape in shapes for length in shape):
        return found
    for first, last, strides in even_runs(tensors_S):
        if (tensors := tensors_S[first]) is None:
            continue
        sizes = [((last - first, *shape), (stride, shape[1], 1)) for shape, stride in zip(shapes, strides, strict=True)]
        stacks = [tensor.as_strided(*size) for tensor, size in zip(tensors, sizes, strict=True)]
        found.append(Run(first, last, stacks if last - first > 1 else [stack[0] for stack in stacks]))
    return found


def _parts(runs: list[Run], num_S: list[int], end_S: torch.Tensor, most: int) -> list[_Part]:
    """Returns the runs that have pairs, cut into single slots if the used slots have more than `most` pairs on average."""
    found, place_S = list[_Part](), [0, *itertools.accumulate(num_S)]
    for first, last, matrices in runs:
        begin, num = place_S[first], place_S[last] - place_S[first]
        if last - first > 1 and num > most * (last - first - num_S[first:last].count(0)):
            busy = (s for s in range(first, last) if num_S[s])
            found += [_Part(place_S[s], num_S[s], [stack[s - first] for stack in matrices], end_S) for s in busy]
        elif num:
            ends = end_S[first:last] if last - first > 1 else end_S
            found.append(_Part(begin, num, matrices, ends - begin if begin and last - first > 1 else ends))
    return found


@cache
def _has_grouped_product(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch has a grouped product for the device and dtype that is a single kernel on a GPU."""
    if not _GROUPED:
        return False
    if device.type == "cuda":
        # On other GPUs and for other dtypes, torch reads the counts back to the host and computes one product per slot.
        return dtype == torch.bfloat16 and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)
    try:
        eye = torch.eye(8, dtype=dtype, device=device)
        functional.grouped_mm(eye, eye[None], offs=torch.tensor([8], dtype=torch.int32, device=device))
    except RuntimeError:
        return False
    return True
