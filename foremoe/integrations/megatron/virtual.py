"""Plans for Megatron's virtual experts. foremoe places experts and tokens. HybridEP and Megatron's kernels do the rest."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.distributed.planning import Planned
from foremoe.integrations.megatron.layout import unwrap
from foremoe.integrations.once import warn_once
from foremoe.plan.plan import Plan
from foremoe.problem.schedule import Phase
from foremoe.runtime.slotted import Slotted, SlottedRows
from foremoe.runtime.stage import PlannedOrder
from foremoe.workload.skew import mean_skew

_logger = logging.getLogger(__name__)

# Letters: M micro-steps, L MoE layers of this rank, G ranks of the EP group, E experts, B base slots and S slots of a rank,
# T tokens of a source, K top-k.

MODULE = "megatron.core.transformer.moe.virtual_expert_load_balancer"
FUNCTION = "plan_virtual_expert_routes"
_OTHER = "as foremoe expects of virtual experts (docs/compatibility.md); set moe_virtual_expert_load_balance=False."


def attached_class(chunks: Sequence[Any], usual: type[Any]) -> type[Any]:
    """Returns `VirtualAttached` if the model's MoE layers have virtual experts, or else `Attached`."""
    from foremoe.integrations.megatron.virtual_attach import VirtualAttached  # derives from the usual one

    wanted = [getattr(getattr(unwrap(chunk), "config", None), "moe_virtual_expert_load_balance", False) for chunk in chunks]
    return VirtualAttached if any(wanted) else usual


def experts_to_copy(plan: Plan) -> Array:
    """Returns the expert in every virtual slot, int32 [M, L, G, B]. -1 marks a slot that serves no pairs.

    Megatron adds the gradient of every slot in this table to the gradient at the expert's owner. It overwrites the gradients of
    slots that received tokens.
    """
    copies_MLGR = np.where(plan.quota_MLGS[..., plan.B :] > 0, plan.expert_MLGS[..., plan.B :], -1)
    table_MLGB = np.full((plan.M, plan.L, plan.G, plan.B), -1, np.int32)
    table_MLGB[..., : copies_MLGR.shape[-1]] = copies_MLGR
    return table_MLGB


