"""`DeepEpEngine`: transfers a plan's weights and gradients row by row, with DeepEP's functions for redundant experts."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.plan.plan import Plan
from foremoe.plan.programme import use_text
from foremoe.problem.schedule import Phase
from foremoe.transfer.admission import refusal, require_agreement
from foremoe.transfer.base import Buffers, Tensors
from foremoe.transfer.residency import Residencies, Residency, SlotContents

# Letters: C copies, G ranks, B base slots, D ranks of an NVLink domain, n elements of a tensor of an expert.


class StackedBuffers(Buffers, Protocol):
    """Buffers in which experts are contiguous and in the order of their slots.

    Attributes:
        slots: Weights of all buffers, [num_buffers, ...], in memory allocated by DeepEP.
        slot_grads: Gradients of all buffers, float32 [num_buffers, n], in memory allocated by DeepEP.
    """

    slots: Tensors
    slot_grads: Tensors

    def homes(self, layer: int) -> Tensors:
        """Returns the weights of the experts at home on this rank, [B, ...]."""

    def main_grads(self, layer: int) -> Tensors:
        """Returns the main gradients of the experts at home on this rank, float32 [B, n]."""


class DeepEpEngine:
    """Executes plans over an ``EPBuffer`` of DeepEP 2.5, with the interface of `Engine`. Not yet run on a GPU (docs/engines.md).

    One call of ``lb_prefetch_weights`` makes all copies of a use. One call of ``lb_reduce_grads`` per tensor returns the replica
    gradients of a row. A replica that is still in its buffer is not sent again. All copies come from homes inside the NVLink
    domain, which the plan calls a node.
    """

    def __init__(self, buffers: StackedBuffers, ep: Any, group: Group, *, num_sms: int = 0) -> None:
        self.buffers, self.group, self._ep, self._num_sms = buffers, group, ep, num_sms
        self._plan: Plan | None = None
        self._open: Residency | None = None
        self._event: Any = None

    def begin(self, plan: Plan) -> None:
        """Starts a plan. Collective.

        Raises:
            InputError: The plan does not match this engine, differs between ranks, or has replicas outside their home's node.
                Raised on all ranks.
        """
        t, rank, node_G = plan.transfers, self.group.rank, plan.header.cluster.node_of_rank_G
        refused = refusal(plan, rank, self.group.size, self.buffers.num_buffers, debug=False)
        if not refused and (node_G[plan.home_LE[t.layer_C, t.expert_C] // plan.B] != node_G[t.dst_C]).any():
            refused = 'the plan has replicas outside the NVLink domain of their home; plan with replicas="node".'
        require_agreement(self.group, plan, refused, False)
        uses = plan.header.schedule.uses(plan.L)
        micro_step_U = uses.micro_step_U.tolist()
        self._uses = list(zip(micro_step_U, uses.layer_U.tolist(), map(Phase, uses.phase_U.tolist()), strict=True))
        self._bounds = np.searchsorted(t.need_C, np.arange(len(self._uses) + 1))
        self._domain: list[int] = np.flatnonzero(node_G == node_G[rank]).tolist()
        self._contents = {g: SlotContents() for g in self._domain}
        self._residencies = Residencies(plan, rank, self.buffers, self._contents[rank])
        self._plan, self._next, self._open, self._event = plan, 0, None, None

    def prepare(self, micro_step: int, layer: int, phase: int) -> bool:
        """Queues the copies of a use. It returns True, because no replica can be missing. Collective in the NVLink domain."""
        plan = self._turn(micro_step, layer, phase)
        if self._open is None:
            t, copies = plan.transfers, range(self._bounds[self._next], self._bounds[self._next + 1])
            sent = [c for c in copies if t.dst_C[c] in self._contents]
            for g, contents in self._contents.items():
                contents.take(t, [c for c in sent if t.dst_C[c] == g], ())
            if sent:
                table_DS = self._table(layer, [(int(t.dst_C[c]), int(t.buffer_C[c]), int(t.expert_C[c])) for c in sent])
                homes, slots = self.buffers.homes(layer), self.buffers.slots
                self._event = self._ep.lb_prefetch_weights(slots, homes, table_DS, num_sms=self._num_sms)
            self._open = self._residencies.of(micro_step, layer, phase)
            for grads in (self._open.grads_S or ())[plan.B :]:
                for grad in grads or ():
                    grad.zero_()
        return True

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        """Returns the content of the slots, as `Engine.weights` does."""
        self.prepare(micro_step, layer, phase)
        assert self._open is not None
        if self._event is not None:
            self._event.wait()
            self._event = None
        return self._open

    def gradients(self, micro_step: int, layer: int) -> None:
        """Adds the row's replica gradients to those at home. Collective in the NVLink domain."""
        plan = self._turn(micro_step, layer, Phase.BACKWARD)
        quota_GS, expert_GS = plan.quota_MLGS[micro_step, layer], plan.expert_MLGS[micro_step, layer]
        served = [(g, int(e)) for g in self._domain for e in expert_GS[g, plan.B :][quota_GS[g, plan.B :] > 0]]
        if served:
            table_DS = self._table(layer, [(g, self._contents[g].buffer_of[layer, e], e) for g, e in served])
            for slot_grads, grads in zip(self.buffers.slot_grads, self.buffers.main_grads(layer), strict=True):
                self._ep.lb_reduce_grads(slot_grads, grads, table_DS, num_sms=self._num_sms).wait()

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        """Ends the use on this rank. The next call of DeepEP waits for all ranks."""
        self._turn(micro_step, layer, phase)
        self._next, self._open = self._next + 1, None

    def launch(self) -> None:
        """Does nothing, because `prepare` already queues the copies of a use."""

    def end(self) -> None:
        """Ends the plan."""
        self._plan, self._residencies.homes = None, {}

    def _turn(self, micro_step: int, layer: int, phase: int) -> Plan:
        if self._plan is None or self._uses[self._next : self._next + 1] != [(micro_step, layer, phase)]:
            raise InputError(f"{use_text(micro_step, layer, phase)} is not the next use of a plan that has begun.")
        return self._plan

    def _table(self, layer: int, entries: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Returns the domain's own number of the expert in each buffer, or -1, int32 [D, num_buffers].

        `entries` holds (rank, buffer, expert).
        """
        assert self._plan is not None
        B, home_E = self._plan.B, self._plan.home_LE[layer]
        table_DS: Array = np.full((len(self._domain), self.buffers.num_buffers), -1, np.int32)
        for g, buffer, expert in entries:
            table_DS[self._domain.index(g), buffer] = self._domain.index(home_E[expert] // B) * B + home_E[expert] % B
        return torch.from_numpy(table_DS).to(self.buffers.slots[0].device)
