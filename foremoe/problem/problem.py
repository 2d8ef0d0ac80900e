"""Problem: all that a solver may see. Hard constraints live here and are checked; preferences live on the solver."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, frozen_array, require_non_negative
from foremoe.base.errors import InputError
from foremoe.base.parallel import for_rows
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.kernels.demand import demand_rows
from foremoe.problem.placement import Placement, repeated
from foremoe.problem.schedule import Schedule
from foremoe.problem.slots import ResidentSlots, SharedSlots, Slots
from foremoe.routing.checks import layer_positions
from foremoe.workload.workload import STAGES

if TYPE_CHECKING:
    from foremoe.workload.workload import Dealt, Workload

# Letters: M micro-steps, L layers, N = M*L rows (n = m*L + l), G ranks, V nodes, E experts, B = E/G base slots, R redundant,
# S = B + R.

_KINDS = {"model": Model, "cluster": Cluster, "cost": CostModel, "schedule": Schedule}


# Read-only like the arrays it stands for: kernels compile once for both.
_UNKNOWN = frozen_array(np.zeros((1, 1, 1)), np.int32, "sources")


class Counts(NamedTuple):
    """Pairs of every row, int32: of each expert, by source rank, by source node; the last two hold nothing unless `located`."""

    load_NE: Array
    load_NGE: Array
    demand_NVE: Array
    located: bool


class _Derived:
    """Room for what a problem computes once; no field, so copies and files leave it out."""

    __slots__ = ("_demand_NVE",)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem(ArrayValue, _Derived):
    """One EP group, one stage, one weight version: the load, the machine, the limits and the objective.

    Attributes:
        model, cluster, cost: value types; ``cost.objective`` is what solvers minimise.
        stage: ``"recompute"`` (forward, weights frozen) or ``"update"`` (forward and backward).
        schedule: order of passes; its number of micro-steps is M.
        redundant: R, redundant slots per rank, >= 0.
        slots: `SharedSlots` or `ResidentSlots`.
        replicas: ``"any"``, or ``"node"``: a replica stays inside its home's node.
        home_LE: int32, home slot g*B + b of every expert, a permutation per layer.
        load_MLE: int32, (token, expert) pairs.
        load_MLGE: int32, the same by source rank, or None (dispatch is then priced without locality).
        tokens_MG, attention_MG: tokens and sum of squared sequence lengths per source rank, or None (no compute precedes the
            layer in the cost model then).
        resident_LGS: int16, what ResidentSlots hold when the plan begins (-1 nothing), or None.
        moe_layer_L: int32, the model's layer numbers.
        trace_id, dealt: where the load came from.

    Raises:
        InputError: shapes, ranges or sums that do not fit.
    """

    model: Model
    cluster: Cluster
    load_MLE: Array
    home_LE: Array
    schedule: Schedule
    cost: CostModel = field(default_factory=CostModel)
    stage: str = "update"
    redundant: int = 1
    slots: Slots = field(default_factory=SharedSlots)
    replicas: str = "any"
    load_MLGE: Array | None = None
    tokens_MG: Array | None = None
    attention_MG: Array | None = None
    resident_LGS: Array | None = None
    moe_layer_L: Array
    trace_id: str = ""
    dealt: Dealt | None = None

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} must be a {kind.__name__}; got {str(getattr(self, name))[:60]!r}.")
        if not isinstance(self.slots, Slots):
            raise InputError(f"slots must be SharedSlots or ResidentSlots; got {str(self.slots)[:60]!r}.")
        G = self.cluster.num_ranks
        put("load_MLE", frozen_array(self.load_MLE, np.int32, "load_MLE", (None, None, None)))
        require_non_negative(self.load_MLE, "load_MLE")
        M, L, E = self.load_MLE.shape
        if M == 0 or L == 0:
            raise InputError(f"a Problem needs at least one micro-step and one layer; got {M} and {L}.")
        if self.model.num_experts != E:
            raise InputError(f"the load has {E} experts but model {self.model.name} has {self.model.num_experts}.")
        if E < G or E % G:
            raise InputError(
                f"{E} experts do not divide over {G} ranks; choose a number of ranks that divides {E}"
                f" (for example {max(d for d in range(1, min(E, G) + 1) if E % d == 0)})."
            )
        if np.iinfo(np.int16).max < E:
            raise InputError(f"{E} experts are more than the {np.iinfo(np.int16).max} that plans can number.")
        if not isinstance(self.redundant, int | np.integer) or not 0 <= self.redundant <= E:
            raise InputError(f"redundant slots per rank must lie in [0, {E}]; got {self.redundant}.")
        if self.stage not in STAGES:
            raise InputError(f"stage must be one of {', '.join(STAGES)}; got {self.stage!r}.")
        if self.replicas not in ("any", "node"):
            raise InputError(f'replicas must be "any" or "node"; got {self.replicas!r}.')
        if self.schedule.M != M:
            raise InputError(f"the schedule runs {self.schedule.M} micro-steps but the load has {M}; make them equal.")
        if self.schedule.trains != (self.stage == "update"):
            raise InputError(
                f"stage {self.stage} needs a schedule {'with' if self.stage == 'update' else 'without'} backward passes."
            )
        self.schedule.uses(L)
        put("home_LE", frozen_array(self.home_LE, np.int32, "home_LE", (L, E)))
        if (np.sort(self.home_LE, axis=1) != np.arange(E)).any():
            bad = int(np.argmax((np.sort(self.home_LE, axis=1) != np.arange(E)).any(axis=1)))
            raise InputError(f"home_LE of layer {bad} is no permutation of the {E} home slots; give every expert its own.")
        put("moe_layer_L", frozen_array(self.moe_layer_L, np.int32, "moe_layer_L", (L,)))
        if self.load_MLGE is not None:
            put("load_MLGE", frozen_array(self.load_MLGE, np.int32, "load_MLGE", (M, L, G, E)))
            require_non_negative(self.load_MLGE, "load_MLGE")
            if (self.load_MLGE.sum(axis=2) != self.load_MLE).any():
                raise InputError("load_MLGE summed over source ranks differs from load_MLE; give the sums of the same counts.")
        if self.tokens_MG is not None:
            put("tokens_MG", frozen_array(self.tokens_MG, np.int32, "tokens_MG", (M, G)))
            require_non_negative(self.tokens_MG, "tokens_MG")
        if self.attention_MG is not None:
            put("attention_MG", frozen_array(self.attention_MG, np.float64, "attention_MG", (M, G)))
            require_non_negative(self.attention_MG, "attention_MG")
        if self.resident_LGS is not None:
            if not isinstance(self.slots, ResidentSlots):
                raise InputError("resident_LGS is for ResidentSlots; SharedSlots hold nothing from one plan to the next.")
            put("resident_LGS", frozen_array(self.resident_LGS, np.int16, "resident_LGS", (L, G, self.S)))
            if self.resident_LGS.min() < -1 or self.resident_LGS.max() >= E:
                raise InputError(
                    f"resident_LGS holds {self.resident_LGS.min()} to {self.resident_LGS.max()}; give experts from 0 to {E - 1},"
                    " or -1 for an empty slot."
                )
            if repeated(self.resident_LGS[..., self.B :]).any():
                raise InputError("resident_LGS holds an expert twice on one rank; empty one of the two slots.")

    @classmethod
    def of(
        cls,
        workload: Workload,
        cluster: Cluster,
        *,
        redundant: int = 1,
        model: Model | None = None,
        home_LE: Array | None = None,
        cost: CostModel | None = None,
        schedule: Schedule | None = None,
        slots: Slots | None = None,
        replicas: str = "any",
        resident_LGS: Array | None = None,
    ) -> Problem:
        """The problem of balancing `workload` on `cluster`.

        Args:
            redundant: R, slots per rank for replicas.
            model: default: the preset that the workload names, or the only one of its layers, experts and top-k.
            home_LE: default: contiguous, expert e at home slot e.
            cost: what to minimise; default ``CostModel(objective="time")``, the other is ``CostModel(objective="balance")``.
            schedule: default: forward only for recompute, gradient accumulation for update.
            slots: default `SharedSlots`.   replicas: ``"any"``, or ``"node"``: inside their home's node.
            resident_LGS: what `ResidentSlots` hold at the start.
        """
        if model is None:
            model = Model.preset(workload.model) if workload.model is not None else _by_shape(workload)
        if cluster.num_ranks != workload.G:
            raise InputError(
                f"the workload was dealt to {workload.G} source ranks but the cluster has {cluster.num_ranks}; make them equal."
            )
        if schedule is None:
            update = workload.stage == "update"
            schedule = Schedule.accumulate(workload.M) if update else Schedule.forward_only(workload.M)
        return cls(
            model=model,
            cluster=cluster,
            cost=cost if cost is not None else CostModel(),
            stage=workload.stage,
            schedule=schedule,
            redundant=redundant,
            slots=slots if slots is not None else SharedSlots(),
            replicas=replicas,
            home_LE=np.tile(np.arange(workload.E), (workload.L, 1)) if home_LE is None else home_LE,
            load_MLE=workload.load_MLE,
            load_MLGE=workload.load_MLGE,
            tokens_MG=workload.tokens_MG,
            attention_MG=workload.attention_MG,
            resident_LGS=resident_LGS,
            moe_layer_L=workload.moe_layer_L,
            trace_id=workload.trace_id,
            dealt=workload.dealt,
        )

    @property
    def M(self) -> int:
        """Micro-steps."""
        return int(self.load_MLE.shape[0])

    @property
    def L(self) -> int:
        """MoE layers of this problem."""
        return int(self.load_MLE.shape[1])

    @property
    def E(self) -> int:
        """Logical experts."""
        return int(self.load_MLE.shape[2])

    @property
    def N(self) -> int:
        """Rows: micro-steps times layers."""
        return self.M * self.L

    @property
    def G(self) -> int:
        """Ranks of the EP group."""
        return self.cluster.num_ranks

    @property
    def R(self) -> int:
        """Redundant slots per rank."""
        return int(self.redundant)

    @property
    def B(self) -> int:
        """Base slots per rank."""
        return self.E // self.G

    @property
    def S(self) -> int:
        """Slots per rank."""
        return self.B + self.R

    @property
    def load_NE(self) -> Array:
        """int32 [N, E], a view of `load_MLE`."""
        return self.load_MLE.reshape(self.N, self.E)

    @property
    def load_NGE(self) -> Array | None:
        """int32 [N, G, E], a view of `load_MLGE`."""
        return None if self.load_MLGE is None else self.load_MLGE.reshape(self.N, self.G, self.E)

    @property
    def demand_NVE(self) -> Array | None:
        """int32 [N, V, E]: pairs that the tokens of a node send to an expert; summed once and kept."""
        load_NGE, node_G = self.load_NGE, self.cluster.node_of_rank_G
        if load_NGE is None:
            return None
        kept: Array | None = getattr(self, "_demand_NVE", None)
        if kept is None:
            demand_NVE = np.empty((self.N, self.cluster.num_nodes, self.E), np.int32)
            for_rows(lambda low, high: demand_rows(low, high, load_NGE, node_G, demand_NVE), self.N, whole=True)
            demand_NVE.flags.writeable = False
            object.__setattr__(self, "_demand_NVE", demand_NVE)
            kept = demand_NVE
        return kept

    def counts(self) -> Counts:
        """The load as compiled functions read it."""
        load_NGE, demand_NVE = self.load_NGE, self.demand_NVE
        if load_NGE is None or demand_NVE is None:
            return Counts(self.load_NE, _UNKNOWN, _UNKNOWN, False)
        return Counts(self.load_NE, load_NGE, demand_NVE, True)

    @property
    def layer_N(self) -> Array:
        """int64 [N]: layer of each row."""
        return np.tile(np.arange(self.L), self.M)

    @property
    def base_NGB(self) -> Array:
        """int16 [N, G, B]: the expert at home in every base slot."""
        base_LE = np.empty((self.L, self.E), np.int16)
        np.put_along_axis(base_LE, self.home_LE, np.arange(self.E, dtype=np.int16)[None], axis=1)
        base_NGB: Array = np.tile(base_LE, (self.M, 1)).reshape(self.N, self.G, self.B)
        return base_NGB

    def static(self) -> Placement:
        """Every expert served at home, redundant slots empty."""
        expert_NGS = np.full((self.N, self.G, self.S), -1, np.int16)
        quota_NGS = np.zeros((self.N, self.G, self.S), np.int32)
        base_NGB = self.base_NGB
        expert_NGS[:, :, : self.B] = base_NGB
        flat_NE = base_NGB.reshape(self.N, self.E)
        quota_NGS[:, :, : self.B] = np.take_along_axis(self.load_NE, flat_NE.astype(np.int64), axis=1).reshape(base_NGB.shape)
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)

    def with_load(self, load_MLE: Array) -> Problem:
        """The same problem with another load (a prediction, say), whose sources are not known."""
        return dataclasses.replace(self, load_MLE=load_MLE, load_MLGE=None)

    def __getitem__(self, micro_steps: slice) -> Problem:
        """A range of micro-steps as a problem of its own (streaming).

        What is resident after the micro-steps before it is not known here: a range that starts later starts from nothing.
        """
        if not isinstance(micro_steps, slice):
            raise InputError(f"index a problem by a slice such as problem[0:2]; got {micro_steps!r}.")
        cut = lambda a: None if a is None else a[micro_steps]  # noqa: E731
        return dataclasses.replace(
            self,
            load_MLE=self.load_MLE[micro_steps],
            load_MLGE=cut(self.load_MLGE),
            tokens_MG=cut(self.tokens_MG),
            attention_MG=cut(self.attention_MG),
            resident_LGS=self.resident_LGS if micro_steps.indices(self.M)[0] == 0 else None,
            schedule=self.schedule[micro_steps],
        )

    def layers(self, indices: Sequence[int], schedule: Schedule | None = None) -> Problem:
        """Some layers as a problem of their own; `schedule` is needed if this one's has several chunks."""
        index = layer_positions(indices, self.L)
        cut = lambda a: None if a is None else a[index]  # noqa: E731
        return dataclasses.replace(
            self,
            load_MLE=self.load_MLE[:, index],
            load_MLGE=None if self.load_MLGE is None else self.load_MLGE[:, index],
            home_LE=self.home_LE[index],
            resident_LGS=cut(self.resident_LGS),
            moe_layer_L=self.moe_layer_L[index],
            schedule=self.schedule if schedule is None else schedule,
        )


def _by_shape(workload: Workload) -> Model:
    found = Model.matching(workload.L, workload.E, workload.num_topk)
    if len(found) == 1:
        return found[0]
    shape = f"{workload.L} layers with top-{workload.num_topk} of {workload.E} experts"
    names = f"{', '.join(m.name for m in found)} all have" if found else "no preset has"
    raise InputError(f"the workload names no model and {names} {shape}; pass model=Model.preset(...) or a Model of your own.")
