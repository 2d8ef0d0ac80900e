"""Products of pairs with the weights of their slots: one call for slots that lie side by side in memory."""

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


class Run(NamedTuple):
    """Slots one behind the other, whose tensors lie at equal distances in memory."""

    first: int
    last: int  # behind it
    matrices: list[torch.Tensor]  # [slots, I, O] each; [I, O] of one slot


class _Part(NamedTuple):
    """A run of slots that has pairs, or one slot of it."""

    begin: int
    num: int  # of pairs
    matrices: list[torch.Tensor]
    end_S: torch.Tensor  # int32, where the pairs of its slots end, from the run's first


@dataclass(frozen=True, slots=True, eq=False)
class SlotProducts:
    """`Products` of all pairs of a row, each with the expert of its slot.

    A run of slots that lie side by side takes one grouped product: base slots do, so with one redundant slot a product is two
    calls, whatever the number of slots. Only where slots have very many pairs is each multiplied by itself. Torch's grouped
    product is no wider than its factors, so gradients are added by a kernel of our own where Triton is and slots have few pairs,
    and otherwise slot by slot.
    """

    parts: list[_Part]
    totals: list[_Part]  # of gradients, in backward

    @classmethod
    def of(cls, residency: Residency, row: Row, like: torch.Tensor) -> Self | None:
        """Products of a row, for pairs such as `like`.

        None where torch has no grouped product that is one operation, or where a slot with pairs has no weights.
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
            assert sum(part.num for part in totals) == len(like), "what has weights has totals"
        return cls(parts, totals)

    def times(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [part.matrices[i] for part in self.parts])

    def times_transposed(self, rows: torch.Tensor, i: int) -> torch.Tensor:
        return self._multiply(rows, [part.matrices[i].mT for part in self.parts])

    def add(self, i: int, left: torch.Tensor, right: torch.Tensor) -> None:
        if not left.is_cuda:  # all at once, and not slot by slot
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
                # The rows behind it are left as they are, for the runs that follow.
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
    """``total += left @ right``; where the total is wider than the factors, nothing is rounded to their dtype on the way."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif left.is_cuda and _GROUPED:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    elif left.is_cuda and _WIDE_PRODUCTS:
        total.add_(torch.mm(left, right, out_dtype=total.dtype))
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


def find_runs(tensors_S: Sequence[Tensors | None], shapes: Sequence[tuple[int, ...]]) -> list[Run]:
    """The runs of slots that have tensors; none where a grouped product does not take matrices of their rows."""
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
    """The runs with pairs; slots by themselves where there are more than `most` pairs for each slot that has any."""
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