def runtime_experts(
    topk_TK: torch.Tensor, row: Slotted | None, num_base: int, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes the slot that serves each pair, int16 [T, K]. Pairs that are not in `row` go home.

    The host never waits for the device.

    Args:
        topk_TK: Experts that the router chose, in any order.
        row: Known routing of these tokens, or None to send all pairs home.

    Returns:
        The slots, the number of unplanned pairs that go home, and the number of planned pairs that the router did not choose.
    """
    home_TK = topk_TK // num_base * (2 * num_base) + topk_TK % num_base
    if row is None:
        none = topk_TK.new_zeros(())
        return home_TK.to(torch.int16), none, none
    same_TKK = (topk_TK.unsqueeze(2) == row.expert_TK.unsqueeze(1)) & (row.slot_TK >= 0).unsqueeze(1)
    slot_TK = torch.where(same_TKK, row.slot_TK.unsqueeze(1), -1).amax(2)
    rank_TK = torch.div(slot_TK, num_slots, rounding_mode="floor")
    planned_TK = rank_TK * (2 * num_base) + slot_TK - rank_TK * num_slots
    table_TK = torch.where(slot_TK >= 0, planned_TK, home_TK).to(torch.int16)
    return table_TK, (slot_TK < 0).sum(), row.num_known - same_TKK.any(1).sum()


def capacity_factor(quota_MLGS: Array, tokens_MG: Array, num_topk: int, num_base: int, alignment: int) -> float:
    """Returns the smallest ``moe_expert_rank_capacity_factor`` that gives every rank enough places, or infinity if none does.

    A rank has ``tokens * topk * factor`` places, but never fewer than one for each of its own pairs plus ``alignment - 1`` for
    each of its 2B experts. This addition is needed because the pairs of an expert fill whole blocks.

    Args:
        alignment: Number of pairs in a block.
    """
    own_MG = tokens_MG * num_topk
    unknown_ML = own_MG.sum(axis=1)[:, None] - quota_MLGS.sum(axis=(2, 3), dtype=np.int64)
    unknown_ML += np.minimum(unknown_ML, num_base) * (alignment - 1)  # in case all of them go to one rank
    need_MLG = (-(-quota_MLGS.astype(np.int64) // alignment) * alignment).sum(axis=3) + unknown_ML[:, :, None]
    free_MG = own_MG + 2 * num_base * (alignment - 1)
    free_MG += -free_MG % alignment
    over_MLG = need_MLG > free_MG[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio_MLG = need_MLG / own_MG[:, None]
    return float(np.ceil(ratio_MLG[over_MLG].max(initial=1.0) * 1000) / 1000)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VirtualSummary:
    """Summary of one stage on one rank.

    Attributes:
        plan: Plan that ran.
        drift: Number of this rank's pairs that were not planned and were served at home.
        fell_back: Number of calls that used Megatron's planner or home placement, including calls for multi-token prediction.
        factor: Smallest ``moe_expert_rank_capacity_factor`` that the plan allows.
        plan_s: Seconds that this rank spent on planning.
        share_s: Seconds that this rank spent on exchanging counts and plans.
    """

    plan: Plan
    drift: int
    fell_back: int
    factor: float
    plan_s: float
    share_s: float

    def metrics(self) -> dict[str, float]:
        """Returns totals of the stage. Mean skews over rows are given with experts at home and with the plan."""
        plan = self.plan
        home_MLG = plan.load_MLE.reshape(plan.M, plan.L, plan.G, -1).sum(axis=3)
        return {
            "skew_before": mean_skew(home_MLG), "skew_after": plan.skew_mean, "replicas": float(plan.num_replicas),
            "drift": float(self.drift), "fell_back": float(self.fell_back), "capacity_factor": self.factor,
            "plan_s": self.plan_s, "share_s": self.share_s,
        }  # fmt: skip


class VirtualStage:
    """Handles Megatron's calls of ``plan_virtual_expert_routes`` during one stage. Creating one is collective.

    Args:
        planned: Plan with the experts of every token.
        group: EP group.
        process_group: The same EP group, as Megatron's process group.
        most_bytes: Limit in bytes of the host memory for routes. Rows beyond the limit fall back.
        module: Megatron's module of virtual experts. See `module_of`.

    Attributes:
        layer: Layer whose call is being handled, or None if the layer was not planned.
        rows: Known rows with the slots of their pairs, and how they compare with the routers' choices.
        tokens_MG: Number of tokens of every rank.
        equal: Whether all ranks have the same number of tokens in every micro-step.
    """

    def __init__(
        self, planned: Planned, group: Group, process_group: Any, device: torch.device, most_bytes: int, module: Any
    ) -> None:
        plan, self.module, self.own = planned.plan, module, getattr(module, FUNCTION)
        self._num_base, self._num_slots, self._num_done = plan.B, plan.S, {phase: [0] * plan.L for phase in Phase}
        self._order, self._process_group = PlannedOrder(plan), process_group
        tables = plan.expert_MLGS, planned.split_MLP
        self.rows = SlottedRows(planned.routing, *tables, num_experts=plan.E, most_bytes=most_bytes, group=group, device=device)
        table_MLGB = experts_to_copy(plan)
        self._copies_ML: Array = np.any(table_MLGB >= 0, axis=(2, 3))
        self._table_MLGB, self._meet = torch.from_numpy(table_MLGB).to(device), torch.zeros(1, device=device)
        self.tokens_MG = np.array(group.gather([len(planned.routing[m, 0]) for m in range(plan.M)]), np.int64).T
        self.equal = bool((self.tokens_MG == self.tokens_MG[:, :1]).all())
        self.layer: int | None = None
        self.fell_back, self._drift = 0, list[torch.Tensor]()

    def __call__(self, top_indices: torch.Tensor, workspace: Any) -> Any:
        """Returns the plan of one layer's pass in the form of Megatron's own function."""
        if self.layer is None:
            return self._fall_back(top_indices, workspace)
        layer = self.layer
        # Inside a backward pass, only activation recomputation runs the layer forward.
        m, phase = self._order.use(layer, torch._C._current_graph_task_id() != -1, self._num_done)
        self._num_done[phase][layer] += 1
        row = self.rows.row(m, layer, top_indices.shape)
        if row is None:
            return self._fall_back(top_indices, workspace)
        table_TK, unplanned, differ = runtime_experts(top_indices, row, self._num_base, self._num_slots)
        self.rows.compare(m, layer, differ)
        if phase == Phase.FORWARD:
            self._drift.append(unplanned)
        if self._copies_ML[m, layer]:
            # The exchange in Megatron's planner prevents an owner from writing slots that another rank still uses.
            dist.all_reduce(self._meet, group=self._process_group)
        return self.module.VirtualExpertPlan(table_TK, self._table_MLGB[m, layer])

    def _fall_back(self, top_indices: torch.Tensor, workspace: Any) -> Any:
        """Calls Megatron's planner if all ranks have equally many tokens, as it requires. Otherwise, keeps all pairs at home."""
        self.fell_back += 1
        by = "Megatron's planner is used" if self.equal else "tokens stay at home"
        warn_once(_logger, f"{by} where there is no plan: in layers of multi-token prediction, and in rows beyond route_bytes.")
        if self.equal:
            return self.own(top_indices, workspace)
        at_home = runtime_experts(top_indices, None, self._num_base, self._num_slots)[0]
        return self.module.VirtualExpertPlan(at_home, torch.full_like(self._table_MLGB[0, 0], -1))

    @property
    def drift(self) -> int:
        """Number of unplanned pairs of this rank."""
        return int(torch.stack(self._drift).sum()) if self._drift else 0


class VirtualLayer:
    """An MoE layer with virtual experts. Between `enter` and `leave`, it identifies itself to the stage before each call."""

    def __init__(self, moe: Any, index: int) -> None:
        self.moe, self.index = moe, index
        self._manager: Any = getattr(moe.token_dispatcher, "_comm_manager", None)
        self._stage: VirtualStage | None = None
        if not hasattr(self._manager, "plan_dispatch"):
            raise InputError(f"layer {moe.layer_number - 1} has no plan_dispatch in its {type(self._manager).__name__}, {_OTHER}")

    def enter(self, stage: VirtualStage) -> None:
        """Makes calls of this layer follow the stage's plan."""
        own, self._stage = self._manager.plan_dispatch, stage

        def plan_dispatch(*args: Any, **kwargs: Any) -> Any:
            stage.layer = self.index
            try:
                return own(*args, **kwargs)
            finally:
                stage.layer = None

        self._manager.plan_dispatch = torch.compiler.disable(plan_dispatch)
        setattr(stage.module, FUNCTION, stage)

    def leave(self) -> None:
        """Restores the layer. It may be called twice."""
        self._manager.__dict__.pop("plan_dispatch", None)
        if self._stage is not None:
            setattr(self._stage.module, FUNCTION, self._stage.own)
            self._stage = None


def module_of() -> Any:
    """Returns Megatron's module of virtual experts.

    Raises:
        InputError: The module does not have the planning interface that foremoe expects.
    """
    module = importlib.import_module(MODULE)
    planner = getattr(module, FUNCTION, None)
    if planner is None or [*inspect.signature(planner).parameters] != ["top_indices", "workspace"]:
        raise InputError(f"this Megatron has no {FUNCTION}(top_indices, workspace), {_OTHER}")
    return module
