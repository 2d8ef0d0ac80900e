"""attach: foremoe inside a Megatron-Core program, in two lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from megatron.core import parallel_state

from foremoe.arrays import Array
from foremoe.cluster import Cluster
from foremoe.cost import CostModel
from foremoe.errors import InputError
from foremoe.integrations.megatron.buffers import MegatronBuffers, ParamSync
from foremoe.integrations.megatron.experts import kind_of
from foremoe.integrations.megatron.layer import SlotLayer
from foremoe.integrations.megatron.layout import (
    cluster_of,
    contiguous_homes,
    find_layers,
    model_of,
    moe_numbers,
    refuse,
    schedule_of,
    unwrapped,
)
from foremoe.integrations.megatron.report import MegatronReport, report_of
from foremoe.integrations.megatron.stage import MegatronStage
from foremoe.integrations.shared_planning import Planned, PlanningTask, plan_together
from foremoe.plan import Plan
from foremoe.planner import Planner
from foremoe.runtime.stage import agree_on_split
from foremoe.schedule import STAGES
from foremoe.slots import SharedSlots, Slots
from foremoe.strategies import resolve
from foremoe.transfer.base import TransferBackend
from foremoe.transfer.engine import Engine
from foremoe.transfer.group import TorchGroup
from foremoe.workload import Workload

# Letters: M micro-steps, L MoE layers of this rank, T tokens of a source, K top-k, E experts, P physical slots of all ranks.

Work = Plan | Workload | Sequence[Any]


def attach(
    model_chunks: Any,
    *,
    redundant: int = 1,
    planner: str | Planner = "hierarchical",
    cost: CostModel | None = None,
    slots: Slots | None = None,
    replicas: str = "any",
    backends: Sequence[str | TransferBackend] = ("collective",),
    cluster: Cluster | None = None,
    prefetch: int = 2,
    timeout_s: float = 30.0,
    debug: bool = False,
) -> Attached:
    """Puts physical slots around the `MoELayer`s of a built Megatron-Core model::

        moe = foremoe.integrations.megatron.attach(model_chunks, redundant=1)
        with moe.stage(work, "update"):
            losses = forward_backward_func(...)

    Nothing of the model changes: no parameter is added, renamed or moved, and outside a stage every layer runs as it always did.
    Collective: every rank of an EP group attaches, with the same arguments, after DDP and the optimizer were made or before.

    Args:
        model_chunks: the model, or the list of model chunks of an interleaved pipeline; wrapped in DDP and the like or not.
        redundant: R, slots per rank for replicas.
        planner: a strategy's name or a `Planner`.   cost: what it minimises; default: predicted time.
        slots: policy of the slot buffers; default ``SharedSlots(depth=3)``.
        replicas: "any", or "node": inside their home's node.
        backends, prefetch, timeout_s, debug: of `foremoe.transfer.engine.Engine`.
        cluster: of the EP group; default: the 8xh100 preset's figures on the hosts where the ranks are. Figures are uncalibrated
            unless the cluster says otherwise.

    Raises:
        InputError: a layout that is not supported, with the option to change.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    return Attached(
        chunks, redundant, resolve(planner), cost or CostModel(), slots or SharedSlots(), replicas, backends, cluster, prefetch,
        timeout_s, debug,
    )  # fmt: skip


