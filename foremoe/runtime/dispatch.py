"""Dispatch, which sends pairs to the ranks whose slots serve them, and combine, which brings the results back.

Combine applies the router probabilities on the source rank. The probabilities are therefore not sent, the experts do not need
them, and their gradient is computed on the rank of the router. In exchange, each source keeps the experts' outputs for its own
pairs until the backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.autograd.function import once_differentiable

from foremoe.distributed.group import Group
from foremoe.runtime.pairs import sum_of_pairs, sum_of_pairs_backward
from foremoe.runtime.remap import narrow

# Letters: T tokens, K top-k, Z = T*K pairs of this source, Y pairs that this rank serves, G ranks, S slots per rank,
# P = G*S physical slots, C = S + 1 columns of a count message, H hidden size.


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """Message sizes of one row, stored on the host."""

    group: Group
    num_sent_G: list[int]  # pairs of this source by destination
    num_received_G: list[int]  # pairs for this rank by source

    def there(self, rows_ZH: torch.Tensor) -> torch.Tensor:
        """Sends vectors in slot order to the ranks that serve them. Returns received vectors in order of arrival. Collective."""
        return self._send(rows_ZH, self.num_received_G, self.num_sent_G)

    def back(self, rows_YH: torch.Tensor) -> torch.Tensor:
        """Sends vectors in order of arrival back to their sources. Returns this source's vectors in slot order. Collective."""
        return self._send(rows_YH, self.num_sent_G, self.num_received_G)

    def _send(self, rows: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> torch.Tensor:
        if self.group.size == 1:
            return rows
        received = rows.new_empty(sum(num_received_G), rows.shape[1])
        self.group.all_to_all(received, rows.contiguous(), num_received_G, num_sent_G)
        return received


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """Numbers of pairs that this rank sends and receives."""

    exchange: Exchange
    received_GS: torch.Tensor  # int64, pairs for this rank's slots by source
    num_S: list[int]  # pairs for each slot of this rank, on the host
    complete: bool  # whether every rank has its replicas


def exchange_counts(slot_Z: torch.Tensor, num_slots: int, group: Group, complete: bool) -> Counts:
    """Tells every rank how many pairs to expect and whether this rank has all its replicas (`complete`). Collective.

    `slot_Z`, int64, holds the physical slot of every pair.
    """
    G, S = group.size, num_slots
    sent_P = slot_Z.new_zeros(G * S).scatter_add_(0, slot_Z, torch.ones_like(slot_Z))
    counts_2GC = slot_Z.new_full((2, G, S + 1), int(complete))  # sent and received
    sent_GC, received_GC = counts_2GC
    sent_GC[:, :S] = sent_P.view(G, S)
    group.all_to_all(received_GC, sent_GC, [1] * G, [1] * G)
    # The host waits for the device only here, because it needs the message sizes.
    on_host_2GC = counts_2GC.cpu().numpy()
    exchange = Exchange(group, *on_host_2GC[:, :, :S].sum(2).tolist())
    num_S, all_complete = on_host_2GC[1, :, :S].sum(0).tolist(), bool(on_host_2GC[1, :, S].all())
    return Counts(exchange, received_GC[:, :S], num_S, all_complete)


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Route of one row's pairs to their slots and back: message sizes, and permutations as int32 or int64 on the device."""

    exchange: Exchange
    num_topk: int
    num_S: list[int]  # pairs for each slot of this rank
    end_S: torch.Tensor  # int32, end of each slot's pairs when sorted by slot
    by_slot_Z: torch.Tensor  # order of the source's pairs, from token order to physical slots
    by_token_Z: torch.Tensor  # inverse of `by_slot_Z`
    by_slot_Y: torch.Tensor  # order of received pairs, from arrival (source, then slot) to slots
    by_arrival_Y: torch.Tensor  # inverse of `by_slot_Y`

    @classmethod
    def of(cls, slot_TK: torch.Tensor, counts: Counts) -> Self:
        """Returns the route of pairs whose slots are known."""
        by_slot_Z = torch.argsort(narrow(slot_TK.reshape(-1), counts.received_GS.numel()), stable=True)
        # Pairs of one source for one slot stay together. The counts determine how far such a block moves.
        num_GS, num_SG = counts.received_GS.contiguous(), counts.received_GS.t().contiguous()
        moved_GS = num_SG.view(-1).cumsum(0).view_as(num_SG).t() - num_GS.view(-1).cumsum(0).view_as(num_GS)
        moved_Y = torch.repeat_interleave(moved_GS.reshape(-1), num_GS.view(-1), output_size=sum(counts.num_S))
        by_arrival_Y = torch.arange(len(moved_Y), device=moved_Y.device) + moved_Y
        order = (by_slot_Z, _inverse(by_slot_Z), _inverse(by_arrival_Y), by_arrival_Y)
        end_S = counts.received_GS.sum(0).cumsum(0, dtype=torch.int32)
        return cls(counts.exchange, slot_TK.shape[1], counts.num_S, end_S, *order)


# Index tensors are separate arguments, so that they are saved tensors and checkpointing can drop them.
# Both functions only permute, so backward applies the inverse permutation, without scatters to duplicate targets or atomics.


class Dispatch(torch.autograd.Function):
    """Maps x_TH to rows_YH, the hidden states of the pairs that this rank serves, sorted by slot.

    `anchor` is a tensor that requires a gradient but never gets one. It puts the function into the autograd graph even if x needs
    no gradient, because the backward pass is collective and the expert weights still need gradients. The backward pass calls
    `launch` after its exchange, which is the last exchange of the row.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TH: torch.Tensor, anchor: torch.Tensor, by_token_Z: torch.Tensor, by_arrival_Y: torch.Tensor, route: Route,
        launch: Callable[[], None],
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(by_token_Z, by_arrival_Y)
        ctx.exchange, ctx.num_topk, ctx.launch = route.exchange, route.num_topk, launch
        arrived_YH = route.exchange.there(x_TH.index_select(0, route.by_slot_Z // route.num_topk))
        return arrived_YH.index_select(0, route.by_slot_Y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_YH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        by_token_Z, by_arrival_Y = ctx.saved_tensors
        back_ZH = ctx.exchange.back(grad_YH.index_select(0, by_arrival_Y))
        ctx.launch()
        grad_TH = sum_of_pairs(back_ZH, by_token_Z, ctx.num_topk) if ctx.needs_input_grad[0] else None
        return grad_TH, None, None, None, None, None


class Combine(torch.autograd.Function):
    """Maps y_YH, the outputs of the served pairs in the order of slots, to y_TH, the weighted sum over each token's pairs."""

    @staticmethod
    def forward(
        ctx: Any, y_YH: torch.Tensor, weight_TK: torch.Tensor, by_slot_Z: torch.Tensor, by_slot_Y: torch.Tensor, route: Route
    ) -> torch.Tensor:
        back_ZH = route.exchange.back(y_YH.index_select(0, route.by_arrival_Y))
        ctx.save_for_backward(weight_TK, by_slot_Z, by_slot_Y, back_ZH if ctx.needs_input_grad[1] else None)
        ctx.exchange = route.exchange
        return sum_of_pairs(back_ZH, route.by_token_Z, route.num_topk, weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Under non-reentrant checkpointing, this access runs the forward pass again. It comes before this function's own
        # exchange, so that it happens at the same point on all ranks.
        weight_TK, by_slot_Z, by_slot_Y, back_ZH = ctx.saved_tensors
        sent_ZH, grad_TK = sum_of_pairs_backward(grad_TH, back_ZH, by_slot_Z, weight_TK)
        return ctx.exchange.there(sent_ZH).index_select(0, by_slot_Y), grad_TK, None, None, None


def _inverse(order: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
