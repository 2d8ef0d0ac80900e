"""`Job`: the ranks that take an optimizer step together. They agree before any of them reduces a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from foremoe.base.errors import InputError
from foremoe.distributed.group import TorchGroup, reporting

T = TypeVar("T")


class Job:
    """All ranks of Megatron's program: every pipeline rank of every data-parallel copy, including ranks without MoE layers.

    If a single EP group dropped a step, the other EP groups would update only part of a model or use sums that lack this group's
    part. Megatron's groups cover all processes, so the job is the default process group. Nothing is gathered if the job is one EP
    group, because its ranks already agree, or if each EP group has one rank, because nothing is balanced then. Creating a `Job`
    is collective over all processes.

    Args:
        ep_group: EP group of this rank.

    Attributes:
        group: Group of all ranks, or the EP group itself if nothing is gathered.
    """

    def __init__(self, ep_group: TorchGroup) -> None:
        self._ep_group, self._apart = ep_group, 1 < ep_group.size < dist.get_world_size()
        self.group = TorchGroup(timeout_s=ep_group.timeout_s) if self._apart else ep_group

    def agree(self, error: InputError | None) -> InputError | None:
        """Returns an error on all ranks if any EP group has one. Collective.

        This is the error of this rank's EP group or, if it has none, an error that quotes another EP group's error.

        Args:
            error: Error that all ranks of this rank's EP group have, or None.
        """
        if not self._apart:
            return error
        faults = self.group.gather("" if error is None else str(error))
        other = next((f"in the EP group of global rank {g}: {fault}" for g, fault in enumerate(faults) if fault), "")
        return error or (InputError(other) if other else None)

    def run(self, work: Callable[[], T]) -> T:
        """Calls `work` and returns its result. If it raises an `InputError` in one EP group, all ranks raise it. Collective."""
        error = None
        with self.reporting():
            try:
                result = work()
            except InputError as refused:
                error = refused
            error = self.agree(error)
        if error is not None:
            raise error
        return result

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Reports an exception in the block to all ranks, as `foremoe.distributed.group.reporting` does for a group."""
        with reporting(self.group), reporting(self._ep_group):
            yield

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Watches a block that may wait in Megatron's collectives (see `foremoe.distributed.watch.Watcher`). Not collective."""
        # Errors that end a stage are reported to all ranks of the job, so one watcher is enough.
        return self.group.watched(self._ep_group.process_group)

    def report(self, message: str) -> None:
        """Reports to all ranks that this rank ends the step. Not collective. Never raises."""
        for group in self._groups:
            group.report(message)

    def close(self) -> None:
        """Releases the groups, including the EP group."""
        for group in self._groups:
            group.close()

    @property
    def _groups(self) -> list[TorchGroup]:
        return [self._ep_group, self.group] if self._apart else [self._ep_group]
