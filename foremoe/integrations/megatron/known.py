"""Known rows, which are rows of a stage with precomputed routes, and the check that routers agreed with these routes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, first_fault
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron.known_rows import KnownRow, SlottedRow, dispatches_known
from foremoe.integrations.megatron.layout import Place
from foremoe.integrations.settings import AttachSettings
from foremoe.runtime.dispatch import Route
from foremoe.runtime.holes import HoledRoute, Holes, Lack
from foremoe.runtime.replay import ReplayedRows
from foremoe.runtime.slotted import Slotted, SlottedRows
from foremoe.runtime.stage import exchange_splits

_logger = logging.getLogger(__name__)

# Letters: T tokens of a source, K top-k, E experts, M micro-steps, L layers of this rank, G ranks, S slots of a rank.


@dataclass(frozen=True, slots=True, eq=False)
class _Told:
    """Known routing of a row: experts (int64 [T, K]), the number of pairs that routers should choose, holes and route."""

    topk_TK: torch.Tensor
    num_wanted: int
    hole_I: torch.Tensor | None
    way: Route | HoledRoute | Slotted | None


class KnownRouting:
    """Rows of one stage whose routing is known on all ranks and matches the plan.

    Args:
        rows: Routes of these rows.
        num_topk: Number of experts per token, K.
        trusted: Whether layers use the routes. If False, the routes are only compared with the routers' choices.

    Attributes:
        taken: Rows (micro-step, layer) that used their routes.
        num_bytes: Size in bytes of the host memory that this rank's routes occupy.
    """

    def __init__(self, rows: ReplayedRows | SlottedRows, num_topk: int, trusted: bool) -> None:
        self._rows, self._num_topk, self.trusted, self._fault = rows, num_topk, trusted, ""
        self.num_bytes = rows.num_bytes
        self.taken = set[tuple[int, int]]()

    def row(
        self, micro_step: int, layer: int, routing_TE: torch.Tensor, complete: bool, home_slot_E: torch.Tensor
    ) -> KnownRow | SlottedRow | None:
        """Returns the route of a layer. Returns None on all ranks if the layer must exchange counts.

        Args:
            home_slot_E: Home slots of the layer, int64, on the device.

        Raises:
            InputError: The layer's number of tokens differs from that of the known routing.
            TransferError: A replica is missing (`complete` is False), and a known row cannot run at home.
        """
        shape = torch.Size((len(routing_TE), self._num_topk))
        try:
            told = self._told(micro_step, layer, shape)
        except InputError as error:
            if self.trusted:
                raise
            self._fault = str(error)
            return None
        if told is None:
            return None
        topk_TK, hole_I, num_wanted = told.topk_TK, told.hole_I, told.num_wanted
        told_TE = routing_TE if hole_I is None or not len(hole_I) else routing_TE.index_fill(0, hole_I.long(), False)
        found_TK = told_TE.gather(1, topk_TK)
        if isinstance(told.way, Slotted):
            found_TK = found_TK & (told.way.slot_TK >= 0)
        num_pairs, num_found = told_TE.sum(dtype=torch.int32), found_TK.sum(dtype=torch.int32)
        first = None
        if not self.trusted:  # all rows exchange counts anyway
            first = (told_TE.sum(1) - found_TK.sum(1)).ne(0).to(torch.int32).argmax()
        self._rows.compare(micro_step, layer, num_pairs.clamp(min=num_wanted) - num_found, first)
        if told.way is None or not self.trusted:
            return None
        if not complete:
            lack = f"a replica of micro-step {micro_step}, layer {layer} is missing, and its routing was known"
            raise TransferError(f"{lack}, so ranks cannot agree to run it at home; end the job, and use replay=False.")
        self.taken.add((micro_step, layer))
        if isinstance(told.way, Route):
            return KnownRow(topk_TK, told.way)
        drift = routing_TE.sum(dtype=torch.int32) - num_pairs
        if isinstance(told.way, Slotted):
            return SlottedRow(told.way, home_slot_E, drift)
        return KnownRow(topk_TK, told.way, drift - told.way.num_known)

    def _told(self, micro_step: int, layer: int, shape: torch.Size) -> _Told | None:
        """Returns the known routing of a row, or None."""
        rows = self._rows
        if isinstance(rows, SlottedRows):
            slotted = rows.row(micro_step, layer, shape)
            return None if slotted is None else _Told(slotted.expert_TK.long(), slotted.num_known, slotted.hole_I, slotted)
        holed = rows.holed_route(micro_step, layer, shape)
        if holed is not None:
            num_wanted = holed.expert_TK.numel() - len(holed.hole_I) * self._num_topk
            return _Told(holed.expert_TK.long(), num_wanted, holed.hole_I, holed)
        found = rows.route(micro_step, layer, shape) if self.trusted else None
        expert_TK = found[0] if found else rows.experts(micro_step, layer, shape)
        return None if expert_TK is None else _Told(expert_TK.long(), expert_TK.numel(), None, found[1] if found else None)

    def fault(self) -> str:
        """Returns a message about the first layer that routed differently, or an empty string. The host waits for the device."""
        return self._fault or self._rows.fault()

    @property
    def num_compared(self) -> int:
        """Number of rows that were compared with the routers' choices."""
        return self._rows.num_compared


