"""Known rows for dispatchers that communicate on their own, such as DeepEP. Only the slots of pairs are computed in advance."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.parallel import for_rows, row_runner
from foremoe.distributed.group import Group
from foremoe.runtime.holes import Lack, Row
from foremoe.runtime.kernels.slots import SlottedTables, slot_rows
from foremoe.runtime.replay import Compared, require_shape

# Letters: M micro-steps, L layers, N rows, T tokens and K top-k of this source, E experts, P physical slots of all ranks, I
# holes.


@dataclass(frozen=True, slots=True, eq=False)
class Slotted:
    """Known experts and slots of one row, as int32 tensors on the device.

    Attributes:
        expert_TK: Experts of each token. The entries of holes are arbitrary.
        slot_TK: Physical slot of each pair. It is -1 for holes and for the repetition of an expert that a token has twice.
        hole_I: Tokens whose routing is not known.
        num_known: Number of pairs that have a slot.
    """

    expert_TK: torch.Tensor
    slot_TK: torch.Tensor
    hole_I: torch.Tensor
    num_known: int


class SlottedRows(Compared):
    """Rows whose routing is known on all ranks and matches the plan. Any number of tokens in them may be holes.

    Args:
        routing: Known rows of this source, [T, K].
        split_MLP: Number of pairs that the plan sends from this source to each slot.
        most_bytes: Limit in bytes of the host memory for the slots. Rows beyond the limit count as unknown.
        group: The EP group. Creating this object is collective.
        device: Device on which layers run.

    Attributes:
        lack_ML: The largest `Lack` of each row over all ranks.
    """

    def __init__(
        self, routing: Mapping[Row, Array], expert_MLGS: Array, split_MLP: Array, *, num_experts: int, most_bytes: int,
        group: Group, device: torch.device,
    ) -> None:  # fmt: skip
        super().__init__()
        self._device, lack_ML = device, np.full(split_MLP.shape[:2], Lack.UNTOLD, np.uint8)
        known, num_bytes = dict[Row, Array](), 0
        for row, topk_TK in routing.items():
            num_bytes += 4 * (2 * topk_TK.size + len(topk_TK))
            lack_ML[row] = Lack.MEMORY
            if num_bytes <= most_bytes:
                known[row] = topk_TK
        topks, at = list(known.values()), tuple(np.array(list(known), np.int64).reshape(-1, 2).T)
        self._shape_N = [tuple(topk_TK.shape) for topk_TK in topks]
        K = topks[0].shape[1] if topks else 1
        num_tokens_N = np.array([len(topk_TK) for topk_TK in topks], np.int64)
        self._begin_N = np.concatenate([[0], np.cumsum((2 * K + 1) * num_tokens_N)]).astype(np.int64)
        num = int(self._begin_N[-1])
        pinned = device.type == "cuda"
        self._numbers_X = (
            torch.empty(num, dtype=torch.int32, pin_memory=True) if pinned else torch.from_numpy(np.empty(num, np.int32))
        )
        numbers_X, planned_N = self._numbers_X.numpy(), np.zeros(len(topks), bool)
        self._num_known_N, self._num_holes_N = np.zeros(len(topks), np.int64), np.zeros(len(topks), np.int64)
        tables = np.ascontiguousarray(expert_MLGS[at], np.int32), np.ascontiguousarray(split_MLP[at], np.int32)
        rows = SlottedTables(self._begin_N, num_tokens_N, *tables, num_experts, K)

        def block(low: int, high: int) -> None:
            for begin, topk_TK in zip(self._begin_N[low:high], topks[low:high], strict=True):
                numbers_X[begin : begin + topk_TK.size] = topk_TK.reshape(-1)
            slot_rows(low, high, rows, numbers_X, planned_N, self._num_known_N, self._num_holes_N)

        with row_runner():
            for_rows(block, len(topks), rows_per_block=8, whole=True)
        lack_ML[at] = np.where(planned_N, Lack.NONE, Lack.DIFFERS)
        lacks = [np.frombuffer(lacks, np.uint8).reshape(lack_ML.shape) for lacks in group.gather(lack_ML.tobytes())]
        self.lack_ML: Array = np.maximum.reduce(lacks)
        self._number = {row: n for n, row in enumerate(known) if not self.lack_ML[row]}

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the host memory that the slots occupy."""
        return int(self._numbers_X.nbytes)

    def row(self, micro_step: int, layer: int, shape: torch.Size) -> Slotted | None:
        """Returns the slots of a row. Returns None on all ranks if the row is not known.

        Raises:
            InputError: The routing does not have the same shape as when the stage began.
        """
        n = self._number.get((micro_step, layer))
        if n is None:
            return None
        require_shape(micro_step, layer, shape, self._shape_N[n])
        (T, K), begin = self._shape_N[n], self._begin_N[n]
        end = begin + 2 * T * K + int(self._num_holes_N[n])
        numbers = self._numbers_X[begin:end].to(self._device, non_blocking=True)
        expert_Z, slot_Z, hole_I = numbers.split([T * K, T * K, int(self._num_holes_N[n])])
        return Slotted(expert_Z.view(T, K), slot_Z.view(T, K), hole_I, int(self._num_known_N[n]))
