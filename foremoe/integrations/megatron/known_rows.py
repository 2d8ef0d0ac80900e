"""Dispatch of rows whose routing is known before the stage. It does not sort, gather counts or read from the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from foremoe.integrations.megatron.dispatcher import OverSlots
from foremoe.runtime.dispatch import Route
from foremoe.runtime.holes import HoledRoute
from foremoe.runtime.permute import Divide, Join, PairsToTokens, Permute, TokensToPairs
from foremoe.runtime.slotted import Slotted

# Letters: T tokens of a source, K top-k, E experts, S slots of a rank, Z = T*K pairs of this source sorted by slot, Y pairs that
# this rank serves, H hidden size.


@dataclass(frozen=True, slots=True, eq=False)
class KnownRow:
    """Experts of one row, int64 [T, K] on the device, and the row's route.

    Attributes:
        drift: Number of pairs of unknown tokens, on the device, or None if no rank has unknown tokens.
    """

    topk_TK: torch.Tensor
    route: Route | HoledRoute
    drift: torch.Tensor | None = None

    def rows_of(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Returns the hidden state of every pair of this source, sorted by slot. Differentiable."""
        if isinstance(self.route, HoledRoute):
            return self.route.rows_of(x_TH)
        rows_ZH: torch.Tensor = TokensToPairs.apply(x_TH, self.route.by_slot_Z, self.route.by_token_Z, self.route.num_topk)
        return rows_ZH

    def probs_of(self, probs_TE: torch.Tensor, routing_TE: torch.Tensor) -> torch.Tensor:
        """Returns the router's weight for every pair of this source, sorted by slot. Differentiable."""
        if isinstance(self.route, HoledRoute):
            return (probs_TE * routing_TE).reshape(-1).index_select(0, self.route.prob_Z)
        probs_Z: torch.Tensor = Permute.apply(
            probs_TE.gather(1, self.topk_TK).view(-1), self.route.by_slot_Z, self.route.by_token_Z
        )
        return probs_Z

    def tokens_of(self, rows_ZH: torch.Tensor) -> torch.Tensor:
        """Returns each token's sum over its pairs. Differentiable."""
        if isinstance(self.route, HoledRoute):
            return self.route.tokens_of(rows_ZH)
        y_TH: torch.Tensor = PairsToTokens.apply(rows_ZH, self.route.by_slot_Z, self.route.by_token_Z, self.route.num_topk)
        return y_TH

    def served_of(self, probs_Y: torch.Tensor) -> Served:
        """Returns the pairs that slots serve, given the weights of all received pairs."""
        if not isinstance(self.route, HoledRoute):
            return Served(self.route.num_S)
        extra_S = [all_of - planned for all_of, planned in zip(self.route.num_S, self.route.num_planned_S, strict=True)]
        weighted_X = probs_Y.detach().index_select(0, self.route.extra_X) != 0
        return Served(self.route.num_planned_S, extra_S, weighted_X)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Pairs that this rank's slots served in one row.

    Attributes:
        num_S: Number of planned pairs, by slot.
        extra_S: Number of pairs of unknown tokens, by slot. Most of these pairs have a weight of 0.
        weighted_X: Whether each pair of unknown tokens has a weight other than 0, sorted by slot, on the device.
    """

    num_S: list[int]
    extra_S: list[int] | None = None
    weighted_X: torch.Tensor | None = None

    def counts(self) -> list[int]:
        """Returns the number of pairs whose weight is not 0, by slot. The host waits for the device."""
        if self.weighted_X is None or self.extra_S is None:
            return self.num_S
        extra = [int(part.sum()) for part in self.weighted_X.cpu().split(self.extra_S)]
        return [planned + more for planned, more in zip(self.num_S, extra, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class SlottedRow:
    """Known row for the flex dispatcher.

    Attributes:
        of: Slots of the row.
        home_slot_E: Home slots of the layer, int64 on the device, to which unknown tokens go.
        drift: Number of pairs of unknown tokens, on the device.
    """

    of: Slotted
    home_slot_E: torch.Tensor
    drift: torch.Tensor

    def slots_of(self, probs_TE: torch.Tensor, routing_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns each token's physical slots (int64 [T, K]) and their weights. Unused entries are -1 and 0. Differentiable."""
        slot_TK = self.of.slot_TK.long()
        probs_TK = probs_TE.gather(1, self.of.expert_TK.long()).masked_fill(slot_TK < 0, 0.0)
        if not len(self.of.hole_I):
            return slot_TK, probs_TK
        hole_I = self.of.hole_I.long()
        own_IE = probs_TE.index_select(0, hole_I).masked_fill(~routing_TE.index_select(0, hole_I), -torch.inf)
        probs_IK, expert_IK = own_IE.topk(slot_TK.shape[1], dim=1)
        none_IK = probs_IK == -torch.inf
        slot_IK = self.home_slot_E[expert_IK].masked_fill(none_IK, -1)
        return slot_TK.index_copy(0, hole_I, slot_IK), probs_TK.index_copy(0, hole_I, probs_IK.masked_fill(none_IK, 0.0))


