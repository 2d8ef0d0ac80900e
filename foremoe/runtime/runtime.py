"""`Runtime`: runs the MoE layers of one rank in plain torch, either with a plan or with all experts at home."""

import contextlib
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group, as_group
from foremoe.plan.plan import Plan
from foremoe.problem.schedule import Phase
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.dispatch import Combine, Dispatch, Route, exchange_counts
from foremoe.runtime.experts import ComputeTime, GroupedExperts, Row
from foremoe.runtime.replay import ReplayedRows, Routing
from foremoe.runtime.stage import HomeStage, PlannedStage, Stage, agree_on_split
from foremoe.transfer.engine import Engine
from foremoe.transfer.settings import EngineSettings
from foremoe.transfer.timeline import Timeline

# Letters: T tokens of this source, K top-k, H hidden size, M micro-steps, L layers, G ranks, S slots, P = G*S physical slots.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageSummary(ArrayValue):
    """Statistics of one stage on one rank.

    Attributes:
        timeline: Timeline of the engine, or None if the stage had no plan.
        drift_ML: Number of this rank's pairs that the plan did not contain and that were served at home, int64.
        served_MLS: Number of pairs that each of this rank's slots received, int64.
        fell_back: Rows (micro-step, layer) that ran with all experts at home because a replica was missing.
        forward_cpu_s: CPU seconds that the calling thread spent on forward expert compute. With one intra-op thread, this
            includes all of the compute. On a GPU, it includes only the time to launch kernels.
        backward_cpu_s: CPU seconds that the calling thread spent on backward expert compute, including recomputation.
    """

    timeline: Timeline | None
    drift_ML: Array = array(np.int64)
    served_MLS: Array = array(np.int64)
    fell_back: tuple[tuple[int, int], ...]
    forward_cpu_s: float
    backward_cpu_s: float

    def to_dict(self) -> dict[str, Any]:
        """Returns totals in a form that suits metrics and JSON."""
        return {
            "drift": int(self.drift_ML.sum()), "served": int(self.served_MLS.sum()), "fell_back": len(self.fell_back),
            "retired": [] if self.timeline is None else list(self.timeline.retired),
            "forward_cpu_s": self.forward_cpu_s, "backward_cpu_s": self.backward_cpu_s,
            "timeline": None if self.timeline is None else self.timeline.to_dict(),
        }  # fmt: skip


