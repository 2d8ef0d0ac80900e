"""PlanHeader: what a plan was made from, so that a plan file stands on its own."""

from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import Slots
from foremoe.workload.dealing import Dealt

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """Which part of training a plan is for.

    Attributes:
        step: Number of the RL step.
        stage: ``"recompute"`` or ``"update"``.
        mini_batch: Number of the mini-batch in the step.
        ep_group: Number of the EP group.
    """

    step: int = 0
    stage: str = "update"
    mini_batch: int = 0
    ep_group: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanHeader(ArrayValue):
    """What a plan was made from. No clock, host name or weight version: a plan is a function of its input.

    Attributes:
        planner: Text of the planner, its repr.
        redundant: R, redundant slots per rank.
        replicas: ``"any"``, or ``"node"``: none leaves its home's node.
        keeps_homes: False for plans that are scored, never executed.
        moe_layer_L: int32 [L], the model's own layer numbers.
        trace_id: Id of the trace that was counted, or empty.
        dealt: How whole sequences were dealt, or None.
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
    moe_layer_L: Array = array(np.int32)
    trace_id: str
    dealt: Dealt | None
