"""Planning: from what the user gives a stage to a plan for this rank's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.distributed.planning import Planned, PlanningTask, homes_together, plan_together
from foremoe.integrations.megatron.layout import Place, model_of, moe_numbers, schedule_of
from foremoe.machine.cluster import Cluster
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.cost import CostModel
from foremoe.problem.slots import Slots
from foremoe.routing.readers.counting import count_micro_steps
from foremoe.runtime.stage import first_fault
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L MoE layers, T tokens of a source, K top-k, E experts.

Work = Plan | Workload | Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Planning:
    """What `attach` was given for planning, and what it found out about the model.

    Attributes:
        config: Megatron's `TransformerConfig`.   places: this rank's MoE layers.   home_LE: Megatron's own homes.
        weight_bytes: of one weight.   device: for messages.   limit_s: seconds that planning may take on a rank, or None.
    """

    group: Group
    planner: Planner
    cost: CostModel
    slots: Slots
    replicas: str
    redundant: int
    config: Any
    places: Sequence[Place]
    home_LE: Array
    cluster: Cluster
    weight_bytes: int
    device: torch.device
    limit_s: float | None

    def plan(self, work: Work, stage: str, home_LE: Array | None, num_threads: int | None) -> Planned:
        """See `Attached.plan`."""
        homes = self.home_LE if home_LE is None else home_LE
        ((task, load_MLE, tokens_M),) = self._agreed([(work, stage)], homes, num_threads)
        return plan_together(
            self.group, self.planner, task, load_MLE, tokens_M,
            device=self.device, num_threads=num_threads, limit_s=self.limit_s,
        )  # fmt: skip

    def homes(self, stages: Sequence[tuple[Work, str]], num_threads: int | None) -> Array:
        """See `Attached.homes`."""
        tasks, loads, tokens = zip(*self._agreed(stages, self.home_LE, num_threads), strict=True)
        return homes_together(self.group, self.planner, tasks, loads, tokens, device=self.device, num_threads=num_threads)

    def _task(self, stage: str, num_micro_steps: int, home_LE: Array) -> PlanningTask:
        return PlanningTask(
            model=model_of(self.config, len(self.places), float(self.weight_bytes)), cluster=self.cluster, stage=stage,
            schedule=schedule_of(self.config, self.places, num_micro_steps, forward_only=stage == "recompute"),
            redundant=self.redundant, slots=self.slots, cost=self.cost, replicas=self.replicas, home_LE=home_LE,
            moe_layer_L=np.array([place.number for place in self.places], np.int32),
        )  # fmt: skip

    def _agreed(
        self, stages: Sequence[tuple[Work, str]], home_LE: Array, num_threads: int | None = None
    ) -> list[tuple[PlanningTask, Array, Array]]:
        """Each stage's task and this source's counts, or one error on all ranks."""
        fault, found = "", []
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
        """int32 [M, L, E] pairs and int64 [M] tokens of this source."""
        rank, num_ranks, num_experts = self.group.rank, self.group.size, int(self.config.num_moe_experts)
        if isinstance(work, Workload):
            if work.load_MLGE.shape[2:] != (num_ranks, num_experts):
                raise InputError(
                    f"the workload has {work.G} sources and {work.E} experts, the EP group {num_ranks} ranks and the model "
                    f"{num_experts} experts; count it for this EP group."
                )
            return work.load_MLGE[:, self._local(work.L), rank], work.tokens_MG[:, rank].astype(np.int64)
        if isinstance(work, str | bytes) or not isinstance(work, Sequence) or not len(work):
            raise InputError(
                f"work must be a Plan, a Workload, or a list with one array [T, L, K] per micro-step; got {type(work).__name__}."
            )
        load_MLE = count_micro_steps(work, num_experts, num_threads)
        return load_MLE[:, self._local(load_MLE.shape[1])], np.array([len(topk_TLK) for topk_TLK in work], np.int64)

    def _local(self, num_layers: int) -> list[int]:
        """Which of the layers that were given are this rank's."""
        mine, numbers = [place.number for place in self.places], moe_numbers(self.config)
        if num_layers == len(mine):
            return list(range(num_layers))
        if num_layers == len(numbers):
            return [numbers.index(number) for number in mine]
        if num_layers == self.config.num_layers:
            return mine
        raise InputError(
            f"routing of {num_layers} layers was given; this rank has {len(mine)} MoE layers, the model {len(numbers)} of "
            f"{self.config.num_layers}. Give those of this rank, or all."
        )
