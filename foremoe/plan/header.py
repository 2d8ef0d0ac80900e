"""PlanHeader: what a plan was made from, so that a plan file stands on its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, frozen_array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import Slots
from foremoe.workload.workload import Dealt

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """Which part of training a plan is for."""

    step: int = 0
    stage: str = "update"
    mini_batch: int = 0
    ep_group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanHeader(ArrayValue):
    """What a plan was made from. No clock, host name or weight version: a plan is a function of its input.

    Attributes:
        key: `PlanKey`.   planner: repr of the planner.   model, cluster, cost, slots, schedule: as in the problem.
        redundant: R.   replicas: "any" or "node".   keeps_homes: False for plans that are scored, never executed.
        moe_layer_L: int32, the model's layer numbers.   trace_id, dealt: where the load came from and how it was dealt.
    """

    key: PlanKey
    planner: str
    model: Model
    cluster: Cluster
    cost: CostModel
    slots: Slots
    schedule: Schedule
    redundant: int
    replicas: str
    keeps_homes: bool
    moe_layer_L: Array
    trace_id: str
    dealt: Dealt | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "moe_layer_L", frozen_array(self.moe_layer_L, np.int32, "moe_layer_L", (None,)))