class KnownDispatcher(OverSlots, MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches rows whose routes are known, with Megatron's own messages.

    The row contains all permutations and message sizes. The host therefore never waits for the device, with or without
    `moe_permute_fusion`, and every permutation is a gather, in forward as in backward.

    Pairs of redundant slots are exchanged as a separate tensor, so experts take and return either one tensor or two.

    Attributes:
        row: Row to dispatch. Set before `dispatch_preprocess`.
        served: Pairs of the row that slots serve. Set by `dispatch_postprocess`.
    """

    def __init__(self, moe: MoELayer, num_slots: int) -> None:
        super().__init__(moe, num_slots)
        self.row: KnownRow | None = None
        self.served: Served | None = None
        self._num_base = moe.num_local_experts

    def dispatch_preprocess(self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor) -> Any:
        row, self.served = self._row, None
        exchange = row.route.exchange
        self.hidden_shape, self.tokens_per_expert = hidden_states.shape, None
        self.input_splits, self.output_splits = exchange.num_sent_G, exchange.num_received_G
        probs_Z = row.probs_of(probs, routing_map)
        return row.rows_of(hidden_states.reshape(-1, self.hidden_shape[-1])), probs_Z

    def dispatch_postprocess(self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor) -> Any:
        route = self._row.route
        self.served = self._row.served_of(global_probs)
        orders, parts = (route.by_slot_Y, route.by_arrival_Y), self._parts()
        num_S = torch.tensor(route.num_S)  # on the host, where experts read it
        if parts is None:
            return Permute.apply(global_input_tokens, *orders), num_S, Permute.apply(global_probs, *orders)
        return Divide.apply(global_input_tokens, *parts), num_S, Divide.apply(global_probs, *parts)

    def combine_preprocess(self, hidden_states: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> Any:
        route, parts = self._row.route, self._parts()
        if parts is None:
            return Permute.apply(hidden_states, route.by_arrival_Y, route.by_slot_Y)
        return Join.apply(*hidden_states, *parts)

    def _parts(self) -> tuple[torch.Tensor, ...] | None:
        """Returns where base slots' and redundant slots' pairs are among received pairs. None if no redundant slot has pairs."""
        route = self._row.route
        num = sum(route.num_S[: self._num_base])
        return None if num == len(route.by_slot_Y) else route.by_slot_Y.tensor_split([num])

    def combine_postprocess(self, permutated_local_input_tokens: torch.Tensor) -> Any:
        row, self.row = self._row, None
        return row.tokens_of(permutated_local_input_tokens).view(self.hidden_shape)

    @property
    def _row(self) -> KnownRow:
        assert self.row is not None, "a row is set before it is dispatched"
        return self.row

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: torch.Tensor | None = None) -> torch.Tensor | None:
        return tokens_per_expert  # sizes are already on the host


def dispatches_known(moe: MoELayer) -> bool:
    """Returns True if the layer has the all-to-all dispatcher and no shared experts that run between its messages."""
    own = moe.token_dispatcher
    return type(own) is MoEAlltoAllTokenDispatcher and own.shared_experts is None
