"""Job: the ranks that take an optimizer step together, and their agreement before any of them reduces a gradient."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch.distributed as dist

from foremoe.base.errors import InputError
from foremoe.distributed.group import TorchGroup, reporting

T = TypeVar("T")


class Job:
    """All ranks of Megatron's program: every pipeline rank of every data-parallel copy, also those without MoE layers.

    If one EP group alone dropped a step, the others would have half of a model, or sums without its part. Megatron lays its
    groups out over all processes, so the job is the default process group. Nothing is gathered if the job is one EP group, whose
    ranks agree already, or if EP groups have one rank, so that nothing is balanced.

    Args:
        ep_group: EP group of this rank; making a `Job` is collective over all processes.

    Attributes:
        group: Group of all ranks; the EP group itself if nothing is gathered.
    """

    def __init__(self, ep_group: TorchGroup) -> None:
        self._ep_group, self._apart = ep_group, 1 < ep_group.size < dist.get_world_size()
        self.group = TorchGroup(timeout_s=ep_group.timeout_s) if self._apart else ep_group

    def agree(self, error: InputError | None) -> InputError | None:
        """Returns the error for this rank if any rank has one: that of its own EP group, or one that names another's; collective.

        Args:
            error: The error of all ranks of the EP group.
        """
        if not self._apart:
            return error
        faults = self.group.gather("" if error is None else str(error))
        other = next((f"in the EP group of global rank {g}: {fault}" for g, fault in enumerate(faults) if fault), "")
        return error or (InputError(other) if other else None)

    def run(self, work: Callable[[], T]) -> T:
        """Calls `work` and returns its result; an `InputError` of one EP group is raised on all ranks. Collective."""
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
        """Block that may wait in Megatron's collectives; see `foremoe.distributed.watch.Watcher`. Not collective."""
        # What ends a stage is reported to all ranks of the job, so one watcher hears of it.
        return self.group.watched(self._ep_group.process_group)

    def report(self, message: str) -> None:
        """Reports to all ranks that this rank ends the step; not collective, never raises."""
        for group in self._groups:
            group.report(message)

    def close(self) -> None:
        """Releases the groups, including the EP group."""
        for group in self._groups:
            group.close()

    @property
    def _groups(self) -> list[TorchGroup]:
        return [self._ep_group, self.group] if self._apart else [self._ep_group]
