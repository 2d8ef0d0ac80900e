"""Replayed rows. Their routing is known before the stage, and all their routes are computed in one pass when it begins."""

from collections.abc import Mapping

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows, row_runner
from foremoe.distributed.group import Group, first_fault
from foremoe.runtime.dispatch import Exchange, Route
from foremoe.runtime.holes import HoledRoute, HoledRoutes, Holes, Lack, numbers_of
from foremoe.runtime.kernels.routes import KnownRows, route_rows

# Letters: N rows whose routing is known here, M micro-steps, L layers, G ranks, E experts, S slots of a rank, P = G*S physical
# slots, T tokens, K top-k, Z = T*K pairs of this source, Y pairs that this rank serves, X all numbers of all rows.

Routing = Mapping[tuple[int, int], torch.Tensor | Array]  # (micro-step, layer) -> topk_TK, any integer dtype


class Compared:
    """Comparison of known routing with the routing that layers receive. The host waits for the device only once, at the end."""

    def __init__(self) -> None:
        self._differ: list[tuple[tuple[int, int], torch.Tensor]] = []
        self._first: dict[tuple[int, int], torch.Tensor] = {}

    def compare(self, micro_step: int, layer: int, num_differ: torch.Tensor, first: torch.Tensor | None = None) -> None:
        """Stores on the device how many pairs of a row differ from the known experts, and the first token with such a pair."""
        self._differ.append(((micro_step, layer), num_differ))
        if first is not None:
            self._first.setdefault((micro_step, layer), first)

    @property
    def num_compared(self) -> int:
        """Number of rows compared so far, including recomputed ones."""
        return len(self._differ)

    def fault(self) -> str:
        """Returns a message about the first row in which a layer received routing other than the known one, or an empty string.

        The host waits for the device once.
        """
        if not self._differ:
            return ""
        num_differ = torch.stack([num for _, num in self._differ]).cpu()
        for ((m, layer), _), num in zip(self._differ, num_differ.tolist(), strict=True):
            if num:
                first = f", token {int(self._first[m, layer])} first" if (m, layer) in self._first else ""
                return f"{num} pairs of micro-step {m}, layer {layer} differ from the experts given before the stage{first}"
        return ""


