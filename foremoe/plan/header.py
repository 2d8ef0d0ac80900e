"""PlanHeader: the origin of a plan, so that a plan file is self-contained."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.base.errors import InputError
from foremoe.base.fields import MAX_WHOLE, check_fields, flag, shown, whole
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.schedule import Schedule
from foremoe.workload.dealing import Dealt
from foremoe.workload.workload import STAGES

FORMAT_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """Identifies the part of training that a plan is for.

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

    def __post_init__(self) -> None:
        check_fields(self, ((partial(whole, low=0, high=MAX_WHOLE), ("step", "mini_batch", "ep_group")),))
        if self.stage not in STAGES:
            raise InputError(f"stage must be one of {', '.join(STAGES)}; got {shown(self.stage)}.")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanHeader(ArrayValue):
    """Origin of a plan: its inputs, and the version of foremoe. It has no clock, host name or weight version.

    Attributes:
        planner: The planner as text, its repr.
        redundant: R, redundant slots per rank.
        slot_depth: Buffers per redundant slot; see `Problem`.
        replicas: ``"any"``, or ``"node"``: none leaves its home's node.
        keeps_homes: Whether experts keep their homes; if not, the plan is scored, never executed.
        moe_layer_L: int32 [L], the model's own layer numbers.
        trace_id: Id of the trace that was counted, or empty.
        dealt: How whole sequences were packed, or None.
        foremoe: Version that made the plan; empty if unknown, as in files of format 1.
    """

    key: PlanKey
    planner: str
    model: Model
    cluster: Cluster
    cost: CostModel
    schedule: Schedule
    redundant: int
    slot_depth: int
    replicas: str
    keeps_homes: bool
    moe_layer_L: Array = array(np.int32)
    trace_id: str
    dealt: Dealt | None
    foremoe: str = ""

    def __post_init__(self) -> None:
        self.freeze()
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} of a plan is not valid: {shown(getattr(self, name))}.")
        counts = (partial(whole, low=0, high=MAX_WHOLE), ("redundant",)), (partial(whole, low=1, high=1024), ("slot_depth",))
        check_fields(self, (*counts, (flag, ("keeps_homes",))))
        if self.replicas not in ("any", "node"):
            raise InputError(f'replicas must be "any" or "node"; got {shown(self.replicas)}.')

    @property
    def num_buffers(self) -> int:
        """Buffers on one rank, each of the size of one expert."""
        return self.redundant * self.slot_depth


_KINDS: dict[str, Any] = {
    "key": PlanKey, "model": Model, "cluster": Cluster, "cost": CostModel, "schedule": Schedule,
    "planner": str, "trace_id": str, "dealt": Dealt | None, "foremoe": str,
}  # fmt: skip
