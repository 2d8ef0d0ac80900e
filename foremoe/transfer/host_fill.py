"""Which experts the host stores lack, who writes them, and what crosses nodes for it; `PinnedHost.publish` does it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.distributed.group import Group
from foremoe.transfer.base import Entry
from foremoe.transfer.host_store import Key

# Letters: G ranks.

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class Fill:
    """One expert that the store of one node lacks: `home` has it, `writer`, a rank of that node, writes it."""

    node: int
    layer: int
    expert: int
    home: int
    writer: int

    @property
    def key(self) -> Key:
        """Layer and expert."""
        return self.layer, self.expert

    @property
    def crosses(self) -> bool:
        """True if the bytes come from another node."""
        return self.home != self.writer


def missing(
    entries: Sequence[Entry], node_G: Sequence[int], written: Mapping[tuple[int, int, int], int], version: int
) -> list[Fill]:
    """What the stores of all nodes lack of `version`, sorted; the same on all ranks.

    `written` is the version that (node, layer, expert) was last written with.
    """
    reader: dict[tuple[int, int, int], Entry] = {}
    for entry in entries:
        where = (node_G[entry.dst_rank], entry.layer, entry.expert)
        if written.get(where) != version:
            reader.setdefault(where, entry)
    # Where the home is on another node, the first rank that reads an expert writes it: readers are spread over a node.
    return [
        Fill(*where, e.home_rank, e.home_rank if node_G[e.home_rank] == where[0] else e.dst_rank)
        for where, e in sorted(reader.items())
    ]


def rounds(fills: Sequence[Fill], bytes_of: Mapping[Key, int], round_bytes: int) -> list[list[Fill]]:
    """Fills that cross nodes, in parts; no rank sends or receives more than `round_bytes` in one, single larger experts aside."""
    parts: list[list[Fill]] = []
    load: Counter[tuple[str, int]] = Counter()
    for fill in fills:
        if not fill.crosses:
            continue
        ends = ("sent", fill.home), ("received", fill.writer)
        if not parts or any(load[end] + bytes_of[fill.key] > round_bytes for end in ends):
            parts.append([])
            load.clear()
        parts[-1].append(fill)
        for end in ends:
            load[end] += bytes_of[fill.key]
    return parts


def agreed(group: Group, work: Callable[[], T], task: str = " cannot publish its weights") -> list[T]:
    """What `work` returns on every rank, by rank, once all are done with it.

    Raises:
        TransferError: It failed on a rank; on all of them, so that none waits for it later.
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


def unpublished(key: Key, written: int | None, version: int, lack: str) -> TransferError:
    """Why an expert cannot be pulled: it was last published with another version, or never, which `lack` puts in words."""
    layer, expert = key
    if written is None:
        return TransferError(f"expert {expert} of layer {layer} {lack}; publish it before it is pulled.")
    last = f"expert {expert} of layer {layer} was last published with version {written}"
    return StaleWeights(f"{last}, and version {version} is asked for; publish it again after weights have changed.")