COUNTED = ("first", "unknown", "differs", "untold", "layer", "memory")
_REASONS = {Lack.UNTOLD: "untold", Lack.DIFFERS: "differs", Lack.HOLES: "unknown", Lack.MEMORY: "memory"}


class Trust:
    """Decides which stages use the routing that is given to them.

    The first stage of a kind with known rows exchanges counts, serves the routers' choices, and compares them with the known
    routing. If the two match on all ranks, later stages of the kind use the known routing. If not, later stages exchange counts
    as well. Routers that differ from `work` in a few tokens therefore cost only speed.

    Args:
        places: MoE layers of this rank.
        settings: Settings, which include the spare places of a row and the memory limit of routes.

    Attributes:
        counted: Number of rows of the stage that exchange counts, by reason. The reasons are those of `COUNTED`.
    """

    def __init__(
        self, group: Group, places: Sequence[Place], num_topk: int, device: torch.device, settings: AttachSettings
    ) -> None:  # fmt: skip
        self._group, self._num_topk, self._device, self._settings = group, num_topk, device, settings
        self.counted: dict[str, int] = {}
        self._flex = any(isinstance(place.moe.token_dispatcher, MoEFlexTokenDispatcher) for place in places)
        self._layers = {layer for layer, place in enumerate(places) if self._flex or dispatches_known(place.moe)}
        self._holds: dict[bool, bool] = {}  # update (True) or recompute -> whether its known routing was correct

    def begin(self, planned: Planned, replay: bool) -> KnownRouting | None:
        """Returns the known routing of a stage. Returns None on all ranks if the stage does not use it. Collective.

        Args:
            replay: Whether routers follow the routing.
        """
        plan, trains = planned.plan, planned.plan.header.schedule.trains
        why = "" if replay and planned.agreed else "untold"
        why = why or ("layer" if not self._layers else "" if self._holds.get(trains, True) else "differs")
        if why:
            self.counted = {why: plan.N}
            return None
        known = {row: topk for row, topk in planned.routing.items() if row[1] in self._layers}
        rows = self._slotted(planned, known) if self._flex else self._routes(planned, known)
        trusted = trains in self._holds
        reason_of = {**_REASONS, Lack.NONE: "" if trusted else "first"}
        mine = np.isin(np.arange(plan.L), list(self._layers))
        self.counted = {why: int((rows.lack_ML[:, mine] == lack).sum()) for lack, why in reason_of.items() if why}
        self.counted["layer"] = plan.M * int((~mine).sum())
        return KnownRouting(rows, self._num_topk, trusted=trusted)

    def _slotted(self, planned: Planned, known: dict[tuple[int, int], Array]) -> SlottedRows:
        plan, most_bytes = planned.plan, self._settings.route_bytes
        return SlottedRows(
            known, plan.expert_MLGS, planned.split_MLP, num_experts=plan.E, most_bytes=most_bytes, group=self._group,
            device=self._device,
        )  # fmt: skip

    def _routes(self, planned: Planned, known: dict[tuple[int, int], Array]) -> ReplayedRows:
        plan = planned.plan
        home_slot_LE = plan.home_LE // plan.B * plan.S + plan.home_LE % plan.B
        limits = self._settings.spare, self._settings.route_bytes
        holes = Holes.of(known, planned.split_MLP, home_slot_LE, *limits)
        both = exchange_splits(self._group, np.concatenate([planned.split_MLP, holes.extra_MLP]), self._device)
        received_GMLS, extra_GMLS = np.split(both, 2, axis=1)
        return ReplayedRows(
            known, plan.expert_MLGS, planned.split_MLP, received_GMLS, num_experts=plan.E, group=self._group,
            device=self._device, holes=(holes, extra_GMLS),
        )  # fmt: skip

    def end(self, planned: Planned, known: KnownRouting | None, fell_back: bool) -> InputError | None:
        """Compares the routers' choices of a finished stage with the known routing. Collective.

        Args:
            known: Result of `begin`.
            fell_back: Whether rows ran at home because a replica was missing.

        Returns:
            An error if a layer used a route that differs from its router's choices, and otherwise None. The result is the same on
            all ranks of the EP group.
        """
        if known is None:
            return None
        faults = self._group.gather((known.fault(), known.num_compared))
        fault = first_fault([fault for fault, _ in faults])
        if fault or (faults[0][1] and not fell_back):
            self._holds[planned.plan.header.schedule.trains] = not fault
        if fault and not known.trusted and self._group.rank == 0:
            _logger.warning(
                "stages like this one count and sort every row, because routers differ from the known routing: %s. Likely "
                "causes: tokens of `work` are not in the order of layers (sequence-first: entry t * batch + b is token t of "
                "sequence b), or `work` contains padding that layers do not receive",
                fault,
            )
        if not (fault and known.trusted):
            return None
        cure = "drop this step on all ranks, and pass replay=False to stage() if routers do not follow `work`"
        return InputError(f"{fault}, and were sent to the latter: {cure}; the next stage counts.")
