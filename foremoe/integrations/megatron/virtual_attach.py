"""`VirtualAttached`: foremoe as the planner of Megatron's virtual experts."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import numpy as np
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import first_fault
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron.attach import Attached
from foremoe.integrations.megatron.finalize import configs_of
from foremoe.integrations.megatron.layout import contiguous_homes, find_layers, require_supported, unwrap
from foremoe.integrations.megatron.virtual import VirtualLayer, VirtualStage, VirtualSummary, capacity_factor, module_of
from foremoe.integrations.megatron.watch import watch
from foremoe.integrations.once import warn_once
from foremoe.machine.cluster import Cluster
from foremoe.plan.plan import Plan
from foremoe.workload.workload import Workload

_logger = logging.getLogger(__name__)

# Letters: M micro-steps, L MoE layers of this rank, G ranks of the EP group, E experts, S slots of a rank.


class VirtualAttached(Attached):
    """Variant of `Attached` for ``moe_virtual_expert_load_balance=True``. Megatron itself moves weights, tokens and gradients."""

    _virtual: VirtualStage | None = None

    def _set_up(self, chunks: list[Any]) -> None:
        self._config = unwrap(chunks[0]).config
        self._places = find_layers(chunks)
        require_supported(self._config, self._places, self._write)
        self._configs, self._module = configs_of(chunks), module_of()
        self._holds = dict[bool, bool]()  # update (True) or recompute -> whether its known routing was correct
        if not self._places or self.group.size == 1:
            return
        num_base, settings = self.num_experts // self.group.size, self.settings
        if settings.redundant > num_base:
            raise InputError(
                f"redundant={settings.redundant} is more than the {num_base} virtual slots that Megatron has on a rank, one per "
                f"expert at home; set redundant={num_base}."
            )
        if settings.cluster is None:  # Megatron requires the EP group to be in one NVLink domain
            cluster = Cluster.preset("8xh100", num_ranks=self.group.size, ranks_per_node=self.group.size)
            settings = dataclasses.replace(settings, cluster=cluster)
        self.settings = dataclasses.replace(settings, replicas="node")
        self._home_LE = contiguous_homes(len(self._places), self.num_experts)
        param = next(self._places[0].moe.experts.parameters())
        self._weight_bytes, self._device = param.dtype.itemsize, param.device
        self._layers = [VirtualLayer(place.moe, i) for i, place in enumerate(self._places)]  # type: ignore[misc]

    def _begin(self, work: Any, stage: str, split_MLP: Array | None, home_LE: Array | None, replay: bool) -> None:
        self.report = self._virtual = None
        if not self._layers:
            return
        if not self.settings.redundant:
            self.report = watch(self._planning, work, stage)
            return
        told = bool(work.routing) if isinstance(work, Planned) else not isinstance(work, Plan | Workload)
        if not (replay and told and self._holds.get(stage == "update", True)):
            why = "routers differed from the known routing before" if replay and told else "the routers' choices are not known"
            warn_once(_logger, f"Megatron's own planner runs {stage} stages: {why}.")
            return
        planned = self._planned = self._planning.plan_of(work, stage, split_MLP, home_LE)
        plan, process_group = planned.plan, self._places[0].moe.token_dispatcher._comm_manager.group
        fault = "virtual experts compute at home; omit home_LE." if (plan.home_LE != self._home_LE).any() else ""
        self._planning.require_fit(planned, stage, False, fault)
        virtual = VirtualStage(planned, self.group, process_group, self._device, self.settings.route_bytes, self._module)
        self._require_room(plan, virtual)
        self._virtual = virtual
        for layer in self._layers:
            layer.enter(virtual)  # type: ignore[arg-type]

    def _require_room(self, plan: Plan, virtual: VirtualStage) -> None:
        """Raises InputError on all ranks if any rank serves more pairs than Megatron has room for."""
        config, planned_ML = self._config, virtual.rows.lack_ML == 0
        if not (planned_ML.all() or virtual.equal):  # Megatron's planner cannot be used for the other rows
            raise InputError("ranks have different numbers of tokens and rows without tables; raise route_bytes.")
        quota_NLGS, tokens_NG = plan.quota_MLGS[planned_ML][:, None], virtual.tokens_MG.repeat(planned_ML.sum(axis=1), axis=0)
        alignment, factor = get_align_size_for_quantization(config), config.moe_expert_rank_capacity_factor or 1.0
        self._factor = capacity_factor(quota_NLGS, tokens_NG, config.moe_router_topk, plan.B, max(alignment, 1))
        if self._factor > factor:
            cure = (
                f"set moe_expert_rank_capacity_factor={self._factor:g}" if np.isfinite(self._factor) else "give every rank tokens"
            )
            raise InputError(f"the plan does not fit into moe_expert_rank_capacity_factor={factor:g}; {cure}.")

    def _take_stock(self) -> InputError | None:
        virtual = self._virtual
        if virtual is None:
            return None
        planned = self._planned
        self.report = VirtualSummary(
            plan=planned.plan, drift=virtual.drift, fell_back=virtual.fell_back, factor=self._factor, plan_s=planned.plan_s,
            share_s=planned.share_s,
        )  # fmt: skip
        fault = first_fault(self.group.gather(virtual.rows.fault()))
        if not fault:
            return None
        self._holds[planned.plan.header.schedule.trains] = False
        return InputError(
            f"{fault}, and planned slots may hold gradients of another step: drop this step on all ranks; Megatron's planner "
            "runs the next one."
        )
