"""Filling of host stores: which experts are missing, who writes them in which order, and the thread that does a rank's part."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.distributed.group import Group
from foremoe.transfer.base import Buffers, Entry, Tensors
from foremoe.transfer.host_store import Key, as_bytes

# Letters: G ranks.

T = TypeVar("T")
_END = 2**62  # later than any use


@dataclass(frozen=True, slots=True, order=True)
class Fill:
    """Expert that is missing in a node's store. The rank `writer` of this node must write the expert before the use `need`."""

    node: int
    layer: int
    expert: int
    home: int
    writer: int
    need: int = 0

    @property
    def key(self) -> Key:
        """Layer and expert of the fill."""
        return self.layer, self.expert

    @property
    def crosses(self) -> bool:
        """Returns True if the bytes come from another node."""
        return self.home != self.writer


def missing(
    entries: Sequence[Entry], node_G: Sequence[int], written: Mapping[tuple[int, int, int], int], version: int
) -> list[Fill]:
    """Returns the experts whose weights of `version` are missing in the store of a node, in the order of the entries.

    The result covers all nodes and is the same on all ranks. `written` maps (node, layer, expert) to the version that was last
    written.
    """
    reader: dict[tuple[int, int, int], Entry] = {}
    for entry in entries:
        where = (node_G[entry.dst_rank], entry.layer, entry.expert)
        if written.get(where) != version:
            reader.setdefault(where, entry)
    # If the home is on another node, the first rank that reads an expert writes it, because readers are spread over a node.
    return [
        Fill(*where, e.home_rank, e.home_rank if node_G[e.home_rank] == where[0] else e.dst_rank, e.need)
        for where, e in reader.items()
    ]


def steps(fills: Sequence[Fill], bytes_of: Mapping[Key, int], step_bytes: int) -> list[list[Fill]]:
    """Cuts fills into steps, in order, each of which belongs to a single layer.

    In one step, no rank sends or receives more than `step_bytes` between nodes, unless a single expert is larger.
    """
    parts: list[list[Fill]] = []
    load: Counter[tuple[str, int]] = Counter()
    for fill in fills:
        ends = (("sent", fill.home), ("received", fill.writer)) if fill.crosses else ()
        full = any(load[end] and load[end] + bytes_of[fill.key] > step_bytes for end in ends)
        if full or not parts or parts[-1][0].layer != fill.layer:
            parts.append([])
            load.clear()
        parts[-1].append(fill)
        for end in ends:
            load[end] += bytes_of[fill.key]
    return parts


def agreed(group: Group, work: Callable[[], T], task: str = " cannot publish its weights") -> list[T]:
    """Calls `work` on every rank and returns the results of all ranks, by rank. Collective.

    Raises:
        TransferError: `work` failed on a rank. Raised on all ranks, so that none of them waits for this rank later.
    """
    result, raised = None, None
    try:
        result = work()
    except Exception as error:
        raised = error
    answers = group.gather((result, None if raised is None else str(raised) or type(raised).__name__))
    failed = tuple(g for g, (_, why) in enumerate(answers) if why is not None)
    if failed:
        raise TransferError(f"rank {failed[0]}{task}: {answers[failed[0]][1]}", failed) from raised
    return [value for value, _ in answers]


def exchange(
    group: Group, device: torch.device, fills: Sequence[Fill], bytes_of: Mapping[Key, int], buffers: Buffers
) -> dict[Key, Tensors]:
    """Sends experts from homes to writers on other nodes through memory of `device`. Returns the experts that arrive here."""
    out = sorted((fill for fill in fills if fill.home == group.rank), key=lambda fill: fill.writer)
    come = sorted((fill for fill in fills if fill.writer == group.rank), key=lambda fill: fill.home)
    num_sent_G, num_received_G = [0] * group.size, [0] * group.size
    for fill in out:
        num_sent_G[fill.writer] += bytes_of[fill.key]
    for fill in come:
        num_received_G[fill.home] += bytes_of[fill.key]
    parts = [as_bytes(tensor).to(device) for fill in out for tensor in buffers.home(*fill.key)]
    sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *parts])
    received = torch.empty(sum(num_received_G), dtype=torch.uint8, device=device)
    group.all_to_all(received, sent, num_received_G, num_sent_G)
    cut = received.split([bytes_of[fill.key] for fill in come])
    return {fill.key: [part] for fill, part in zip(come, cut, strict=True)}


class FillError(TransferError):
    """Raised if published experts are missing because a rank did not write its part of the host stores."""


class Filling(threading.Thread):
    """Thread that does one rank's part of filling the stores. All ranks run the same steps in the same order.

    The thread ends when all ranks are done, or when one of them fails or reports a failure on `group`. No other thread uses
    `group`.

    Attributes:
        error: After the thread has ended, the reason why missing experts will not be written.
    """

    def __init__(self, group: Group, parts: Sequence[Sequence[Fill]], write: Callable[[Sequence[Fill]], None]) -> None:
        super().__init__(name=f"{threading.current_thread().name}, host store", daemon=True)
        self._group, self._parts, self._write = group, parts, write
        self._changed, self._due = threading.Condition(), -1
        self.error: FillError | None = None
        self.start()

    def run(self) -> None:
        """Runs all steps."""
        try:
            for part in self._parts:
                self._proceed(part[0].need)
                self._write(part)
            self._proceed(_END)
            self._group.barrier()
        except BaseException as error:  # callers that wait for this thread must be notified, whatever ended it
            rank, why = self._group.rank, str(error) or type(error).__name__
            if isinstance(error, TransferError) and error.ranks:  # the failure is on another rank
                self.error = FillError(str(error), error.ranks)
            else:
                self.error = FillError(f"rank {rank} cannot fill its host store: {why}", (rank,))
                self._group.report(str(self.error))
            self._proceed(_END)

    def passed(self, position: int) -> None:
        """Waits until this rank has written, or failed to write, all experts that are needed up to the use at `position`."""
        with self._changed:
            self._changed.wait_for(lambda: self._due > position)

    def stop(self) -> None:
        """Stops the filling on all ranks if it is still running."""
        if self.is_alive():
            self._group.report("it closed its host store before all were filled")
        self.join()

    def _proceed(self, need: int) -> None:
        with self._changed:
            self._due = max(self._due, need)
            self._changed.notify_all()


def unpublished(key: Key, written: int | None, version: int, lack: str) -> TransferError:
    """Returns the error for an expert that was last published with another version, or never, for the reason `lack`."""
    layer, expert = key
    if written is None:
        return TransferError(f"expert {expert} of layer {layer} {lack}; publish it before it is pulled.")
    last = f"expert {expert} of layer {layer} was last published with version {written}"
    return StaleWeights(f"{last}, and version {version} is requested; publish it again after weights have changed.")
