"""Which rows of a stage go by routes that were made as it began, and what it was that their routers did."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, first_fault
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron.known_rows import KnownRow, dispatches_known
from foremoe.integrations.megatron.layout import Place
from foremoe.integrations.settings import AttachSettings
from foremoe.runtime.holes import Holes, Lack
from foremoe.runtime.replay import ReplayedRows
from foremoe.runtime.stage import exchange_splits

_logger = logging.getLogger(__name__)

# Letters: T tokens of a source, K top-k, E experts, M micro-steps, L layers of this rank, G ranks, S slots of a rank.


class KnownRouting:
    """The rows of one stage whose routing is known on all ranks and as planned.

    Args:
        rows: Their routes.
        num_topk: K.
        trusted: Layers go by the routes; else what they route is only compared with what is known.

    Attributes:
        taken: (micro-step, layer) of rows that went by their routes.
        num_bytes: Host memory of the routes on this rank.
    """

    def __init__(self, rows: ReplayedRows, num_topk: int, trusted: bool) -> None:
        self._rows, self._num_topk, self.trusted, self._fault = rows, num_topk, trusted, ""
        self.num_bytes = rows.num_bytes
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
        first = None
        if not self.trusted:  # all is counted anyway
            differs_T = told_TE.sum(1) - told_TE.gather(1, topk_TK).sum(1)
            first = differs_T.ne(0).to(torch.int32).argmax()
        self._rows.compare(micro_step, layer, num_pairs.clamp(min=num_wanted) - num_found, first)
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


COUNTED = ("first", "unknown", "differs", "untold", "layer", "memory")
_REASONS = {Lack.UNTOLD: "untold", Lack.DIFFERS: "differs", Lack.HOLES: "unknown", Lack.MEMORY: "memory"}


class Trust:
    """Which stages go by the routing that they are given.

    The first stage of a kind with known rows only compares: it counts as ever, and serves what routers do. If they did what was
    known on all ranks, later stages go by it; if not, they count for good. Programs whose routers differ from `work` in a few
    tokens so lose nothing but speed.

    Args:
        places: MoE layers of this rank.
        settings: Has the spare places of a row, and the memory that routes may take.

    Attributes:
        counted: Rows of the stage that count, by why: of `COUNTED`.
    """

    def __init__(
        self, group: Group, places: Sequence[Place], num_topk: int, device: torch.device, settings: AttachSettings
    ) -> None:  # fmt: skip
        self._group, self._num_topk, self._device, self._settings = group, num_topk, device, settings
        self.counted: dict[str, int] = {}
        self._layers = {layer for layer, place in enumerate(places) if dispatches_known(place.moe)}
        self._holds: dict[bool, bool] = {}  # update or recompute -> what was known of its routing was true

    def begin(self, planned: Planned, replay: bool) -> KnownRouting | None:
        """What is known of a stage's routing; collective. None, on all ranks alike, if it is not asked.

        Args:
            replay: Routers do as the routing says.
        """
        plan, trains = planned.plan, planned.plan.header.schedule.trains
        why = "" if replay and planned.agreed else "untold"
        why = why or ("layer" if not self._layers else "" if self._holds.get(trains, True) else "differs")
        if why:
            self.counted = {why: plan.N}
            return None
        known = {row: topk for row, topk in planned.routing.items() if row[1] in self._layers}
        home_slot_LE = plan.home_LE // plan.B * plan.S + plan.home_LE % plan.B
        limits = self._settings.spare, self._settings.route_bytes
        holes = Holes.of(known, planned.split_MLP, home_slot_LE, *limits)
        both = exchange_splits(self._group, np.concatenate([planned.split_MLP, holes.extra_MLP]), self._device)
        received_GMLS, extra_GMLS = np.split(both, 2, axis=1)
        rows = ReplayedRows(
            known, plan.expert_MLGS, planned.split_MLP, received_GMLS, num_experts=plan.E, group=self._group,
            device=self._device, holes=(holes, extra_GMLS),
        )  # fmt: skip
        trusted = trains in self._holds
        reason_of = {**_REASONS, Lack.NONE: "" if trusted else "first"}
        mine = np.isin(np.arange(plan.L), list(self._layers))
        self.counted = {why: int((rows.lack_ML[:, mine] == lack).sum()) for lack, why in reason_of.items() if why}
        self.counted["layer"] = plan.M * int((~mine).sum())
        return KnownRouting(rows, self._num_topk, trusted=trusted)

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
                "stages like this one count and sort every row, for routers do not do as they were known to: %s. Likely causes: "
                "rows of `work` in another order than layers have them (sequence-first: row t * batch + b is token t of sequence "
                "b), or padding that layers do not get",
                fault,
            )
        if not (fault and known.trusted):
            return None
        cure = "drop this step on all ranks, and give stage() replay=False if routers do not do as `work` says"
        return InputError(f"{fault}, and went to these: {cure}; the next stage counts.")
