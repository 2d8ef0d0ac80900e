"""`Planning`: plans this rank's layers from the routing of a stage."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group, first_fault, reporting
from foremoe.distributed.planning import Planned, PlanningTask, homes_together, plan_together
from foremoe.integrations.megatron.layout import Place, model_of, schedule_of
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import AttachSettings
from foremoe.plan.plan import Plan
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.runtime.stage import agree_on_split
from foremoe.workload.workload import Workload

_logger = logging.getLogger(__name__)

# Letters: M micro-steps, L MoE layers, T tokens of a source, K top-k, E experts.

Work = Plan | Workload | Sequence[Any]


def layers_of_all(group: Group, places: Sequence[Place], num_predicting: int) -> tuple[list[int], tuple[int, int]]:
    """Returns `numbers` and `predicting` of `Planning`, which a hybrid model's config does not contain. Collective over the job.

    Args:
        num_predicting: Number of MoE layers of multi-token prediction on this rank.
    """
    answers = group.gather(([place.number for place in places], num_predicting))
    numbers = sorted({number for mine, _ in answers for number in mine})
    return numbers, (num_predicting, max(num for _, num in answers))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planning:
    """Planning for one rank's layers.

    Attributes:
        settings: Settings passed to `attach`, with the cluster of the EP group.
        group: EP group.
        config: Megatron's `TransformerConfig`.
        places: MoE layers of this rank.
        numbers: Numbers of the whole model's MoE layers, collected from all pipeline ranks.
        predicting: Number of MoE layers of multi-token prediction on this rank, and the largest such number of any rank. These
            layers are not planned.
        home_LE: Megatron's own homes, int32 [L, E].
        weight_bytes: Size of one weight in bytes.
        device: Device of the tensors in messages.
    """

    settings: AttachSettings
    group: Group
    config: Any
    places: Sequence[Place]
    numbers: Sequence[int]
    predicting: tuple[int, int]
    home_LE: Array
    weight_bytes: int
    device: torch.device

    def plan(self, work: Work, stage: str, home_LE: Array | None, num_threads: int | None) -> Planned:
        """Plans a stage. See `Attached.plan`."""
        homes = self.home_LE if home_LE is None else home_LE
        ((task, load_MLE, tokens_M),) = self.agree([(work, stage)], homes, num_threads)
        planned = plan_together(
            self.group, self.settings.planner, task, load_MLE, tokens_M,
            device=self.device, num_threads=num_threads, plan_limit_s=self.settings.plan_limit_s,
        )  # fmt: skip
        return dataclasses.replace(planned, routing=self._routing(work))

    def plan_of(self, work: Work | Planned, stage: str, split_MLP: Array | None, home_LE: Array | None) -> Planned:
        """Returns the plan of a stage, given any input that `Attached.stage` accepts."""
        if isinstance(work, Planned):
            return work
        if isinstance(work, Plan):
            split_MLP = np.empty(0, np.int32) if split_MLP is None else split_MLP
            return Planned(plan=work, split_MLP=split_MLP, plan_s=0.0, share_s=0.0)
        return self.plan(work, stage, home_LE, None)

    def require_fit(self, planned: Planned, stage: str, overlaps_reduction: bool, unprepared: str) -> None:
        """Raises an error on all ranks if any rank of the EP group cannot run a stage. Collective.

        Args:
            planned: Plan to run.
            stage: "recompute" or "update".
            overlaps_reduction: Whether gradients are reduced over data-parallel ranks during backward.
            unprepared: Reason why this rank's experts cannot run the stage, or an empty string.

        Raises:
            InputError: A rank cannot run the stage. Raised on all ranks of the EP group.
        """
        fault = self.fault_of(planned.plan, stage, overlaps_reduction) or unprepared
        if not np.size(planned.split_MLP):
            fault = "a Plan needs split_MLP=plan.rows_for(workload, rank), its split of this rank's tokens."
        fault = first_fault(self.group.gather(fault))
        if fault:
            raise InputError(fault)
        if not planned.agreed:
            agree_on_split(self.group, planned.plan, planned.split_MLP, planned.plan.home_LE, self.device)

    def fault_of(self, plan: Plan, stage: str, overlaps_reduction: bool) -> str:
        """Returns the reason why this rank cannot run a plan, or an empty string.

        Args:
            plan: Plan to run.
            stage: "recompute" or "update".
            overlaps_reduction: Whether gradients are reduced over data-parallel ranks during backward.
        """
        head = plan.header
        wanted = schedule_of(self.config, self.places, plan.M, forward_only=stage == "recompute")
        if plan.home_LE.shape != self.home_LE.shape or self.group.size != plan.G:
            (L, E), G = self.home_LE.shape, self.group.size
            return f"the plan has {plan.L} layers, {plan.E} experts and {plan.G} ranks; this model has {L}, {E} and {G}."
        if not head.schedule.same_as(wanted):
            return (
                f"the plan's schedule ({head.schedule.M} micro-steps, {len(head.schedule.phase_X)} passes) is not the one in "
                "which this rank runs; make the plan with schedule=attached.schedule_of(num_micro_steps, forward_only=...)."
            )
        if (head.redundant, head.slot_depth) != (self.settings.redundant, self.settings.slot_depth):
            return (
                f"the plan is for redundant={head.redundant}, slot_depth={head.slot_depth}; this model was attached with "
                f"redundant={self.settings.redundant}, slot_depth={self.settings.slot_depth}. Plan with these."
            )
        moved = bool((plan.home_LE != self.home_LE).any())
        if moved and stage == "update" and overlaps_reduction:
            return (
                "experts cannot compute away from home with overlap_grad_reduce, which reduces gradients before they are back; "
                "set overlap_grad_reduce=False, or omit home_LE."
            )
        return ""

    def homes(self, stages: Sequence[tuple[Work, str]], num_threads: int | None) -> Array:
        """Plans homes. See `Attached.homes`."""
        tasks, loads, tokens = zip(*self.agree(stages, self.home_LE, num_threads), strict=True)
        return homes_together(
            self.group, self.settings.planner, tasks, loads, tokens, device=self.device, num_threads=num_threads
        )

    def _task(self, stage: str, num_micro_steps: int, home_LE: Array) -> PlanningTask:
        settings = self.settings
        assert settings.cluster is not None
        return PlanningTask(
            model=model_of(self.config, float(self.weight_bytes)), cluster=settings.cluster, stage=stage,
            schedule=schedule_of(self.config, self.places, num_micro_steps, forward_only=stage == "recompute"),
            redundant=settings.redundant, slot_depth=settings.slot_depth, cost=settings.cost, replicas=settings.replicas,
            home_LE=home_LE, moe_layer_L=np.array([place.number for place in self.places], np.int32),
        )  # fmt: skip

    def agree(
        self, stages: Sequence[tuple[Work, str]], home_LE: Array, num_threads: int | None = None
    ) -> list[tuple[PlanningTask, Array, Array]]:
        """Returns each stage's task and this source's counts. If this fails on any rank, raises the same error on all ranks."""
        fault, found = "", []
        with reporting(self.group):
            try:
                for work, stage in stages:
                    load_MLE, tokens_M = self._counts(work, num_threads)
                    found.append((self._task(stage, len(load_MLE), home_LE), load_MLE, tokens_M))
            except InputError as error:
                fault = str(error)
            fault = first_fault(self.group.gather(fault))
        if fault:
            raise InputError(fault)
        return found

    def _counts(self, work: Any, num_threads: int | None) -> tuple[Array, Array]:
        """Returns this source's pairs (int32 [M, L, E]) and tokens (int64 [M])."""
        rank, num_ranks, num_experts = self.group.rank, self.group.size, int(self.config.num_moe_experts)
        if isinstance(work, Workload):
            if work.load_MLGE.shape[2:] != (num_ranks, num_experts):
                raise InputError(
                    f"the workload has {work.G} sources and {work.E} experts, the EP group {num_ranks} ranks and the model "
                    f"{num_experts} experts; count it for this EP group."
                )
            return work.load_MLGE[:, self._local(work.L), rank], work.tokens_MG[:, rank].astype(np.int64)
        if isinstance(work, str | bytes) or not isinstance(work, Sequence) or not len(work):
            got = "an empty list" if isinstance(work, list) else type(work).__name__
            raise InputError(f"work must be a Plan, a Workload, or a list with one array [T, L, K] per micro-step; got {got}.")
        load_MLE = count_micro_steps(work, num_experts, num_threads)
        num_topk = int(self.config.moe_router_topk)
        if other := next((topk for topk_TLK in work if (topk := np.shape(topk_TLK)[2]) != num_topk), None):
            raise InputError(f"the routing is top-{other} and the model top-{num_topk}; give the routing of this model.")
        return load_MLE[:, self._local(load_MLE.shape[1])], np.array([len(topk_TLK) for topk_TLK in work], np.int64)

    def _routing(self, work: Any) -> dict[tuple[int, int], Array]:
        """Returns a mapping from (micro-step, layer) to experts [T, K] of this source's tokens, which is empty for counts."""
        if isinstance(work, Workload):
            return {}
        micro_steps = [np.asarray(topk_TLK) for topk_TLK in work]
        layers = self._local(micro_steps[0].shape[1])
        return {(m, i): topk_TLK[:, layer] for m, topk_TLK in enumerate(micro_steps) for i, layer in enumerate(layers)}

    def _local(self, num_layers: int) -> list[int]:
        """Returns the positions of this rank's layers among the given layers."""
        mine, numbers = [place.number for place in self.places], list(self.numbers)
        here, everywhere = self.predicting
        # (description of the given layers, their number, positions of this rank's layers); layers of prediction come last.
        forms = [
            ("this rank's MoE layers", len(mine), list(range(len(mine)))),
            ("the model's MoE layers", len(numbers), [numbers.index(number) for number in mine]),
            ("all layers of the model", self.config.num_layers, mine),
        ]
        forms += [
            (f"{what} and those of multi-token prediction", num + more, places)
            for (what, num, places), more in zip(forms, (here, everywhere, everywhere), strict=True)
        ]
        fits = [(what, places) for what, num, places in forms if num == num_layers]
        if fits:
            other = next((what for what, places in fits if places != fits[0][1]), "")
            if other:
                warn_once(
                    _logger,
                    f"routing of {num_layers} layers is taken for that of {fits[0][0]}; it could be that of {other}. Give "
                    "only this rank's MoE layers, whose numbers are attached.moe_layers.",
                )
            return fits[0][1]
        raise InputError(
            f"routing of {num_layers} layers was given; this rank has {len(mine)} MoE layers, the model {len(numbers)} of "
            f"{self.config.num_layers}, and {everywhere} of multi-token prediction. Give those of this rank, or all."
        )
