"""`Session`: runs foremoe in all passes of one veRL engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from typing import Any

from megatron.core import parallel_state

from foremoe.base.arrays import Array
from foremoe.distributed.agreement import require_same
from foremoe.distributed.group import TorchGroup, make_on_all, reporting
from foremoe.integrations.compiling import compile_in_turn
from foremoe.integrations.megatron.attach import attach_as
from foremoe.integrations.megatron.forward_backward import planned_or_home
from foremoe.integrations.megatron.layout import find_layers
from foremoe.integrations.once import warn_once
from foremoe.integrations.settings import Settings
from foremoe.integrations.supported import hydra
from foremoe.integrations.verl.dump import dump_workload
from foremoe.integrations.verl.metrics import Figures, Totals
from foremoe.integrations.verl.packing import Packer
from foremoe.integrations.verl.routing import routing_of

_logger = logging.getLogger(__name__)


def override(name: str, value: Any) -> str:
    """Formats Megatron's option `name` and its value in the syntax of veRL's command line."""
    own = name in ("expert_tensor_parallel_size", "sequence_parallel")
    return hydra("++actor_rollout_ref.actor.megatron." + ("" if own else "override_transformer_config."))(name, value)


class Session:
    """foremoe's state for one engine, which lives as long as the engine.

    If planning a stage fails on any rank, takes too long, or returns an invalid plan, the stage runs at home on all ranks. A
    warning in the log and the metric ``foremoe/STAGE/unplanned`` report this.

    Args:
        engine: veRL engine that has been initialized. If its router replay is off, the routing recorded by rollout is a hint.
    """

    def __init__(self, engine: Any, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.replay = bool(engine.enable_routing_replay)  # otherwise rollout's routing is a hint
        self.num_stages = {"recompute": 0, "update": 0}
        self.totals = {stage: Totals() for stage in self.num_stages}
        with contextlib.closing(TorchGroup(timeout_s=settings.group_timeout_s)) as job, reporting(job):
            make_on_all(job, self._set_up)
            require_same(job, settings.agreed())  # they determine the groups to create and the data to gather
        model_copy = parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        limits = {"group_timeout_s": settings.group_timeout_s, "compile_limit_s": settings.compile_limit_s}
        self.compile_s = compile_in_turn(model_copy, **limits)
        # An EP group and those of the other pipeline ranks, whose metrics a rank of the last pipeline rank reports.
        self.copy = TorchGroup(model_copy, timeout_s=settings.group_timeout_s)
        with reporting(self.copy):
            self.attached = attach_as(engine.module, lambda: settings, override)
            if self.packer is not None:
                self.packer.meet(settings.group_timeout_s)

    def _set_up(self) -> None:
        """Does the part of the set-up that may fail on a single rank. Not collective."""
        self.places = find_layers(self.engine.module)
        self.packer = Packer(self.engine) if self.settings.packing else None

    def should_plan(self, data: Any, forward_only: bool) -> bool:
        """Returns True if the routing of this pass is known now, either for replay or as a hint.

        The routing is not known while R2 records. It also counts as not known if veRL replays in other passes but not in this
        pass, as for the reference model. The result is the same on all ranks, including ranks without MoE layers.
        """
        from verl.utils import tensordict_utils as tu

        wanted = self.settings.recompute if forward_only else self.settings.update
        acts = tu.get_non_tensor_data(data, key="enable_routing_replay", default=False) or not self.replay
        known = data.get("routed_experts", None) is not None
        lack = ""
        if self.attached.group.size == 1:
            lack = "where an EP group has one rank; set expert_model_parallel_size above 1"
        elif self.engine.engine_config.dynamic_context_parallel:
            lack = "with dynamic context parallelism; set dynamic_context_parallel=False"
        elif not known and not self.replay:
            lack = "in a pass without known routing; set rollout.enable_rollout_routing_replay=True"
        if lack:
            warn_once(_logger, f"megatron.foremoe is set and has no effect {lack}, or remove foremoe.")
        return bool(wanted and acts and known and not lack)

    @contextlib.contextmanager
    def run_stage(self, forward_only: bool) -> Iterator[RunningStage]:
        """Runs one stage, which is one pass over all micro-batches."""
        try:
            with contextlib.ExitStack() as stack:
                yield RunningStage(self, "recompute" if forward_only else "update", stack)
        except BaseException as error:
            # Before the stage has begun, only this report reaches the other ranks, which may wait in its planning.
            for group in (self.copy, self.attached.job):
                group.report(f"{type(error).__name__}: {error}")
            raise

    def report(self, data: Any, output: Any) -> None:
        """Adds the figures of all stages since the previous report to the metrics of an update's last mini-batch.

        veRL drops the metrics of a recompute stage and averages the metrics of an update over its mini-batches.
        """
        from verl.utils import tensordict_utils as tu
        from verl.utils.metric import Metric

        if not tu.get_non_tensor_data(data, key="update_lr_scheduler", default=True):  # veRL's marker of the last mini-batch
            return
        metrics = {f"foremoe/{stage}/{name}": value for stage, of in self.totals.items() for name, value in of.take().items()}
        if self.compile_s:
            metrics["foremoe/compile_s"], self.compile_s = Metric("max", self.compile_s), 0.0
        if output and "metrics" in output:
            output["metrics"].update(metrics)

    def close(self) -> None:
        """Restores veRL's own engine."""
        self.attached.detach()
        self.copy.close()
        if self.packer is not None:
            self.packer.close()
        self.engine._foremoe = None


class RunningStage:
    """One stage of a session, from its beginning to its end."""

    def __init__(self, session: Session, stage: str, stack: contextlib.ExitStack) -> None:
        self._session, self._stage, self._stack = session, stage, stack
        self._planned = False
        self._seconds: dict[str, float] = {}

    def begin(self, data: Any, micro_batches: list[Any], indices: Any) -> tuple[list[Any], Any]:
        """Regroups the samples of micro-batches if requested, plans the micro-batches, and enters the stage. Collective.

        Returns:
            The micro-batches and the indices of their samples in `data`, in veRL's format.
        """
        session, attached = self._session, self._session.attached
        number = session.num_stages[self._stage]
        session.num_stages[self._stage] += 1
        begin_s = time.perf_counter()
        if session.packer is not None:
            micro_batches, indices = session.packer.repack_batches(data, micro_batches, indices)
            self._seconds["pack_s"] = time.perf_counter() - begin_s
        routing: list[Array] = []
        if attached.active:
            routing = routing_of(session.engine, session.places, micro_batches)
            if session.settings.dump is not None:
                dump_workload(attached, routing, self._stage, number, session.settings.dump)
        stage = planned_or_home(attached, routing, self._stage, replay=session.replay)
        self._planned = self._stack.enter_context(stage)
        self._seconds["begin_exposed_s"] = time.perf_counter() - begin_s
        return micro_batches, indices

    def end(self) -> None:
        """Ends the stage and adds its figures to those of the session. Collective over all ranks of a model copy."""
        self._stack.close()
        attached = self._session.attached
        mine = Figures(first=False, num_rows=0, values={})
        if attached.active:
            report = attached.report if self._planned else None
            mine = Figures.of(attached.group.rank == 0, report, unplanned=float(not self._planned), **self._seconds)
        answers = self._session.copy.gather((mine.first, mine.num_rows, mine.values))
        parts = [Figures(first=first, num_rows=num_rows, values=values) for first, num_rows, values in answers]
        self._session.totals[self._stage].add(parts)
