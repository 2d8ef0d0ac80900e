"""`SlotLayer`: adds physical slots to one `MoELayer` without modifying it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.integrations.megatron.buffers import MegatronBuffers, ParamSync
from foremoe.integrations.megatron.dispatcher import DISPATCHERS
from foremoe.integrations.megatron.experts import ExpertKind, kind_of
from foremoe.integrations.megatron.known_rows import KnownDispatcher, SlottedRow, dispatches_known
from foremoe.integrations.megatron.layout import Place
from foremoe.integrations.megatron.replicas import Replicas, Row
from foremoe.integrations.megatron.stage import MegatronStage
from foremoe.integrations.settings import AttachSettings
from foremoe.problem.schedule import Phase

# Letters: T tokens of a source, E experts, P physical slots of all ranks, S slots of a rank, B base slots, Y pairs that a rank
# serves, sorted by slot; H hidden size.

_Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # of all slots, or of base slots and of redundant ones


class SlotLayer:
    """An MoE layer that follows a plan between `enter` and `leave`.

    Between these calls, three parts of the `MoELayer` instance are replaced:

    * The dispatcher sends tokens to slots.
    * `preprocess` maps experts to slots.
    * `forward` of the experts runs Megatron's own code on the base slots and `Replicas` on the redundant slots.

    Everything else, including the parameters, stays Megatron's own.

    Args:
        index: Number of the layer in the plan.
        num_base: Number of base slots per rank.
        num_slots: Number of slots per rank.
    """

    def __init__(self, place: Place, index: int, kind: ExpertKind, num_base: int, num_slots: int, sync: ParamSync) -> None:
        self.moe, self.index, self.kind, self.num_base = place.moe, index, kind, num_base
        self._sync, self._params = sync, kind.all_parameters()
        self._home_dispatcher = place.moe.token_dispatcher
        self._slot_dispatcher = DISPATCHERS[type(place.moe.token_dispatcher)](place.moe, num_slots)
        self._known_dispatcher = KnownDispatcher(place.moe, num_slots) if dispatches_known(place.moe) else None
        self._stage: MegatronStage | None = None
        self._now = (0, Phase.FORWARD)
        self._anchor = torch.zeros((), device=self._params[0].device, requires_grad=True)

    def enter(self, stage: MegatronStage) -> None:
        """Makes the layer follow the stage's plan."""
        self._stage, self._slot_dispatcher.watch = stage, not stage.replay
        self.moe.preprocess = self._preprocess
        self.moe.experts.forward = self._compute

    def leave(self) -> None:
        """Restores the layer. It may be called twice."""
        self._stage = None
        self.moe.token_dispatcher = self._home_dispatcher
        self.moe.__dict__.pop("preprocess", None)
        self.moe.experts.__dict__.pop("forward", None)

    def _preprocess(self, hidden_states: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor) -> Any:
        stage, layer = self._running(), self.index
        # Inside a backward pass, only activation recomputation runs the layer forward.
        m, phase = stage.use(layer, in_backward=torch._C._current_graph_task_id() != -1)
        self._now = m, phase
        complete = stage.prepare(m, layer, phase)
        known = stage.known_row(m, layer, routing_map, complete)
        if known is not None and known.drift is not None and phase == Phase.FORWARD:
            stage.drift[m, layer] = known.drift
        if isinstance(known, SlottedRow):
            dispatcher = self._slot_dispatcher
            dispatcher.slots_of, dispatcher.launch, dispatcher.missing = known.slots_of, stage.launch, None
            self.moe.token_dispatcher = dispatcher
            return type(self.moe).preprocess(self.moe, hidden_states, probs, routing_map)
        if known is not None:
            assert self._known_dispatcher is not None
            self._known_dispatcher.row, self._known_dispatcher.launch = known, stage.launch
            self.moe.token_dispatcher = self._known_dispatcher
            return type(self.moe).preprocess(self.moe, hidden_states, probs, routing_map)
        self.moe.token_dispatcher = self._slot_dispatcher
        at_home = (m, layer) in stage.fell_back  # recomputation follows the forward pass
        dispatcher = self._slot_dispatcher
        dispatcher.launch = stage.launch
        dispatcher.missing = not complete if phase == Phase.FORWARD and stage.has_replicas(m, layer) else None
        if at_home:
            routing_TP = stage.route_home(layer, routing_map)
        else:
            routing_TP, num_drift = stage.route(m, layer, routing_map)
            if phase == Phase.FORWARD:
                stage.drift[m, layer] = num_drift

        def go_home() -> tuple[torch.Tensor, torch.Tensor]:
            stage.fall_back(m, layer)
            home_TP = stage.route_home(layer, routing_map)
            return home_TP, stage.spread(m, layer, probs, home_TP)

        dispatcher.go_home = go_home
        probs_TP = stage.spread(m, layer, probs, routing_TP)
        return type(self.moe).preprocess(self.moe, hidden_states, probs_TP, routing_TP)

    def _compute(self, x_YH: _Rows, num_S: torch.Tensor, probs_Y: _Rows) -> tuple[_Rows, None]:
        """Computes the experts in this rank's slots: base slots with Megatron's own module, then redundant slots."""
        stage, layer, (m, phase) = self._running(), self.index, self._now
        experts, base = self.moe.experts, self.num_base
        counts = num_S.tolist()
        if phase == Phase.FORWARD:
            known = self._known_dispatcher if self.moe.token_dispatcher is self._known_dispatcher else None
            if known is not None and known.served is not None:
                stage.known_served[m, layer] = known.served
            else:
                stage.served[m, layer] = counts
            if not stage.replay:
                stage.load[m, layer] = self._slot_dispatcher.load_G
        parts = [sum(counts[:base]), sum(counts[base:])]
        base_x, replica_x = x_YH.split(parts) if isinstance(x_YH, torch.Tensor) else x_YH
        base_probs, replica_probs = probs_Y.split(parts) if isinstance(probs_Y, torch.Tensor) else probs_Y
        base_y, _ = type(experts).forward(experts, base_x, num_S[:base], base_probs)
        row = Row(stage, self.kind, m, layer, phase, counts[base:], self._reduced_next)
        outputs = Replicas.apply(base_y, replica_x, replica_probs, self._anchor, row, torch.is_grad_enabled())
        if phase != Phase.BACKWARD:  # recomputation of this layer alone keeps its weights until backward
            stage.release(m, layer, phase)
        if not isinstance(x_YH, torch.Tensor):
            return outputs, None
        return torch.cat(outputs) if parts[1] else outputs[0], None

    @property
    def overlaps_reduction(self) -> bool:
        """Returns True if the layer's gradients are reduced over data-parallel ranks while backward runs."""
        return any(self._sync.overlaps_reduction(param) for param in self._params)

    def _reduced_next(self) -> bool:
        return any(self._sync.reduces_now(param) for param in self._params)

    def _running(self) -> MegatronStage:
        assert self._stage is not None, "a SlotLayer runs between enter and leave"
        return self._stage


def slots_around(
    chunks: Sequence[Any], places: Sequence[Place], home_LE: Array, settings: AttachSettings, group: Group
) -> tuple[MegatronBuffers, list[SlotLayer]]:
    """Returns the buffers and the slot layers for this rank's MoE layers. Not collective over the EP group.

    Raises:
        InputError: Replicas of these experts would not compute the same results as Megatron.
    """
    kinds = [kind_of(place.moe.experts) for place in places]
    sync = ParamSync(chunks)
    num_base, num_buffers = home_LE.shape[1] // group.size, settings.redundant * settings.slot_depth
    buffers = MegatronBuffers(kinds, group.rank, num_base, num_buffers, sync, home_LE)
    if fault := buffers.prepare(""):
        raise InputError(fault)
    num_slots = num_base + settings.redundant
    return buffers, [SlotLayer(place, i, kinds[i], num_base, num_slots, sync) for i, place in enumerate(places)]
