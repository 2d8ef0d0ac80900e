"""PlanHeader: the inputs that a plan was made from. It makes a plan file self-contained."""

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
    """Position of a plan in training.

    Attributes:
        step: Index of the RL step.
        stage: Stage of the RL step, ``"recompute"`` or ``"update"``.
        mini_batch: Index of the mini-batch in the step.
        ep_group: Index of the EP group.
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
    """Origin of a plan, with its inputs and the version of foremoe. It contains no time, host name or weight version.

    Attributes:
        key: Position of the plan in training.
        planner: Repr of the planner.
        model: Sizes of the model.
        cluster: Ranks and links.
        cost: Cost model, including the objective.
        schedule: Order of passes.
        redundant: R, the number of redundant slots per rank.
        slot_depth: Number of buffers per redundant slot (see `Problem`).
        replicas: Ranks that may hold a replica: ``"any"`` rank, or only ranks in the ``"node"`` of its home.
        keeps_homes: Whether experts keep their homes. If not, the plan can be rated but not executed.
        moe_layer_L: Indices of the planned layers among all layers of the model, int32 [L].
        trace_id: Id of the trace that the load comes from, or an empty string.
        dealt: Record of how whole sequences were packed, or None.
        foremoe: Version of foremoe that made the plan. It is empty if the version is not known.
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
        """Number of buffers on one rank, each the size of one expert."""
        return self.redundant * self.slot_depth


_KINDS: dict[str, Any] = {
    "key": PlanKey, "model": Model, "cluster": Cluster, "cost": CostModel, "schedule": Schedule,
    "planner": str, "trace_id": str, "dealt": Dealt | None, "foremoe": str,
}  # fmt: skip
