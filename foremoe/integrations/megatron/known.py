"""Rows whose routing is known before the stage: dispatched without counting, sorting, gathering counts or reading back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, first_fault
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron.dispatcher import OverSlots
from foremoe.integrations.megatron.layout import Place
from foremoe.runtime.dispatch import Route
from foremoe.runtime.holes import HoledRoute, Holes
from foremoe.runtime.permute import Divide, Join, PairsToTokens, Permute, TokensToPairs
from foremoe.runtime.replay import ReplayedRows
from foremoe.runtime.stage import exchange_splits

_logger = logging.getLogger(__name__)

# Letters: T tokens of a source, K top-k, E experts, S slots of a rank, Z = T*K pairs of this source sorted by slot, Y pairs that
# this rank serves, H hidden size.


@dataclass(frozen=True, slots=True, eq=False)
class KnownRow:
    """One row's experts, int64 [T, K] on the device, and its route.

    Attributes:
        drift: Pairs of its holes that the plan did not know, on the device; None without holes on any rank.
    """

    topk_TK: torch.Tensor
    route: Route | HoledRoute
    drift: torch.Tensor | None = None

    def rows_of(self, x_TH: torch.Tensor) -> torch.Tensor:
        """A row for every pair of this source, sorted by slot; differentiable."""
        if isinstance(self.route, HoledRoute):
            return self.route.rows_of(x_TH)
        rows_ZH: torch.Tensor = TokensToPairs.apply(x_TH, self.route.by_slot_Z, self.route.by_token_Z, self.route.num_topk)
        return rows_ZH

    def probs_of(self, probs_TE: torch.Tensor, routing_TE: torch.Tensor) -> torch.Tensor:
        """Their weights; differentiable."""
        if isinstance(self.route, HoledRoute):
            return (probs_TE * routing_TE).reshape(-1).index_select(0, self.route.prob_Z)
        probs_Z: torch.Tensor = Permute.apply(
            probs_TE.gather(1, self.topk_TK).view(-1), self.route.by_slot_Z, self.route.by_token_Z
        )
        return probs_Z

    def tokens_of(self, rows_ZH: torch.Tensor) -> torch.Tensor:
        """Sums over the pairs of each token; differentiable."""
        if isinstance(self.route, HoledRoute):
            return self.route.tokens_of(rows_ZH)
        y_TH: torch.Tensor = PairsToTokens.apply(rows_ZH, self.route.by_slot_Z, self.route.by_token_Z, self.route.num_topk)
        return y_TH

    def served_of(self, probs_Y: torch.Tensor) -> Served:
        """Pairs that slots serve, from the weights of all that arrived."""
        if not isinstance(self.route, HoledRoute):
            return Served(self.route.num_S)
        extra_S = [all_of - planned for all_of, planned in zip(self.route.num_S, self.route.num_planned_S, strict=True)]
        weighted_X = probs_Y.detach().index_select(0, self.route.extra_X) != 0
        return Served(self.route.num_planned_S, extra_S, weighted_X)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """Pairs that this rank's slots served in one row.

    Attributes:
        num_S: Pairs that the plan knew.
        extra_S: Pairs for holes, most of them with a weight of 0; `weighted_X`: which have another, by slot, on the device.
    """

    num_S: list[int]
    extra_S: list[int] | None = None
    weighted_X: torch.Tensor | None = None

    def counts(self) -> list[int]:
        """All with a weight; the host waits for the device."""
        if self.weighted_X is None or self.extra_S is None:
            return self.num_S
        extra = [int(part.sum()) for part in self.weighted_X.cpu().split(self.extra_S)]
        return [planned + more for planned, more in zip(self.num_S, extra, strict=True)]


class KnownDispatcher(OverSlots, MoEAlltoAllTokenDispatcher):  # type: ignore[misc]
    """Dispatches the rows whose routes are known; the messages themselves are Megatron's.

    Orders and sizes come with the row. So the host never waits for the device, whatever `moe_permute_fusion` says, and every
    permutation is a gather, forward and backward.

    Rows of redundant slots come and go as a tensor of their own: what experts get, and give back, is one tensor or two.

    Attributes:
        row: Set before `dispatch_preprocess`.
        served: What slots serve of the row, from `dispatch_postprocess` on.
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
        """Where pairs of base slots arrive, and those of redundant slots; None if there are no such."""
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
        return tokens_per_expert  # sizes are on the host already


def dispatches_known(moe: MoELayer) -> bool:
    """True for the all-to-all dispatcher without shared experts that run between its messages."""
    own = moe.token_dispatcher
    return type(own) is MoEAlltoAllTokenDispatcher and own.shared_experts is None


