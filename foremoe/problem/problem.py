"""Problem: the input of solvers. It holds and checks the hard constraints. Preferences are settings of the solvers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, Length, array
from foremoe.base.errors import InputError
from foremoe.base.fields import whole
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.counts import Counts, count
from foremoe.problem.placement import Placement
from foremoe.problem.schedule import Schedule
from foremoe.routing.checks import layer_positions
from foremoe.workload.dealing import Dealt
from foremoe.workload.routed_tokens import RoutedTokens
from foremoe.workload.workload import STAGES, Workload

# Letters: M micro-steps, L layers, N = M*L rows (n = m*L + l), G ranks, V nodes, E experts, B = E/G base slots, R redundant,
# S = B + R, X scenarios.

_OF_WORKLOAD = ("load_MLE", "load_MLGE", "tokens_MG", "attention_MG", "stage", "moe_layer_L", "trace_id", "dealt")
_KINDS = {"model": Model, "cluster": Cluster, "cost": CostModel, "schedule": Schedule}
T = TypeVar("T")


class Derived:
    """Values that are cached on a problem. They are not fields, so copies of a problem and files do not contain them."""

    __slots__ = (
        "_counts", "_load_bound", "_problem_prices", "_problem_rates", "_problem_rows", "_row_bound",
        "_row_times",
    )  # fmt: skip


def once(work_out: Callable[[Any], T]) -> Callable[[Any], T]:
    """Decorates a function of a problem so that its result is cached on the problem, under the function's name."""
    slot = f"_{work_out.__name__.lstrip('_')}"

    @functools.wraps(work_out)
    def kept(problem: Any) -> T:
        if not hasattr(problem, slot):
            object.__setattr__(problem, slot, work_out(problem))
        return getattr(problem, slot)

    return kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem(ArrayValue, Derived):
    """The load, machine, limits and objective of one EP group, one stage and one weight version.

    Attributes:
        model: Sizes of the model.
        cluster: Ranks and links.
        cost: Cost model. Solvers minimise ``cost.objective``.
        stage: Stage to plan, ``"recompute"`` (forward, weights frozen) or ``"update"`` (forward and backward).
        schedule: Order of passes, with M micro-steps.
        redundant: R, the number of redundant slots per rank, at least 0.
        slot_depth: Number of buffers per redundant slot. All layers share one ring of ``redundant * slot_depth`` buffers, each
            the size of an expert. With more buffers, copies may start earlier. An expert that is still in a buffer when the
            backward pass needs it is not sent again. With large micro-steps, 2 buffers are enough: at 8,192 tokens per rank,
            stages take at most 0.2 % longer than with 3. With small micro-steps, the third buffer pays off.
        replicas: Ranks that may hold a replica: ``"any"`` rank, or only ranks in the ``"node"`` of its home.
        home_LE: Home slot g*B + b of every expert, int32. The entries of a layer are a permutation.
        load_MLE: Number of (token, expert) pairs of each expert, int32.
        load_MLGE: Number of pairs of each expert by source rank, int32. If None, dispatch is priced as if all ranks sent the same
            number of pairs.
        tokens_MG: Number of tokens per source rank, int32. If None, the cost model omits the work before the experts.
        attention_MG: Sum of squared sequence lengths per source rank, float64, or None.
        moe_layer_L: Indices of the planned layers among all layers of the model, int32.
        trace_id: Id of the trace that the load comes from, or an empty string.
        dealt: Record of how the sequences were packed, or None.
        routed: Routing of every token. If None, the simulator estimates ``"node"`` dispatch from counts.
        scenario_XMLE: Equally likely loads, int32, for a `load_MLE` that is only a prediction. Scenarios without pairs are
            ignored. Each row is placed once for all scenarios, and its quotas are split when its load is known. None if the load
            is known or there are no scenarios.
        scenarios_complete: Whether the real load of a row is certain to be one of its scenarios. False if the scenarios are
            samples.

    Raises:
        InputError: An array has the wrong shape, a value is out of range, or sums do not agree.
    """

    model: Model
    cluster: Cluster
    load_MLE: Array = array(np.int32, negative=False)
    home_LE: Array = array(np.int32)
    schedule: Schedule
    cost: CostModel = field(default_factory=CostModel)
    stage: str = "update"
    redundant: int = 1
    slot_depth: int = 3
    replicas: str = "any"
    load_MLGE: Array | None = array(np.int32, optional=True, negative=False)
    tokens_MG: Array | None = array(np.int32, optional=True, negative=False)
    attention_MG: Array | None = array(np.float64, optional=True, negative=False)
    moe_layer_L: Array = array(np.int32)
    trace_id: str = ""
    dealt: Dealt | None = None
    routed: RoutedTokens | None = None
    scenario_XMLE: Array | None = array(np.int32, optional=True, negative=False)
    scenarios_complete: bool = False

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(f"{name} must be a {kind.__name__}; got {str(getattr(self, name))[:60]!r}.")
        whole(self.slot_depth, "slot_depth", 1, 1024)
        self.freeze("load_MLE")
        self._check_sizes()
        self.freeze(G=self.G)
        if self.stage not in STAGES:
            raise InputError(f"stage must be one of {', '.join(STAGES)}; got {self.stage!r}.")
        if self.replicas not in ("any", "node"):
            raise InputError(f'replicas must be "any" or "node"; got {self.replicas!r}.')
        if self.schedule.M != self.M:
            raise InputError(f"the schedule runs {self.schedule.M} micro-steps but the load has {self.M}; make them equal.")
        if self.schedule.trains != (self.stage == "update"):
            needs = "with" if self.stage == "update" else "without"
            raise InputError(f"stage {self.stage} needs a schedule {needs} backward passes.")
        self.schedule.uses(self.L)
        wrong_L = (np.sort(self.home_LE, axis=1) != np.arange(self.E)).any(axis=1)
        if wrong_L.any():
            layer = np.argmax(wrong_L)
            raise InputError(f"home_LE of layer {layer} is not a permutation of the {self.E} home slots; give each its own.")
        if self.load_MLGE is not None and (self.load_MLGE.sum(axis=2) != self.load_MLE).any():
            raise InputError("load_MLGE summed over source ranks differs from load_MLE; give the sums of the same counts.")
        if fault := layer_number_fault(self.moe_layer_L, self.model):
            raise InputError(fault)

    def _check_sizes(self) -> None:
        E, G = self.E, self.G
        if self.N == 0:
            raise InputError(f"a Problem needs at least one micro-step and one layer; got {self.M} and {self.L}.")
        if self.model.num_experts != E:
            raise InputError(f"the load has {E} experts but model {self.model.name} has {self.model.num_experts}.")
        if E < G or E % G:
            most = max(d for d in range(1, min(E, G) + 1) if E % d == 0)
            apart = f"{E} experts do not divide over {G} ranks"
            raise InputError(f"{apart}; choose a number of ranks that divides {E}, for example {most}.")
        if np.iinfo(np.int16).max < E:
            raise InputError(f"{E} experts are more than the {np.iinfo(np.int16).max} that plans can number.")
        if not isinstance(self.redundant, int | np.integer) or not 0 <= self.redundant <= E:
            cure = "; foremoe.choose_slots(problem) finds the number that pays off" if str(self.redundant) == "auto" else ""
            raise InputError(f"redundant slots per rank must lie in [0, {E}]; got {self.redundant}{cure}.")

    @classmethod
    def of(
        cls, workload: Workload, cluster: Cluster, *, redundant: int = 1, model: Model | str | None = None,
        home_LE: Array | None = None, cost: CostModel | None = None, schedule: Schedule | None = None,
        slot_depth: int = 3, replicas: str = "any", routed: RoutedTokens | None = None,
    ) -> Self:  # fmt: skip
        """Creates the problem of balancing `workload` on `cluster`. All further arguments are attributes of `Problem`.

        Args:
            redundant: Number of redundant slots per rank. To find the number that pays off, as commands do by default, call
                ``choose_slots(Problem.of(work, cluster)).problem``.
            model: Sizes of the model, or the name of a preset. Defaults to the preset that the workload names, or to the only
                preset with its shape.
            home_LE: Home slots of the experts. By default, expert e is at home slot e.
            cost: Cost model. Defaults to ``CostModel(objective="time")``. The other objective is ``"balance"``.
            schedule: Order of passes. By default, recompute runs only forward passes, and update runs gradient accumulation.

        Raises:
            InputError: No model fits the workload, workload and cluster differ in the number of ranks, or `Problem` refuses a
                value.

        Example:
            >>> two = foremoe.Problem.of(work, cluster, redundant=2)
            >>> two.N, two.G, two.E, two.S
            (16, 8, 32, 6)
        """
        model = model or workload.model or _by_shape(workload)
        if isinstance(model, str):
            model = Model.preset(Model.preset_of(model) or model)
        if cluster.num_ranks != workload.G:
            sizes = f"the workload was dealt to {workload.G} source ranks but the cluster has {cluster.num_ranks}"
            raise InputError(f"{sizes}; make them equal.")
        return cls(
            model=model, cluster=cluster, cost=cost or CostModel(), redundant=redundant, slot_depth=slot_depth,
            schedule=schedule or Schedule.plain(workload.stage, workload.M), replicas=replicas, routed=routed,
            home_LE=np.tile(np.arange(workload.E), (workload.L, 1)) if home_LE is None else home_LE,
            **{name: getattr(workload, name) for name in _OF_WORKLOAD},
        )  # fmt: skip

    M = Length("load_MLE")
    """Number of micro-steps."""

    L = Length("load_MLE")
    """Number of MoE layers in this problem."""

    E = Length("load_MLE")
    """Number of logical experts."""

    def __repr__(self) -> str:
        return (
            f"Problem({self.M} micro-steps, {self.L} layers, {self.G} ranks of {self.cluster.name!r}, {self.E} experts of"
            f" {self.model.name!r}, R={self.R}, stage={self.stage!r}, objective={self.cost.objective!r})"
        )

    @property
    def N(self) -> int:
        """Number of rows, M x L."""
        return self.M * self.L

    @property
    def G(self) -> int:
        """Number of ranks in the EP group."""
        return self.cluster.num_ranks

    @property
    def R(self) -> int:
        """Number of redundant slots per rank."""
        return int(self.redundant)

    @property
    def B(self) -> int:
        """Number of base slots per rank."""
        return self.E // self.G

    @property
    def S(self) -> int:
        """Number of slots per rank, B + R."""
        return self.B + self.R

    @property
    def load_NE(self) -> Array:
        """View of `load_MLE`, int32 [N, E]."""
        return self.load_MLE.reshape(self.N, self.E)

    @property
    def load_NGE(self) -> Array | None:
        """View of `load_MLGE`, int32 [N, G, E], or None."""
        return None if self.load_MLGE is None else self.load_MLGE.reshape(self.N, self.G, self.E)

    @once
    def counts(self) -> Counts:
        """Returns the load as ``Counts``, which compiled functions read. Cached on the problem."""
        return count(self.load_NE, self.load_NGE, self.cluster.node_of_rank_G)

    @property
    def base_NGB(self) -> Array:
        """Expert whose home is the base slot, for every base slot, int16 [N, G, B]."""
        base_LE = np.empty((self.L, self.E), np.int16)
        np.put_along_axis(base_LE, self.home_LE, np.arange(self.E, dtype=np.int16)[None], axis=1)
        return np.tile(base_LE, (self.M, 1)).reshape(self.N, self.G, self.B)

    def static(self) -> Placement:
        """Returns the placement with every expert at home and all redundant slots empty."""
        expert_NGS = np.full((self.N, self.G, self.S), -1, np.int16)
        quota_NGS, base_NGB = np.zeros(expert_NGS.shape, np.int32), self.base_NGB
        expert_NGS[:, :, : self.B] = base_NGB
        load_NE = np.take_along_axis(self.load_NE, base_NGB.reshape(self.N, self.E).astype(np.int64), axis=1)
        quota_NGS[:, :, : self.B] = load_NE.reshape(base_NGB.shape)
        return Placement(expert_NGS=expert_NGS, quota_NGS=quota_NGS)

    def with_load(self, load_MLE: Array) -> Self:
        """Returns the same problem with another load, such as a prediction. The source ranks of its pairs are not known."""
        return dataclasses.replace(self, load_MLE=load_MLE, load_MLGE=None, routed=None, scenario_XMLE=None)

    def __getitem__(self, micro_steps: slice) -> Self:
        """Returns a range of micro-steps as a separate problem. Its `routed` is None."""
        if not isinstance(micro_steps, slice):
            raise InputError(f"index a problem by a slice such as problem[0:2]; got {micro_steps!r}.")
        cut = self.cut_arrays(M=micro_steps)
        return dataclasses.replace(self, **cut, schedule=self.schedule[micro_steps], routed=None)

    def layers(self, indices: Sequence[int], schedule: Schedule | None = None) -> Self:
        """Returns a problem with only the layers `indices`. `schedule` is required if the current schedule has several chunks."""
        cut = self.cut_arrays(L=layer_positions(indices, self.L))
        return dataclasses.replace(self, **cut, schedule=self.schedule if schedule is None else schedule)


def layer_number_fault(moe_layer_L: Array, model: Model) -> str:
    """Returns one sentence that says why `model` does not have these layers, or an empty string if it has them."""
    end = model.first_moe_layer + model.num_layers
    if moe_layer_L.size and not 0 <= moe_layer_L.min() <= moe_layer_L.max() < end:
        have = f"layer numbers go from {moe_layer_L.min()} to {moe_layer_L.max()}"
        return f"{have}, but the last layer of {model.name} is {end - 1}; give the model's own numbers."
    if len(np.unique(moe_layer_L)) < len(moe_layer_L):
        return f"of {len(moe_layer_L)} layer numbers {len(np.unique(moe_layer_L))} differ; give each layer its own."
    return ""


def _by_shape(workload: Workload) -> Model:
    found = Model.matching(workload.L, workload.E, workload.num_topk)
    if len(found) == 1:
        return found[0]
    shape = f"{workload.L} layers with top-{workload.num_topk} of {workload.E} experts"
    names = f"{', '.join(m.name for m in found)} all have" if found else "no preset has"
    raise InputError(f"the workload names no model and {names} {shape}; pass model=Model.preset(...) or a Model of your own.")
