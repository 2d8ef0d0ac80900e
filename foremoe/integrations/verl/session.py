"""Session: foremoe on one veRL engine, over all its passes."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from typing import Any

from foremoe.errors import InputError
from foremoe.integrations.megatron import attach
from foremoe.integrations.verl.dump import dump_workload
from foremoe.integrations.verl.routing import routing_of
from foremoe.integrations.verl.settings import Settings


class Session:
    """What lives as long as the engine.

    Args:
        engine: veRL's, initialized; its model has router replay.

    A stage whose planning fails on any rank of the EP group, takes too long, or gives an invalid plan runs at home on all of
    them: one warning, and the metric ``foremoe/STAGE/unplanned``.
    """

    def __init__(self, engine: Any, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.attached = attach(engine.module, cluster=settings.cluster_of(), **settings.options())
        self.num_stages = {"recompute": 0, "update": 0}
        self._warned = False

    def plans(self, data: Any, forward_only: bool) -> bool:
        """Whether a pass replays routing that is known now: not for the reference model, nor where R2 records."""
        from verl.utils import tensordict_utils as tu

        wanted = self.settings.recompute if forward_only else self.settings.update
        replayed = tu.get_non_tensor_data(data, key="enable_routing_replay", default=False)
        known = data.get("routed_experts", None) is not None
        static = not self.engine.engine_config.dynamic_context_parallel
        return bool(self.attached.active and wanted and replayed and known and static)

    @contextlib.contextmanager
    def running(self, forward_only: bool) -> Iterator[RunningStage]:
        """One pass over all micro-batches."""
        with contextlib.ExitStack() as stack:
            yield RunningStage(self, "recompute" if forward_only else "update", stack)

    def warn(self, message: str) -> None:
        """Says it once."""
        if not self._warned:
            self._warned = True
            warnings.warn(message, stacklevel=2)


class RunningStage:
    """One stage of a session.

    Attributes:
        metrics: for veRL's own dictionary, after `end`.
    """

    def __init__(self, session: Session, stage: str, stack: contextlib.ExitStack) -> None:
        self._session, self._stage, self._stack = session, stage, stack
        self._planned = False
        self._exposed_s = 0.0
        self.metrics: dict[str, float] = {}

    def begin(self, micro_batches: list[Any]) -> None:
        """Plans the micro-batches, and enters the stage; collective over the EP group."""
        session, attached = self._session, self._session.attached
        number = session.num_stages[self._stage]
        session.num_stages[self._stage] += 1
        begin_s = time.perf_counter()
        try:
            routing = routing_of(session.engine, micro_batches)
            if session.settings.dump is not None:
                dump_workload(attached, routing, self._stage, number, session.settings.dump)
            planned = attached.plan(routing, self._stage)
        except InputError as error:  # the same on all ranks of the EP group
            session.warn(f"foremoe runs the {self._stage} stage without a plan: {error}")
        else:
            self._stack.enter_context(attached.stage(planned, self._stage))
            self._planned = True
        self._exposed_s = time.perf_counter() - begin_s

    def end(self) -> None:
        """Ends the stage and collects its metrics."""
        self._stack.close()
        figures = {"unplanned": float(not self._planned), "begin_exposed_s": self._exposed_s}
        if self._planned:
            figures.update(self._session.attached.metrics())
        self.metrics = {f"foremoe/{self._stage}/{name}": value for name, value in figures.items()}