class ReplayedRows(Compared):
    """Routes of those rows in which the routing of every rank is known and matches the planned counts.

    Message sizes and all permutations follow from the plan. A layer therefore does not remap or sort pairs and does not exchange
    counts, and the host does not wait for the device. Until the stage ends, the host keeps twelve bytes for each pair of this
    source and eight bytes for each pair that this rank serves. It copies them to the device when a layer runs. The caller of
    `route` must compare the routing that the layer receives with the known routing (`compare`) and check the result at the end
    (`fault`).

    Args:
        routing: Routing of this source's known rows. Rows with padding and all rows that are not listed exchange counts.
        expert_MLGS: Experts in the plan's slots. -1 marks an empty slot.
        split_MLP: Number of pairs that the plan sends from this source to each slot.
        received_GMLS: Number of pairs that the plan sends from each source to each of this rank's slots.
        num_experts: Number of experts, E.
        group: The EP group. Creating this object is collective.
        device: Device on which layers run.
        holes: Holes of this source, and the pairs that the holes of each source add to `received_GMLS`. If None, rows with holes
            exchange counts. Either all ranks or none must pass this argument.

    Attributes:
        lack_ML: The largest `Lack` of each row over all ranks.

    Raises:
        InputError: A row does not exist or its routing is not [T, K]. Raised on all ranks.
    """

    def __init__(
        self, routing: Routing, expert_MLGS: Array, split_MLP: Array, received_GMLS: Array, *, num_experts: int, group: Group,
        device: torch.device, holes: tuple[Holes, Array] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._group, self._device = group, device
        known = {row: _on_host(topk_TK) for row, topk_TK in routing.items()}
        fault = _routing_fault(known, expert_MLGS.shape[:2])
        lack_ML = np.full(expert_MLGS.shape[:2], Lack.UNTOLD, np.uint8)
        self._holed: HoledRoutes | None = None
        if not fault:
            num_planned_ML: Array = split_MLP.sum(2, dtype=np.int64)
            for row in known:
                lack_ML[row] = Lack.DIFFERS
            if holes is not None:
                known = self._take_holed(known, holes, (expert_MLGS, split_MLP, received_GMLS), lack_ML)
            known = {row: topk_TK for row, topk_TK in known.items() if topk_TK.size == num_planned_ML[row]}
            at = tuple(np.array(list(known), np.int64).reshape(-1, 2).T)
            self._make(known, expert_MLGS[at], split_MLP[at], np.moveaxis(received_GMLS, 0, 2)[at], num_experts)
            lack_ML[at] = np.where(self._planned_N, 0, Lack.DIFFERS)
        answers = group.gather((fault, lack_ML.tobytes()))
        fault = first_fault([fault for fault, _ in answers])
        if fault:
            raise InputError(fault)
        lacks = [np.frombuffer(lacks, np.uint8).reshape(lack_ML.shape) for _, lacks in answers]
        self.lack_ML: Array = np.maximum.reduce(lacks)
        self._number = {row: n for n, row in enumerate(known) if not self.lack_ML[row]}
        rows: list[tuple[int, int]] = [] if self._holed is None else self._holed.rows
        self._holed_number = {row: n for n, row in enumerate(rows) if not self.lack_ML[row]}

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the host memory that this rank's routes occupy."""
        return int(self._numbers_X.nbytes) + (0 if self._holed is None else self._holed.num_bytes)

    def _take_holed(
        self, known: dict[tuple[int, int], Array], given: tuple[Holes, Array], plan: tuple[Array, Array, Array], lack_ML: Array
    ) -> dict[tuple[int, int], Array]:
        """Computes the routes of rows with holes on any rank. Returns the remaining rows."""
        holes, extra_GMLS = given
        expert_MLGS, split_MLP, received_GMLS = plan
        for row, lack in holes.left.items():
            lack_ML[row] = lack
        others_ML: Array = extra_GMLS.sum(axis=(0, 3)) > 0
        holed = {
            row: holes.expert_TK[row] if row in holes.expert_TK else np.array(topk_TK, np.int32, order="C")
            for row, topk_TK in known.items()
            if row not in holes.left and (row in holes.expert_TK or others_ML[row])
        }
        self._holed = HoledRoutes(
            holed,
            holes,
            expert_MLGS,
            split_MLP,
            received_GMLS,
            received_GMLS + extra_GMLS,
            group=self._group,
            device=self._device,
        )
        for row, planned in zip(self._holed.rows, self._holed.planned_N, strict=True):
            lack_ML[row] = 0 if planned else Lack.DIFFERS
        return {row: topk_TK for row, topk_TK in known.items() if row not in holed and row not in holes.left}

    def _make(self, known: dict[tuple[int, int], Array], expert_NGS: Array, split_NP: Array, received_NGS: Array, E: int) -> None:
        self._shape_N = [topk_TK.shape for topk_TK in known.values()]
        num_pairs_N = np.array([topk_TK.size for topk_TK in known.values()], np.int64)
        num_served_N = received_NGS.sum((1, 2), np.int64)
        self._begin_N = np.concatenate([[0], np.cumsum(3 * num_pairs_N + 2 * num_served_N)])
        num = int(self._begin_N[-1])
        self._numbers_X = numbers_of(num, self._device)
        self._planned_N, numbers_X = np.zeros(len(known), bool), self._numbers_X.numpy()
        int32 = [np.ascontiguousarray(x, np.int32) for x in (expert_NGS, split_NP, received_NGS)]
        rows = KnownRows(self._begin_N, num_pairs_N, int32[0], int32[1], int32[2], E)
        topks = list(known.values())

        def block(low: int, high: int) -> None:
            for begin, topk_TK in zip(self._begin_N[low:high], topks[low:high], strict=True):
                numbers_X[begin : begin + topk_TK.size] = topk_TK.reshape(-1)
            route_rows(low, high, rows, numbers_X, self._planned_N)

        with row_runner():
            for_rows(block, len(topks), rows_per_block=8, whole=True)
        G, S = expert_NGS.shape[1:]
        messages = zip(split_NP.reshape(-1, G, S).sum(2).tolist(), received_NGS.sum(2).tolist(), strict=True)
        self._exchange_N = [Exchange(self._group, *sizes) for sizes in messages]
        num_NS = received_NGS.sum(1)
        self._num_NS: list[list[int]] = num_NS.tolist()
        self._end_NS = torch.from_numpy(num_NS.cumsum(1, dtype=np.int32)).to(self._device).unbind()

    def route(self, micro_step: int, layer: int, shape: torch.Size) -> tuple[torch.Tensor, Route] | None:
        """Returns the experts of a row (int32 [T, K]) and its route. Returns None on all ranks if the row must exchange counts.

        Args:
            shape: Shape [T, K] of the routing that the layer received.

        Raises:
            InputError: The routing does not have the same shape as when the stage began.
        """
        n = self._find(micro_step, layer, shape)
        if n is None:
            return None
        numbers = self._numbers_X[self._begin_N[n] : self._begin_N[n + 1]].to(self._device, non_blocking=True)
        num_S, num_pairs = self._num_NS[n], shape.numel()
        known_Z, *order = numbers.split_with_sizes([num_pairs] * 3 + [(numbers.shape[0] - 3 * num_pairs) // 2] * 2)
        return known_Z.view(shape), Route(self._exchange_N[n], shape[1], num_S, self._end_NS[n], *order)

    def holed_route(self, micro_step: int, layer: int, shape: torch.Size) -> HoledRoute | None:
        """Returns the route of a row that has holes on any rank. Returns None if the row has no holes. See `route`."""
        n = self._holed_number.get((micro_step, layer))
        if n is None:
            return None
        assert self._holed is not None
        require_shape(micro_step, layer, shape, self._holed.shape(n))
        return self._holed.route(n)

    def experts(self, micro_step: int, layer: int, shape: torch.Size) -> torch.Tensor | None:
        """Returns the experts that `route` returns, without the route."""
        n = self._find(micro_step, layer, shape)
        if n is None:
            return None
        begin = self._begin_N[n]
        return self._numbers_X[begin : begin + shape.numel()].to(self._device, non_blocking=True).view(shape)

    def _find(self, micro_step: int, layer: int, shape: torch.Size) -> int | None:
        n = self._number.get((micro_step, layer))
        if n is not None:
            require_shape(micro_step, layer, shape, self._shape_N[n])
        return n

    def verdict(self) -> str:
        """Returns, on all ranks, the first `fault` that any rank has found. Collective."""
        return first_fault(self._group.gather(self.fault())) if self._number or self._holed_number else ""


def require_shape(micro_step: int, layer: int, shape: torch.Size, given: tuple[int, ...]) -> None:
    """Raises an InputError if a layer received routing whose shape differs from that of the routing given before the stage."""
    if shape != given:
        told = f"micro-step {micro_step}, layer {layer} has routing {list(shape)} and was given {list(given)}"
        raise InputError(f"{told} before the stage; give it the routing that layers get, or leave the row out.")


def _on_host(topk_TK: torch.Tensor | Array) -> Array:
    return topk_TK.cpu().numpy() if isinstance(topk_TK, torch.Tensor) else topk_TK


def _routing_fault(known: dict[tuple[int, int], Array], shape: tuple[int, ...]) -> str:
    """Returns the reason why routing cannot belong to a plan with ``shape`` [M, L], or an empty string."""
    for row, topk_TK in known.items():
        if not (row[0] in range(shape[0]) and row[1] in range(shape[1])):
            return f"routing has the row {row}; the plan has {shape[0]} micro-steps and {shape[1]} layers, from 0."
        if topk_TK.ndim != 2 or topk_TK.dtype.kind not in "iu":
            return f"routing of {row} must be integers [T, K]; got {topk_TK.dtype} {list(topk_TK.shape)}."
    return ""