class KnownRouting:
    """The rows of one stage whose routing is known on all ranks and as planned.

    Args:
        rows: Their routes.
        num_topk: K.
        trusted: Layers go by the routes; else what they route is only compared with what is known.

    Attributes:
        taken: (micro-step, layer) of rows that went by their routes.
    """

    def __init__(self, rows: ReplayedRows, num_topk: int, trusted: bool) -> None:
        self._rows, self._num_topk, self.trusted, self._fault = rows, num_topk, trusted, ""
        self.taken = set[tuple[int, int]]()

    def row(self, micro_step: int, layer: int, routing_TE: torch.Tensor, complete: bool) -> KnownRow | None:
        """What a layer goes by; None, on all ranks alike, if it has to count.

        Raises:
            InputError: The layer has another number of tokens.
            TransferError: `complete` is false, and the other ranks do not ask for it.
        """
        shape = torch.Size((len(routing_TE), self._num_topk))
        try:
            holed = self._rows.holed_route(micro_step, layer, shape)
            found = self._rows.route(micro_step, layer, shape) if self.trusted and holed is None else None
            topk_TK = holed.expert_TK if holed else found[0] if found else self._rows.experts(micro_step, layer, shape)
        except InputError as error:
            if self.trusted:
                raise
            self._fault = str(error)
            return None
        if topk_TK is None:
            return None
        topk_TK, drift = topk_TK.long(), None
        num_wanted, told_TE = topk_TK.numel(), routing_TE
        if holed is not None and len(holed.hole_I):
            num_wanted -= len(holed.hole_I) * self._num_topk
            told_TE = routing_TE.index_fill(0, holed.hole_I.long(), False)
        num_pairs, num_found = told_TE.sum(dtype=torch.int32), told_TE.gather(1, topk_TK).sum(dtype=torch.int32)
        self._rows.compare(micro_step, layer, num_pairs.clamp(min=num_wanted) - num_found)
        route = holed if holed is not None else None if found is None else found[1]
        if route is None or not self.trusted:
            return None
        if not complete:
            lack = f"a replica of micro-step {micro_step}, layer {layer} could not be had, and its routing was known"
            raise TransferError(f"{lack}, so no rank asks for it; end the job, and run it with replay=False or more backends.")
        if holed is not None:
            drift = routing_TE.sum(dtype=torch.int32) - num_pairs - holed.num_known
        self.taken.add((micro_step, layer))
        return KnownRow(topk_TK, route, drift)

    def fault(self) -> str:
        """Where a layer routed otherwise; empty if it did nowhere. The host waits for the device, once."""
        return self._fault or self._rows.fault()

    @property
    def num_compared(self) -> int:
        """Rows that were compared."""
        return self._rows.num_compared


class Trust:
    """Which stages go by the routing that they are given.

    The first stage of a kind with known rows only compares: it counts as ever, and serves what routers do. If they did what was
    known on all ranks, later stages go by it; if not, they count for good. Programs whose routers differ from `work` in a few
    tokens so lose nothing but speed.

    Args:
        places: MoE layers of this rank.
        spare: How many tokens of a rank may be unknown in a row that goes by routes.
    """

    def __init__(self, group: Group, places: Sequence[Place], num_topk: int, device: torch.device, spare: int) -> None:
        self._group, self._num_topk, self._device, self._spare = group, num_topk, device, spare
        self._layers = {layer for layer, place in enumerate(places) if dispatches_known(place.moe)}
        self._holds: dict[bool, bool] = {}  # update or recompute -> what was known of its routing was true

    def begin(self, planned: Planned) -> KnownRouting | None:
        """What is known of a stage's routing; collective. None, on all ranks alike, if it is not asked."""
        trains = planned.plan.header.schedule.trains
        if not (planned.agreed and self._layers and self._holds.get(trains, True)):
            return None
        plan, known = planned.plan, {row: topk for row, topk in planned.routing.items() if row[1] in self._layers}
        home_slot_LE = plan.home_LE // plan.B * plan.S + plan.home_LE % plan.B
        holes = Holes.of(known, planned.split_MLP, home_slot_LE, self._spare)
        both = exchange_splits(self._group, np.concatenate([planned.split_MLP, holes.extra_MLP]), self._device)
        received_GMLS, extra_GMLS = np.split(both, 2, axis=1)
        rows = ReplayedRows(
            known, plan.expert_MLGS, planned.split_MLP, received_GMLS, num_experts=plan.E, group=self._group,
            device=self._device, holes=(holes, extra_GMLS),
        )  # fmt: skip
        return KnownRouting(rows, self._num_topk, trusted=trains in self._holds)

    def end(self, planned: Planned, known: KnownRouting | None, fell_back: bool) -> InputError | None:
        """Judges a stage that is over; collective.

        Args:
            known: What `begin` returned.
            fell_back: Some rows ran at home for want of a replica.

        Returns:
            An error if layers of a rank went by routes that were not those of their routers, on all ranks of the EP group.
        """
        if known is None:
            return None
        faults = self._group.gather((known.fault(), known.num_compared))
        fault = first_fault([fault for fault, _ in faults])
        if fault or (faults[0][1] and not fell_back):
            self._holds[planned.plan.header.schedule.trains] = not fault
        if fault and not known.trusted and self._group.rank == 0:
            _logger.warning(
                "stages like this one count and sort every row, for routers do not do as they were known to: %s", fault
            )
        if not (fault and known.trusted):
            return None
        cure = "drop this step on all ranks, and give stage() replay=False if routers do not do as `work` says"
        return InputError(f"{fault}, and went to these: {cure}; the next stage counts.")
