"""Known rows with holes. A hole is a token with unknown routing, which is sent to every expert with the router's weights.

Message sizes and permutations are therefore known before the stage. A token with K known experts sends K vectors, and a hole
sends one vector to each of the E experts. Most of a hole's vectors have a weight of 0. They add nothing to outputs or gradients
but cost as much as any other pair.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from foremoe.base.arrays import Array
from foremoe.base.parallel import for_rows, row_runner
from foremoe.distributed.group import Group
from foremoe.runtime.dispatch import Exchange
from foremoe.runtime.kernels.holes import HoledRows, find_holes, route_holed_rows
from foremoe.runtime.pairs import sum_of_pairs

# Letters: M micro-steps, L layers, N rows, T tokens and K top-k of this source, E experts, P physical slots of all ranks,
# G ranks, S slots of a rank, I holes, Z pairs of this source, Y pairs that this rank serves, X those of them that are not
# planned, H hidden size.

Row = tuple[int, int]


class Lack(enum.IntEnum):
    """Reasons why the routing of a row is not known on a rank."""

    NONE = 0
    UNTOLD = 1  # no routing was given
    DIFFERS = 2  # the routing differs from the plan
    HOLES = 3  # more tokens are unknown than there are spare places
    MEMORY = 4  # the routes of earlier rows use up the memory limit


@dataclass(frozen=True, slots=True, eq=False)
class Holes:
    """Holes of a source, and the pairs that the source sends for them in addition to the planned pairs.

    Attributes:
        expert_TK: For each row with holes, its experts, int32 [T, K].
        hole_I: For each row with holes, the tokens that are holes, int32 [I].
        extra_MLP: Number of unplanned pairs for each home slot, int32.
        home_slot_LE: Home slots of all experts, numbered as physical slots.
        left: For each row that must exchange counts, the reason as a `Lack`.
    """

    expert_TK: dict[Row, Array]
    hole_I: dict[Row, Array]
    extra_MLP: Array
    home_slot_LE: Array
    left: dict[Row, int]

    @classmethod
    def of(cls, routing: Mapping[Row, Array], split_MLP: Array, home_slot_LE: Array, spare: int, most_bytes: int) -> "Holes":
        """Finds the holes in `routing`, for which the plan has the split `split_MLP`.

        Args:
            spare: Maximum number of holes in a row. Rows with more holes are left out.
            most_bytes: Limit in bytes of the host memory for routes. Rows beyond the limit are left out.
        """
        num_ML: Array = split_MLP.sum(2, dtype=np.int64)
        # All other rows have T*K distinct pairs, so they have no holes.
        wanted = [row for row, topk_TK in routing.items() if topk_TK.ndim == 2 and topk_TK.size != num_ML[row]]
        extra_MLP, E = np.zeros(split_MLP.shape, np.int32), home_slot_LE.shape[1]
        found: dict[Row, tuple[Array, Array, Array]] = {}

        def block(low: int, high: int) -> None:
            for row in wanted[low:high]:
                expert_TK, extra_E = np.array(routing[row], np.int32, order="C"), np.zeros(E, np.int32)
                hole_T = np.empty(len(expert_TK), np.int32)
                found[row] = expert_TK, hole_T[: find_holes(expert_TK, extra_E, hole_T)].copy(), extra_E

        with row_runner():
            for_rows(block, len(wanted), rows_per_block=8, whole=True)
        fitting = {row: part for row, part in found.items() if len(part[1]) <= spare and part[0].shape[1] <= E}
        left = dict.fromkeys(found.keys() - fitting.keys(), Lack.HOLES)
        num_bytes = 0
        for row, topk_TK in routing.items():
            # A rank receives about as many pairs as it sends.
            num_bytes += 4 * (5 * topk_TK.size + (4 * E * len(fitting[row][1]) if row in fitting else 0))
            if num_bytes > most_bytes:
                left[row] = Lack.MEMORY
                fitting.pop(row, None)
        for (m, layer), (_, _, extra_E) in fitting.items():
            np.add.at(extra_MLP[m, layer], home_slot_LE[layer], extra_E)
        experts, holes = ({row: part[i] for row, part in fitting.items()} for i in (0, 1))
        return cls(experts, holes, extra_MLP, home_slot_LE, {row: int(lack) for row, lack in left.items()})


@dataclass(frozen=True, slots=True, eq=False)
class HoledRoute:
    """Route of one row's pairs to their slots and back, as int32 tensors on the device."""

    exchange: Exchange
    num_topk: int
    num_S: list[int]  # pairs for each slot of this rank
    num_planned_S: list[int]  # planned ones among `num_S`
    num_known: int  # planned pairs of this source's holes
    expert_TK: torch.Tensor  # experts of tokens; arbitrary for holes
    token_Z: torch.Tensor  # tokens of the pairs, sorted by physical slot
    prob_Z: torch.Tensor  # indices of the pairs' weights in the weights of all tokens and experts
    by_token_Z: torch.Tensor  # first K pairs of every token
    rest_Z: torch.Tensor  # remaining pairs of every hole
    hole_I: torch.Tensor
    by_slot_Y: torch.Tensor  # order of received pairs, from arrival (source, then slot) to slots
    by_arrival_Y: torch.Tensor  # inverse of `by_slot_Y`
    extra_X: torch.Tensor  # received pairs that are not planned, by slot

    def rows_of(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Returns the hidden state of every pair, sorted by slot. Differentiable."""
        rows_ZH: torch.Tensor = _TokensToRows.apply(x_TH, self)
        return rows_ZH

    def tokens_of(self, rows_ZH: torch.Tensor) -> torch.Tensor:
        """Returns each token's sum over its pairs. Differentiable."""
        y_TH: torch.Tensor = _RowsToTokens.apply(rows_ZH, self)
        return y_TH

    def sums(self, rows_ZH: torch.Tensor) -> torch.Tensor:
        """Returns each token's sum over its pairs."""
        y_TH = sum_of_pairs(rows_ZH, self.by_token_Z, self.num_topk)
        if len(self.rest_Z):
            rest_IH = sum_of_pairs(rows_ZH, self.rest_Z, len(self.rest_Z) // len(self.hole_I))
            y_TH.index_add_(0, self.hole_I, rest_IH)  # each index occurs once
        return y_TH


def numbers_of(num: int, device: torch.device) -> torch.Tensor:
    """Returns an int32 tensor in host memory from which a device can copy asynchronously."""
    if device.type == "cuda":
        return torch.empty(num, dtype=torch.int32, pin_memory=True)
    # numpy requests huge pages. Without them, first access to the pages would take longer than computing the routes.
    return torch.from_numpy(np.empty(num, np.int32))


class HoledRoutes:
    """Routes of all rows that have holes on any rank. Creating this object is not collective.

    Args:
        expert_TK: For each row, the experts of this source's tokens, int32 [T, K].
        holes: Holes of this source.
        received_GMLS: Number of pairs that each source sends to each of this rank's slots.
        planned_GMLS: Number of planned pairs among `received_GMLS`.
    """

    def __init__(
        self, expert_TK: Mapping[Row, Array], holes: Holes, expert_MLGS: Array, split_MLP: Array,
        planned_GMLS: Array, received_GMLS: Array, *, group: Group, device: torch.device,
    ) -> None:  # fmt: skip
        self._group, self._device = group, device
        self.rows, at = list(expert_TK), tuple(np.array(list(expert_TK), np.int64).reshape(-1, 2).T)
        topks = list(expert_TK.values())
        self._shape_N = [topk_TK.shape for topk_TK in topks]
        none_I = np.empty(0, np.int32)
        self._hole_N = [holes.hole_I.get(row, none_I) for row in self.rows]
        num_tokens_N, num_holes_N = (np.array([len(x) for x in parts], np.int64) for parts in (topks, self._hole_N))
        self._topk = topks[0].shape[1] if topks else 1
        by_row = lambda x_GMLS: np.ascontiguousarray(np.moveaxis(x_GMLS, 0, 2)[at], np.int32)  # noqa: E731
        planned_NGS, received_NGS = by_row(planned_GMLS), by_row(received_GMLS)
        split_NP, extra_NP = split_MLP[at].astype(np.int32), holes.extra_MLP[at]
        E, K = holes.home_slot_LE.shape[1], self._topk
        self._num_sent_N = (num_tokens_N - num_holes_N) * K + num_holes_N * E
        self._num_extra_NS = (received_NGS - planned_NGS).sum(1)
        num_N = 2 * num_tokens_N * K + 2 * self._num_sent_N + num_holes_N * (1 + E - K)
        num_N += 2 * received_NGS.sum((1, 2)) + self._num_extra_NS.sum(1)
        self._begin_N = np.concatenate([[0], np.cumsum(num_N)]).astype(np.int64)
        num = int(self._begin_N[-1])
        self._numbers_X = numbers_of(num, device)
        rows = HoledRows(
            self._begin_N, num_tokens_N, num_holes_N, np.ascontiguousarray(expert_MLGS[at], np.int32), split_NP,
            split_NP + extra_NP, planned_NGS, received_NGS, holes.home_slot_LE[at[1]].astype(np.int32), K,
        )  # fmt: skip
        self.planned_N, numbers_X = np.zeros(len(topks), bool), self._numbers_X.numpy()
        # A hole has E pairs. Those that are not extra are planned.
        self._num_known_N = num_holes_N * E - extra_NP.sum(1)

        def block(low: int, high: int) -> None:
            for n in range(low, high):
                begin, size, holes_I = self._begin_N[n], topks[n].size, self._hole_N[n]
                numbers_X[begin : begin + size] = topks[n].reshape(-1)
                at_holes = begin + 2 * size + 2 * self._num_sent_N[n] + len(holes_I) * (E - K)
                numbers_X[at_holes : at_holes + len(holes_I)] = holes_I
            route_holed_rows(low, high, rows, numbers_X, self.planned_N)

        with row_runner():
            for_rows(block, len(topks), rows_per_block=8, whole=True)
        G, S = expert_MLGS.shape[2:]
        self._sent_NG, self._received_NG = (split_NP + extra_NP).reshape(-1, G, S).sum(2), received_NGS.sum(2)
        self._num_NS, self._num_planned_NS = received_NGS.sum(1), planned_NGS.sum(1)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the host memory that the routes occupy."""
        return int(self._numbers_X.nbytes)

    def shape(self, n: int) -> tuple[int, ...]:
        """Returns the shape [T, K] of a row's routing."""
        return tuple(self._shape_N[n])

    def route(self, n: int) -> HoledRoute:
        """Returns the route of a row."""
        numbers = self._numbers_X[self._begin_N[n] : self._begin_N[n + 1]].to(self._device, non_blocking=True)
        (T, K), holes, sent = self._shape_N[n], len(self._hole_N[n]), int(self._num_sent_N[n])
        num_S, extra = self._num_NS[n].tolist(), int(self._num_extra_NS[n].sum())
        sizes = [T * K, sent, sent, T * K]
        rest = len(numbers) - sum(sizes) - holes - 2 * sum(num_S) - extra
        expert_Z, *parts = numbers.split([*sizes, rest, holes, sum(num_S), sum(num_S), extra])
        exchange = Exchange(self._group, self._sent_NG[n].tolist(), self._received_NG[n].tolist())
        planned = self._num_planned_NS[n].tolist()
        return HoledRoute(exchange, K, num_S, planned, int(self._num_known_N[n]), expert_Z.view(T, K), *parts)


class _TokensToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: torch.Tensor, route: HoledRoute) -> torch.Tensor:
        ctx.route = route
        return x_TH.index_select(0, route.token_Z)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ZH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ctx.route.sums(grad_ZH), None


class _RowsToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_ZH: torch.Tensor, route: HoledRoute) -> torch.Tensor:
        ctx.route = route
        return route.sums(rows_ZH)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad_TH.index_select(0, ctx.route.token_Z), None
