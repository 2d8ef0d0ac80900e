"""`attach`: adds foremoe to a program that uses Megatron-Core, with two lines of code."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from megatron.core import parallel_state

from foremoe.base.arrays import Array
from foremoe.base.errors import InputError
from foremoe.distributed.agreement import require_same
from foremoe.distributed.group import TorchGroup, make_on_all, reporting
from foremoe.distributed.planning import Planned
from foremoe.integrations.better_slots import SlotAdvice
from foremoe.integrations.megatron.finalize import before_finalize, configs_of
from foremoe.integrations.megatron.home_moves import HomeMoves, move_homes
from foremoe.integrations.megatron.job import Job
from foremoe.integrations.megatron.known import Trust
from foremoe.integrations.megatron.layer import SlotLayer, slots_around
from foremoe.integrations.megatron.layout import (
    cluster_of,
    contiguous_homes,
    find_layers,
    num_predicting,
    require_supported,
    schedule_of,
    unwrap,
)  # fmt: skip
from foremoe.integrations.megatron.options import warn_of_unjudged
from foremoe.integrations.megatron.planning import Planning, Work, layers_of_all
from foremoe.integrations.megatron.stage import MegatronStage
from foremoe.integrations.megatron.summary import MegatronSummary, summary_of
from foremoe.integrations.megatron.virtual import VirtualSummary, attached_class
from foremoe.integrations.megatron.watch import Watched, watch
from foremoe.integrations.settings import AttachSettings
from foremoe.integrations.supported import Write
from foremoe.transfer.backends import resolve_backend
from foremoe.transfer.engine import Engine
from foremoe.workload.workload import STAGES

# Letters: M micro-steps, L MoE layers of this rank, T tokens of a source, K top-k, E experts, P physical slots of all ranks.


def attach(model_chunks: Any, settings: AttachSettings | None = None, **options: Any) -> Attached:
    """Adds physical slots to every ``MoELayer`` of a built Megatron-Core model::

        moe = foremoe.integrations.megatron.attach(model_chunks, redundant=1)
        with moe.stage(work, "update"):
            losses = forward_backward_func(...)

    No parameter of the model is added, renamed or moved, and outside a stage every layer runs as before. Collective: every rank
    of the job must attach with the same settings, before or after DDP and the optimizer are created.

    Args:
        model_chunks: The model, or the list of model chunks of an interleaved pipeline. Each may be wrapped, for example in DDP.
        settings: Settings of the slots, the planner and the engine. Defaults to ``AttachSettings()``.
        options: Fields of `AttachSettings`, such as ``redundant=2``, which override `settings`.

    Raises:
        InputError: A setting is invalid or differs between ranks, or the layout is not supported. Raised on all ranks.
    """
    return attach_as(model_chunks, partial(AttachSettings.of, settings, **options))


def attach_as(model_chunks: Any, settings: Callable[[], AttachSettings], write: Write | None = None) -> Attached:
    """Does the work of `attach` for the adapters of trainers.

    Args:
        settings: Function that returns the settings. If it raises an error on one rank, all ranks raise it.
        write: Function that formats a Megatron option for error messages, in the syntax of the trainer's command line.
    """
    chunks = list(model_chunks) if isinstance(model_chunks, list | tuple) else [model_chunks]
    return attached_class(chunks, Attached)(chunks, settings, write)


class Attached:
    """The slots of the MoE layers in one rank's model chunks. `attach` returns this object.

    Attributes:
        settings: Settings passed to `attach`.
        group: EP group of this rank.
        job: All ranks of the job, which take or drop an optimizer step together.
        report: Summary of the last stage: a `MegatronSummary`, a `VirtualSummary`, a ``Watched`` if ``redundant=0``, or None.
    """

    def __init__(self, chunks: list[Any], settings: Callable[[], AttachSettings], write: Write | None = None) -> None:
        self.settings, self._write = AttachSettings(), write
        with contextlib.suppress(InputError):  # the group is created first, so that it can report an error of a single rank
            self.settings = settings()
        self.group = TorchGroup(parallel_state.get_expert_model_parallel_group(), timeout_s=self.settings.group_timeout_s)
        self.report: MegatronSummary | VirtualSummary | Watched | None = None
        self._engine: Engine | None = None
        self._stage: MegatronStage | None = None
        self._moves: HomeMoves | None = None
        self._broken, self._running, self._detached, self._advice = "", False, False, SlotAdvice()
        self._layers: list[SlotLayer] = []
        with reporting(self.group):
            self.job = Job(self.group)
        with self.job.reporting():
            self._attach(chunks, settings)

    def _attach(self, chunks: list[Any], settings: Callable[[], AttachSettings]) -> None:
        """Attaches after the group was created. Collective."""
        try:
            make_on_all(self.job.group, settings)
            require_same(self.job.group, self.settings.agreed())
            make_on_all(self.job.group, lambda: self._set_up(chunks))
        except InputError:
            self.job.close()
            raise
        numbers, predicting = layers_of_all(self.job.group, self._places, num_predicting(chunks))
        cluster = self.job.run(lambda: cluster_of(self.group, self.settings, self._config) if self._layers else None)
        if cluster is None:
            return  # nothing to balance on this rank
        self._planning = Planning(
            settings=dataclasses.replace(self.settings, cluster=cluster), group=self.group, config=self._config,
            places=self._places, numbers=numbers, predicting=predicting, home_LE=self._home_LE,
            weight_bytes=self._weight_bytes, device=self._device,
        )  # fmt: skip
        for place in self._places:
            place.moe.__dict__["_foremoe"] = True
        if self.job.group.rank == 0:
            warn_of_unjudged(self._config)

    def _set_up(self, chunks: list[Any]) -> None:
        """Does this rank's part of attaching. Not collective over the EP group."""
        for backend in self.settings.backends or ():
            resolve_backend(backend)  # a module may be missing on this rank only
        self._places = find_layers(chunks)
        self._config = unwrap(chunks[0]).config
        require_supported(self._config, self._places, self._write)
        self._configs = configs_of(chunks)
        if self._places and self.group.size > 1:
            self._home_LE = contiguous_homes(len(self._places), self.num_experts)
            self._buffers, self._layers = slots_around(chunks, self._places, self._home_LE, self.settings, self.group)
            self._weight_bytes, self._device = self._buffers.dtype.itemsize, self._buffers.device
            self._trust = Trust(self.group, self._places, self._config.moe_router_topk, self._device, self.settings)

    @property
    def active(self) -> bool:
        """Returns False if there is nothing to balance, because this rank has no MoE layers or its EP group has only one rank."""
        return bool(self._layers)

    @property
    def num_experts(self) -> int:
        """Number of experts per layer, E."""
        return int(self._config.num_moe_experts)

    @property
    def moe_layers(self) -> list[int]:
        """Numbers of this rank's MoE layers in the whole model, counted from 0, in the order of a plan's layers."""
        return [place.number for place in self._places]

    def schedule_of(self, num_micro_steps: int, *, forward_only: bool = False) -> Any:
        """Returns the schedule (the order of passes) that a plan for this rank must have."""
        return schedule_of(self._config, self._places, num_micro_steps, forward_only=forward_only)

    def plan(
        self, work: Work, stage: str = "update", *, home_LE: Array | None = None, num_threads: int | None = None
    ) -> Planned | None:
        """Plans a stage without running it. Returns None on a rank without MoE layers. Collective over all ranks of the job.

        Args:
            work: Either a `Workload` of the EP group, for this rank's layers or for all MoE layers of the model, or the experts
                of this rank's own tokens. These are one integer array [T, L, K] per micro-step, with -1 for unknown routing.
            stage: "update" or "recompute".
            home_LE: Homes at which experts compute in this stage, as returned by `homes`.
            num_threads: Number of planning threads.

        Raises:
            InputError: The work does not match the model, or planning failed. Raised on all ranks.
        """
        return self.job.run(lambda: self._planning.plan(work, stage, home_LE, num_threads) if self._layers else None)

    def homes(self, *stages: tuple[Work, str], num_threads: int | None = None) -> Array:
        """Plans the homes at which experts compute in a step, int32 [L, E], with the planner's home level. Collective.

        Megatron's parameters stay where they are. A stage whose homes differ from Megatron's exchanges weights when it begins and
        main gradients when it ends.

        Args:
            stages: Stages of the step. Each is a tuple of the arguments `work` and `stage` of `plan`.
            num_threads: Number of planning threads, as in `plan`.
        """
        own = contiguous_homes(len(self._places), self.num_experts)
        return self.job.run(lambda: self._planning.homes(stages, num_threads) if self._layers else own)

    @contextlib.contextmanager
    def stage(
        self, work: Work | Planned | None, stage: str = "update", *,
        split_MLP: Array | None = None, home_LE: Array | None = None, replay: bool = True,
    ) -> Iterator[None]:  # fmt: skip
        """Runs one stage with a plan. The block must call Megatron's forward-backward function once. Collective over the job.

        Gradients of replicas reach their homes before ``config.finalize_model_grads_func`` runs or, if this function does not
        run, at the end of the block. With `overlap_grad_reduce`, they arrive before the parameter's gradient is reduced.

        Args:
            work: Work to plan, as in `plan`. It can also be the result of `plan`, or a `Plan`.
            stage: "update", or "recompute" (forward only).
            split_MLP: This source's part of a `Plan`, from ``plan.rows_for(workload, rank)``. Required if `work` is a `Plan`.
            home_LE: Homes at which experts compute in this stage, from `homes`. Defaults to Megatron's homes. An update with
                other homes requires ``overlap_grad_reduce=False``, because gradients must be sent back before they are reduced.
            replay: Whether routers follow `work`. If False, `work` is only a hint, and the report contains the skew as served.

        Raises:
            InputError: `work` does not match the model or, at the end of the stage, routers chose other experts. Raised on all
                ranks of the job. Drop the step. The next one may run.
            TransferError: Weights or gradients did not arrive, or a rank failed. Ranks are in different passes, so end the job.
        """
        if self._detached:
            raise InputError("foremoe was detached from this model; attach it again.")
        if stage not in STAGES:
            raise InputError(f"stage must be one of {', '.join(STAGES)}; got {stage!r}.")
        if self._broken:
            raise InputError(f"an earlier stage failed ({self._broken}); end the job.")
        if self._running:
            raise InputError("a stage is running; stages do not nest.")
        restore = before_finalize(self._configs, self._end)
        self._running = True
        try:
            try:
                self.job.run(lambda: self._begin(work, stage, split_MLP, home_LE, replay))
            except InputError:  # raised on all ranks
                if self._stage is not None:
                    self._stage.end(partial=True)
                self._running = False
                raise
            with self.job.watched():  # foremoe does not check for reports while Megatron's collectives wait
                yield
                if error := self._end():
                    raise error
        except BaseException as error:
            if self._running:  # the other ranks do not know of the error
                self._broken = f"{type(error).__name__}: {error}"
                self.job.report(self._broken)
            raise
        finally:
            restore()
            for layer in self._layers:
                layer.leave()
            if self._moves is not None:
                self._moves.leave()
                self._buffers.home_LE = self._home_LE
            self._stage, self._moves, self._running = None, None, False

    def metrics(self) -> dict[str, float]:
        """Returns metrics of the last stage on this rank for a logger, or an empty dict before the first stage."""
        return {} if self.report is None else self.report.metrics()

    def detach(self) -> None:
        """Restores the model to its state before `attach`. It may be called twice."""
        if self._running:
            raise InputError("a stage is running; end it before detach().")
        for layer in self._layers:
            layer.moe.__dict__.pop("_foremoe", None)
        if self._engine is not None:
            self._engine.close()
        self._layers, self._engine, self._detached = [], None, True
        self.__dict__.pop("_buffers", None)
        self.job.close()

    def _begin(self, work: Any, stage: str, split_MLP: Array | None, home_LE: Array | None, replay: bool) -> None:
        """Begins the stage on this rank's EP group."""
        if not (self._layers and self.settings.redundant):
            self.report = watch(self._planning, work, stage) if self._layers else None
            return
        planned = self._planned = self._planning.plan_of(work, stage, split_MLP, home_LE)
        self._advice.say(planned.problem if self.job.group.rank == 0 else None)
        overlaps, plan = any(layer.overlaps_reduction for layer in self._layers), planned.plan
        self._planning.require_fit(planned, stage, overlaps, self._buffers.prepare(stage))
        self._engine = self._engine or Engine(self._buffers, group=self.group, settings=self.settings)
        known = self._trust.begin(planned, replay)
        self._moves = move_homes(self.group, self._buffers, plan)
        # Optimizers write parameters through .data, which version counters do not detect, so every stage's weights count as new.
        self._engine.begin(plan)
        self._stage = MegatronStage(self._engine, plan, planned.split_MLP, self._buffers.device, replay, known)
        for layer in self._layers:
            layer.enter(self._stage)

    def _end(self) -> InputError | None:
        """Sends all gradients home and ends the stage, once. Returns, on all ranks, the error that forbids the step, or None."""
        if not self._running:
            return None
        error, self._running = self.job.agree(self._take_stock()), False
        return error

    def _take_stock(self) -> InputError | None:
        """Ends the stage of this EP group and stores its report. Returns the error that forbids the step, or None."""
        if (stage := self._stage) is None:
            return None
        planned, timeline = self._planned, stage.end(partial=False)
        if self._moves is not None and planned.plan.header.schedule.trains:
            self._moves.gradients_back()
        self.report = summary_of(planned, stage, timeline, self._buffers.num_bytes + stage.sum_bytes, self._trust.counted)
        return self._trust.end(planned, stage.known, bool(stage.fell_back))