class Attached:
    """Slots around the MoE layers of one rank's model chunks; made by `attach`.

    Attributes:
        schedule_of: number of micro-steps, forward_only -> the `Schedule` that plans for this rank must have.
        report: `MegatronReport` of the last stage, or None.
    """

    def __init__(
        self, chunks: list[Any], redundant: int, planner: Planner, cost: CostModel, slots: Slots, replicas: str,
        backends: Sequence[str | TransferBackend], cluster: Cluster | None, prefetch: int, timeout_s: float, debug: bool,
    ) -> None:  # fmt: skip
        self._config = unwrapped(chunks[0]).config
        self._places = find_layers(chunks)
        refuse(self._config, self._places)
        for place in self._places:
            if "_foremoe" in place.moe.__dict__:
                raise InputError("foremoe is attached to this model already; call detach() on what the first attach returned.")
        self._configs = _configs(chunks)
        self._planner, self._cost, self._slots, self._replicas, self._redundant = planner, cost, slots, replicas, redundant
        self.group = TorchGroup(parallel_state.get_expert_model_parallel_group())
        self.report: MegatronReport | None = None
        self._engine: Engine | None = None
        self._engine_options = (tuple(backends), prefetch, timeout_s, debug)
        self._stage: MegatronStage | None = None
        self._broken = ""
        self._layers: list[SlotLayer] = []
        if not self._places or self.group.size == 1:
            return  # nothing to balance on this rank
        self.cluster = cluster_of(self.group, cluster)
        num_experts = int(self._config.num_moe_experts)
        num_base = num_experts // self.group.size
        kinds = [kind_of(place.moe.experts) for place in self._places]
        sync = ParamSync(chunks)
        num_buffers = slots.num_buffers(redundant, len(kinds))
        self._buffers = MegatronBuffers(kinds, self.group.rank, num_base, num_buffers, sync)
        self._model = model_of(self._config, len(kinds), float(self._buffers.dtype.itemsize))
        self._home_LE = contiguous_homes(len(kinds), num_experts)
        self._layers = [
            SlotLayer(place, i, kind, num_base, num_base + redundant, sync)
            for i, (place, kind) in enumerate(zip(self._places, kinds, strict=True))
        ]
        for place in self._places:
            place.moe.__dict__["_foremoe"] = True

    @property
    def moe_layers(self) -> list[int]:
        """Numbers (from 0, in the whole model) of this rank's MoE layers, in the order of a plan's layers."""
        return [place.number for place in self._places]

    def schedule_of(self, num_micro_steps: int, *, forward_only: bool = False) -> Any:
        """The order of passes that a plan for this rank must have."""
        return schedule_of(self._config, self._places, num_micro_steps, forward_only=forward_only)

    def plan(self, work: Work, stage: str = "update", *, num_threads: int | None = None) -> Planned:
        """Plans a stage without running it; collective over the EP group.

        Args:
            work: `Workload` of the EP group (this rank's layers, or all MoE layers of the model), or the experts of this rank's
                own tokens: one integer array [T, L, K] per micro-step, -1 where routing is not known.

        Raises:
            InputError: on all ranks of the group.
        """
        fault, load_MLE, tokens_M = "", np.zeros((0, 0, 0), np.int32), np.zeros(0, np.int64)
        try:
            load_MLE, tokens_M = self._counts(work)
        except InputError as error:
            fault = str(error)
        faults = self.group.gather(fault)
        if any(faults):
            g = next(g for g, text in enumerate(faults) if text)
            raise InputError(faults[g] if g == self.group.rank else f"rank {g}: {faults[g]}")
        task = PlanningTask(
            model=self._model, cluster=self.cluster, stage=stage, redundant=self._redundant, slots=self._slots, cost=self._cost,
            schedule=self.schedule_of(len(load_MLE), forward_only=stage == "recompute"), replicas=self._replicas,
            moe_layer_L=np.array(self.moe_layers, np.int32), home_LE=self._home_LE,
        )  # fmt: skip
        return plan_together(
            self.group, self._planner, task, load_MLE, tokens_M, device=self._buffers.device, num_threads=num_threads
        )

    @contextlib.contextmanager
    def stage(self, work: Work | Planned, stage: str = "update", *, split_MLP: Array | None = None) -> Iterator[None]:
        """Runs one stage by a plan; inside, call Megatron's forward-backward function as ever, once. Collective.

        Gradients of replicas are at their homes before ``config.finalize_model_grads_func`` runs (and, with
        `overlap_grad_reduce`, before the parameter is reduced), else when the block ends.

        Args:
            work: what to plan, as in `plan`; or what `plan` returned; or a `Plan`, with
            split_MLP: what it gives to this source, ``plan.rows_for(workload, rank)``.
            stage: "update", or "recompute" (forward only).

        Raises:
            InputError: work that does not fit, on all ranks of the EP group.
            TransferError: weights or gradients did not arrive. The model is as it was, but this stage's gradients are not whole:
                drop them, detach, and attach again.
        """
        if stage not in STAGES:
            raise InputError(f"stage must be one of {', '.join(STAGES)}; got {stage!r}.")
        if self._broken:
            raise InputError(f"an earlier stage failed ({self._broken}); call detach() and attach again.")
        if self._stage is not None:
            raise InputError("a stage is under way; stages do not nest.")
        if not self._layers:
            yield
            return
        planned = self._planned(work, stage, split_MLP)
        self._begin(planned, stage)
        restore = _before_finalize(self._configs, lambda: self._end(planned))
        try:
            yield
            self._end(planned)
        except BaseException as error:
            self._broken = f"{type(error).__name__}: {error}"
            self.group.report(self._broken)
            raise
        finally:
            restore()
            for layer in self._layers:
                layer.leave()
            self._stage = None

    def metrics(self) -> dict[str, float]:
        """Figures of the last stage on this rank, ready for a logger; empty before the first."""
        return {} if self.report is None else self.report.metrics()

    def detach(self) -> None:
        """Gives everything back: the model is what it was before `attach`. Safe to call twice."""
        if self._stage is not None and not self._broken:
            raise InputError("a stage is under way; end it before detach().")
        for layer in self._layers:
            layer.leave()
            layer.moe.__dict__.pop("_foremoe", None)
        self._layers = []
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        self.__dict__.pop("_buffers", None)
        self.group.close()

    def _planned(self, work: Work | Planned, stage: str, split_MLP: Array | None) -> Planned:
        if isinstance(work, Planned):
            return work
        if isinstance(work, Plan):
            if split_MLP is None:
                raise InputError("a Plan needs split_MLP=plan.rows_for(workload, rank), what it gives to this rank's tokens.")
            return Planned(plan=work, split_MLP=split_MLP, plan_s=0.0, share_s=0.0)
        return self.plan(work, stage)

    def _begin(self, planned: Planned, stage: str) -> None:
        plan = planned.plan
        agree_on_split(self.group, plan, planned.split_MLP, self._home_LE, self._buffers.device)
        wanted = self.schedule_of(plan.M, forward_only=stage == "recompute")
        head = plan.header
        if not head.schedule.same_as(wanted):
            raise InputError(
                f"the plan's schedule ({head.schedule.M} micro-steps, {len(head.schedule.phase_X)} passes) is not the one in "
                "which this rank runs; make the plan with schedule=attached.schedule_of(num_micro_steps, forward_only=...)."
            )
        if (head.redundant, head.slots) != (self._redundant, self._slots):
            raise InputError(
                f"the plan is for redundant={head.redundant}, {head.slots!r}; this model was attached with "
                f"redundant={self._redundant}, {self._slots!r}. Plan with these."
            )
        if self._engine is None:
            backends, prefetch, timeout_s, debug = self._engine_options
            self._engine = Engine(
                self._buffers, group=self.group, backends=backends, prefetch=prefetch, timeout_s=timeout_s, debug=debug
            )
        # Optimizers write parameters through .data, which no version counter sees: every stage's weights count as new.
        self._engine.begin(plan)
        self._stage = MegatronStage(self._engine, plan, planned.split_MLP, self._buffers.device)
        for layer in self._layers:
            layer.enter(self._stage)

    def _end(self, planned: Planned) -> None:
        """Brings all gradients home and takes stock; the second call of a stage does nothing."""
        if self._stage is None:
            return
        stage, self._stage = self._stage, None
        timeline = stage.end(partial=False)
        self.report = report_of(planned, stage, timeline, self._buffers.num_bytes)

    def _counts(self, work: Any) -> tuple[Array, Array]:
        """int32 [M, L, E] pairs and int64 [M] tokens of this source."""
        all_numbers = moe_numbers(self._config)
        if isinstance(work, Workload):
            if self.group.size != work.G or self._config.num_moe_experts != work.E:
                raise InputError(
                    f"the workload has {work.G} sources and {work.E} experts, the EP group {self.group.size} ranks and the model "
                    f"{self._config.num_moe_experts} experts; count it for this EP group."
                )
            layers = self._local(work.L, all_numbers)
            return work.load_MLGE[:, layers, self.group.rank], work.tokens_MG[:, self.group.rank].astype(np.int64)
        if isinstance(work, str | bytes) or not isinstance(work, Sequence) or not len(work):
            raise InputError(
                f"work must be a Plan, a Workload, or a list with one array [T, L, K] per micro-step; got {type(work).__name__}."
            )
        from foremoe.integrations.counting import count_pairs

        loads = [count_pairs(topk_TLK, int(self._config.num_moe_experts)) for topk_TLK in work]
        layers = self._local(loads[0].shape[0], all_numbers)
        if any(load.shape != loads[0].shape for load in loads):
            raise InputError("the micro-steps have routing of different numbers of layers; give the same layers in all.")
        return np.stack(loads)[:, layers], np.array([len(topk_TLK) for topk_TLK in work], np.int64)

    def _local(self, num_layers: int, all_numbers: list[int]) -> list[int]:
        """Which of the layers that were given are this rank's."""
        if num_layers == len(self._places):
            return list(range(num_layers))
        if num_layers == len(all_numbers):
            return [all_numbers.index(number) for number in self.moe_layers]
        if num_layers == self._config.num_layers:
            return self.moe_layers
        raise InputError(
            f"routing of {num_layers} layers was given; this rank has {len(self._places)} MoE layers, the model "
            f"{len(all_numbers)} of {self._config.num_layers}. Give those of this rank, or all."
        )


def _configs(chunks: Sequence[Any]) -> list[Any]:
    """Every config object on which the schedules may look for `finalize_model_grads_func`."""
    found: dict[int, Any] = {}
    for chunk in chunks:
        module = chunk
        while module is not None:
            if hasattr(module, "config") and hasattr(module.config, "finalize_model_grads_func"):
                found[id(module.config)] = module.config
            module = getattr(module, "module", None)
    return list(found.values())


def _before_finalize(configs: Sequence[Any], end: Callable[[], None]) -> Callable[[], None]:
    """Calls `end` before Megatron reduces gradients; what is returned puts the configs back."""
    own = [config.finalize_model_grads_func for config in configs]

    def wrapped(finalize: Callable[..., Any]) -> Callable[..., Any]:
        def first_end(*args: Any, **kwargs: Any) -> Any:
            end()
            return finalize(*args, **kwargs)

        return first_end

    for config, finalize in zip(configs, own, strict=True):
        if finalize is not None:
            config.finalize_model_grads_func = wrapped(finalize)

    def restore() -> None:
        for config, finalize in zip(configs, own, strict=True):
            config.finalize_model_grads_func = finalize

    return restore