class Runtime:
    """Runs the experts of a bank stage by stage::

        runtime = Runtime(bank, group=group)
        runtime.begin(plan, plan.rows_for(workload, rank))
        ...  y_TH = runtime.moe(layer, x_TH, topk_TK, weight_TK)  in the model's forward; loss.backward() ...
        report = runtime.end()

    All ranks of the group must run the same passes in the same order. The n-th forward pass of a layer in a stage belongs to the
    n-th micro-step that the plan's schedule has for this layer. The same holds for backward passes. Layers may be checkpointed
    with either variant of ``torch.utils.checkpoint``, one by one or in the blocks of ``Schedule.block_L``. A model that calls
    `moe` may be compiled. ``torch.compile`` then breaks the graph at this call and does not compile the layer.

    After a `TransferError`, only `close` may be called. A runtime that is used as a context manager closes at the end of the
    block. If an exception leaves the block, the runtime reports it to the other ranks, so that they do not wait for this rank.

    Args:
        group: EP group, given as a `Group`, a process group, or None for all ranks.
        settings: Settings of the engine, which must be the same on all ranks.
        options: Fields of `EngineSettings` that override `settings`, such as ``backends=("collective",)``.
    """

    def __init__(
        self, bank: ExpertBank, *, group: Group | dist.ProcessGroup | None = None, settings: EngineSettings | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self.settings = EngineSettings.of(settings, **options)
        self._owns_group = not isinstance(group, Group)
        self.group = as_group(group)
        if (bank.rank, bank.num_ranks) != (self.group.rank, self.group.size):
            here = f"rank {self.group.rank} of {self.group.size}"
            if self._owns_group:
                self.group.close()
            raise InputError(f"the bank is for rank {bank.rank} of {bank.num_ranks}, this is {here}; make one for this rank.")
        self.bank = bank
        self._engine: Engine | None = None
        self._stage: Stage | None = None
        self._time = ComputeTime()
        self._anchor = torch.zeros((), device=bank.device, requires_grad=True)
        self._closed = False

    def begin(self, plan: Plan, split_MLP: Array, *, routing: Routing | None = None, same_weights: bool = False) -> None:
        """Starts a stage that follows a plan. Collective.

        Args:
            plan: Plan for the bank's homes, the same on all ranks.
            split_MLP: Number of pairs that the plan sends from this source to each slot, from ``plan.rows_for(workload, rank)``.
            routing: The topk_TK that `moe` will receive for each (micro-step, layer), in host memory. If all ranks know a row and
                it matches the plan, the ranks exchange no counts for it, and the hosts do not wait for their devices. However, a
                missing replica of such a row ends the step.
            same_weights: True if no rank has written a weight since the previous plan began. See `Engine.begin`.

        Raises:
            InputError: The plan or the routing does not match the model, or the splits of all ranks do not sum to the plan's
                quotas. Raised on all ranks.
        """
        self._require_idle()
        device = self.bank.device
        received_GMLS = agree_on_split(self.group, plan, split_MLP, self.bank.home_LE, device)
        replay = ReplayedRows(
            routing or {}, plan.expert_MLGS, split_MLP, received_GMLS, num_experts=plan.E, group=self.group, device=device
        )
        if self._engine is None:
            self._engine = Engine(self.bank, group=self.group, settings=self.settings)
        self._engine.begin(plan, same_weights=same_weights)
        self._start(PlannedStage(self._engine, plan, split_MLP, device, replay))

    def begin_home(self) -> None:
        """Starts a stage without a plan, in which every pair goes to its expert's home. Micro-steps may run in any order."""
        self._require_idle()
        self._start(HomeStage(self.bank))

    @_disable_dynamo  # exchanges, reads by the host and borrowed weights cannot be traced
    def moe(self, layer: int, x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        """Computes a layer's experts: ``y[t] = sum over k of weight[t, k] * expert topk[t, k] (x[t])``.

        Both the forward and the backward pass are collective.

        Args:
            layer: Index of the layer in the bank.
            x_TH: Hidden states of the tokens, in the dtype of the bank. T may be 0.
            topk_TK: Logical experts of each token, any integer dtype.
            weight_TK: Router probabilities, any floating-point dtype.

        Returns:
            y_TH in the dtype of x, differentiable with respect to x and weight. The backward pass adds the experts' gradients to
            the bank, even if x does not require a gradient.

        Raises:
            InputError: The arguments do not match each other, or a layer runs more often than planned.
            TransferError: Weights or tokens did not arrive.
        """
        stage = self._running_stage()
        self._check(layer, x_TH, topk_TK, weight_TK)
        # Inside a backward pass, only checkpointing calls the layer, to run the forward again.
        m, phase = stage.use(layer, in_backward=torch._C._current_graph_task_id() != -1)
        # The caller chooses dtypes. Under autocast, forward and backward would use different ones.
        device = x_TH.device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext():
            route = self._route(stage, m, layer, phase, topk_TK)
            row = Row.of(self.bank, stage, self._time, m, layer, route.num_S, route.end_S)
            x_YH = Dispatch.apply(x_TH, self._anchor, route.by_token_Z, route.by_arrival_Y, route, stage.launch)
            y_YH = GroupedExperts.apply(x_YH, row, phase)
            if phase != Phase.BACKWARD:  # recomputation of this layer alone keeps its weights until backward
                stage.release(m, layer, phase)
            y_TH: torch.Tensor = Combine.apply(y_YH, weight_TK, route.by_slot_Z, route.by_slot_Y, route)
            stage.launch()
            return y_TH

    def end(self, *, partial: bool = False) -> StageSummary:
        """Ends the stage after all gradients have reached the homes. Collective if the stage has a plan.

        Sets ``param.grad`` if the stage ran a backward pass.

        Args:
            partial: True if the stage stops early. All ranks must stop after the same pass.

        Raises:
            InputError: Some uses of the plan did not run, or the routing of a layer differs from the routing given to `begin`. In
                the second case, the error is raised on all ranks, and all gradients are dropped, including those of earlier
                stages.
        """
        stage = self._running_stage()
        timeline = stage.end(partial=partial)
        # Checked before any rank publishes gradients. Otherwise some ranks would step without the others.
        fault = stage.verdict()
        self._stage = None
        if fault:
            if self._time.num_backward:
                self.bank.zero_grad()
            raise InputError(fault)
        if self._time.num_backward:
            self.bank.publish_gradients()
        drift_ML, served_MLS = stage.counts()
        return StageSummary(
            timeline=timeline, drift_ML=drift_ML, served_MLS=served_MLS, fell_back=tuple(stage.fell_back),
            forward_cpu_s=self._time.forward_s, backward_cpu_s=self._time.backward_s,
        )  # fmt: skip

    def close(self) -> None:
        """Releases all resources. It may be called twice or in the middle of a stage."""
        self._stage, self._closed = None, True
        try:
            if self._engine is not None:
                self._engine.close()
        finally:
            self._engine = None
            if self._owns_group:
                self.group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is not None:
            self.group.report(f"{type(error).__name__}: {error}")
        self.close()

    def _route(self, stage: Stage, m: int, layer: int, phase: Phase, topk_TK: torch.Tensor) -> Route:
        """Returns the route of the row's pairs."""
        complete = stage.prepare(m, layer, phase)
        try:
            route = stage.replayed(m, layer, topk_TK)
            if route is None:
                self._check_experts(topk_TK)
        except InputError as error:  # only on this rank, while the others wait for its tokens
            self.group.report(f"InputError: {error}")
            raise
        if route is None:
            route = self._found_route(stage, m, layer, phase, topk_TK, complete)
        elif not complete:
            # The other ranks already send tokens as planned, without asking.
            lack = f"a replica of micro-step {m}, layer {layer} is missing, and its routing was known"
            alone = TransferError(f"{lack}; begin the stage without `routing`, so that such rows run at home.")
            self.group.report(f"TransferError: {alone}")
            raise alone
        if phase == Phase.FORWARD:
            stage.served[m, layer] = route.num_S
        return route

    def _found_route(self, stage: Stage, m: int, layer: int, phase: Phase, topk_TK: torch.Tensor, complete: bool) -> Route:
        """Returns the route of the row's pairs, or their route to the homes if a replica is missing on any rank. Collective."""
        slot_TK, num_drift = stage.slots(m, layer, topk_TK)
        if (m, layer) in stage.fell_back:  # recomputation follows the forward pass
            slot_TK = stage.at_home(layer, topk_TK)
        counts = exchange_counts(slot_TK.reshape(-1), stage.num_slots, self.group, complete)
        if not counts.complete:
            stage.fall_back(m, layer)
            slot_TK = stage.at_home(layer, topk_TK)
            counts = exchange_counts(slot_TK.reshape(-1), stage.num_slots, self.group, True)
        if phase == Phase.FORWARD:
            stage.drift[m, layer] = num_drift
        return Route.of(slot_TK, counts)

    def _start(self, stage: Stage) -> None:
        self.bank.drop_stale_gradients()
        self._stage, self._time = stage, ComputeTime()

    def _require_idle(self) -> None:
        if self._closed:
            raise InputError("this runtime was closed; make a new one.")
        if self._stage is not None:
            raise InputError("a stage is running; call end() before the next begin.")

    def _running_stage(self) -> Stage:
        if self._stage is None:
            raise InputError("no stage is running; call begin(plan, split_MLP) or begin_home() first.")
        return self._stage

    def _check(self, layer: int, x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> None:
        if layer not in range(self.bank.num_layers):
            raise InputError(f"layer {layer} does not exist; the bank has {self.bank.num_layers}.")
        if x_TH.dim() != 2 or topk_TK.dim() != 2 or topk_TK.shape[0] != x_TH.shape[0] or weight_TK.shape != topk_TK.shape:
            shapes = ", ".join(str(list(value.shape)) for value in (x_TH, topk_TK, weight_TK))
            raise InputError(f"x, topk and weight must be [T, H], [T, K], [T, K]; got {shapes}.")
        if x_TH.dtype != self.bank.dtype:
            raise InputError(f"x is {x_TH.dtype} and the experts are {self.bank.dtype}; cast x.")
        if topk_TK.dtype == torch.bool or topk_TK.is_floating_point() or topk_TK.is_complex():
            raise InputError(f"topk must hold the experts of each token as whole numbers; got {topk_TK.dtype}.")

    def _check_experts(self, topk_TK: torch.Tensor) -> None:
        if topk_TK.numel() and not topk_TK.is_cuda:  # on a GPU, the host would have to wait for the result
            low, high = (int(value) for value in topk_TK.long().aminmax())
            if low < 0 or high >= self.bank.num_experts:
                raise InputError(f"topk holds experts {low} to {high}; there are {self.bank.num_experts}, from 0.")
