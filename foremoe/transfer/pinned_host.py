"""PinnedHost: one-sided pulls from a store in host memory that the ranks of a node share; by DMA on a GPU."""

import contextlib
import secrets
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group, TorchGroup
from foremoe.plan.transfers import Link
from foremoe.transfer.base import Buffers, Copy, Entry, TransferBackend
from foremoe.transfer.host_fill import Fill, agreed, missing, rounds, unpublished
from foremoe.transfer.host_store import HostStore, Key, NodeFile, as_bytes

# Letters: G ranks.

_ROUND_BYTES = 256 << 20  # what a rank sends or receives at once when a store is filled from another node


@dataclass(frozen=True, slots=True, eq=False)
class _Pulls:
    """Copies in flight, which keep their destinations alive; the version they must have, the one that each found, and on a GPU
    the event at their end."""

    copies: tuple[Copy, ...]
    version: int
    found: tuple[tuple[Key, int], ...]
    done: torch.cuda.Event | None


class PinnedHost(TransferBackend):
    """Pulls experts from the host store of the rank's own node, without touching another rank or its links.

    The store holds what plans send by host, and nothing else. `publish` fills it: each expert once per node, by its home rank,
    or over the group if the home is on another node. It lies in /dev/shm in a file without a name, so nothing is left behind
    however a process ends. It never shrinks before `close`. The group's `timeout_s` must cover the filling.

    On a GPU the store is page-locked and copies run on a stream of their own. On a CPU `start` copies at once: nothing could do
    it in the background, and there the cost falls where the engine looks ahead instead of where a layer waits.

    Args:
        node_of_rank_G: Node of every rank of the group; ranks of one node must be able to open the same files. Default: ranks
            with the same host name are one node.
    """

    links: ClassVar[frozenset[Link]] = frozenset({Link.HOST})
    one_sided: ClassVar[bool] = True

    def __init__(self, node_of_rank_G: tuple[int, ...] | None = None) -> None:
        self.node_of_rank_G = node_of_rank_G
        self._store: HostStore | None = None
        self._stream: torch.cuda.Stream | None = None

    def __repr__(self) -> str:
        return f"PinnedHost(node_of_rank_G={self.node_of_rank_G!r})"

    def open(self, rank: int, group: Group, buffers: Buffers) -> None:
        self._require_closed()
        if self.node_of_rank_G is not None and len(self.node_of_rank_G) != group.size:
            raise InputError(f"node_of_rank_G names {len(self.node_of_rank_G)} ranks, and the group has {group.size}.")
        names = group.gather(socket.gethostname())
        self._node_G = list(self.node_of_rank_G or [names.index(name) for name in names])
        self._node = self._node_G[rank]
        self._node_ranks = [g for g in range(group.size) if self._node_G[g] == self._node]
        self._rank, self._group, self._buffers = rank, group, buffers
        self._version = 0
        self._written: dict[tuple[int, int, int], int] = {}  # (node, layer, expert) -> version; of all nodes, alike on all ranks

    def publish(self, entries: Sequence[Entry], version: int) -> None:
        group = self._opened()
        try:
            self._publish(group, entries, version)
        except BaseException:
            self._drop()  # what the store holds is not known any more
            raise
        self._version = version

    def start(self, copies: Sequence[Copy]) -> _Pulls:
        self._opened()
        pulls = []
        for copy in copies:
            key = (copy.layer, copy.expert)
            assert copy.dst is not None
            pulls.append((self._store_with(key, self._version), key, copy.dst))
        device = next((tensor.device for _, _, dst in pulls for tensor in dst if tensor.is_cuda), None)
        if device is None:
            return _Pulls(tuple(copies), self._version, tuple((key, store.read(key, dst)) for store, key, dst in pulls), None)
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        # What was queued so far may still use the buffers.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(self._stream):
                found = tuple((key, store.read(key, dst)) for store, key, dst in pulls)
                return _Pulls(tuple(copies), self._version, found, self._stream.record_event())
        except BaseException:
            self._stream.synchronize()  # what was queued must not land after this
            raise

    def wait(self, handle: _Pulls, timeout_s: float) -> None:
        """Returns when the copies of a handle are done. On a GPU the current stream waits and the host does not; there is
        nothing to time out, because nobody else takes part.

        Stamps are looked at here. A writer can come later only by a `publish`, which first finishes this rank's copies.
        """
        self._opened()
        if handle.done is not None and self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(handle.done)
        for key, found in handle.found:
            self._store_with(key, handle.version).check(key, found, handle.version)

    def close(self) -> None:
        self._drop()
        self._group = self._stream = None

    def _store_with(self, key: Key, version: int) -> HostStore:
        """The store, which must have an entry."""
        if self._store is not None and key in self._store:
            return self._store
        written = self._written.get((self._node, *key))
        raise unpublished(key, written, version, f"is not in the host store of node {self._node}")

    def _drop(self) -> None:
        """Gives back the store, on this rank."""
        with contextlib.suppress(Exception):  # a GPU that is lost copies nothing
            self._finish_copies()
        if self._store is not None:
            self._store.close()
        self._store, self._written = None, {}

    def _finish_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _publish(self, group: Group, entries: Sequence[Entry], version: int) -> None:
        fills = missing(entries, self._node_G, self._written, version)

        def describe() -> tuple[int, str, dict[Key, int]]:
            self._finish_copies()  # before anyone writes where they read
            homes = {fill.key: self._buffers.home(*fill.key) for fill in fills if fill.home == self._rank}
            sizes = {key: sum(tensor.nbytes for tensor in home) for key, home in homes.items()}
            return hash((version, *entries)), secrets.token_hex(8), sizes

        answers = agreed(group, describe)
        other = [g for g, (digest, _, _) in enumerate(answers) if digest != answers[0][0]]
        if other:
            raise InputError(f"rank {other[0]} publishes other entries or another version than rank 0; give all ranks the same.")
        bytes_of = {key: num_bytes for _, _, sizes in answers for key, num_bytes in sizes.items()}
        new = {fill.key: bytes_of[fill.key] for fill in fills if fill.node == self._node}
        self._make_room(group, new, version, NodeFile(answers[self._node_ranks[0]][1]))

        mine = [fill.key for fill in fills if fill.writer == self._rank and not fill.crosses]
        agreed(group, lambda: self._write({key: self._buffers.home(*key) for key in mine}, version))
        parts = rounds(fills, bytes_of, _ROUND_BYTES)
        for part in parts:
            self._exchange(group, part, bytes_of, version)
        if parts:
            group.barrier()
        self._written.update({(fill.node, *fill.key): version for fill in fills})

    def _make_room(self, group: Group, new: dict[Key, int], version: int, file: NodeFile) -> None:
        """Places for new entries, in a larger store where the present one is too small; collective over all nodes."""
        kept = sorted((layer, e) for (node, layer, e), v in self._written.items() if node == self._node and v == version)
        old, num_places = self._store, len(kept) + len(new)
        place_bytes = max([old.place_bytes if old is not None else 0, *new.values()])
        grows = bool(new) and (old is None or num_places > old.num_places or place_bytes > old.place_bytes)
        first, others = self._node_ranks[0], self._node_ranks[1:]

        def find() -> None:
            try:
                file.open()
            except FileNotFoundError:
                lack = f"rank {self._rank} does not see {file.path}, which rank {first} has made"
                cure = "say with node_of_rank_G which ranks share a machine"
                raise InputError(f"ranks {self._node_ranks} count as one node, but {lack}; {cure}.") from None

        def move() -> None:
            on_gpu = self._buffers.num_buffers > 0 and self._buffers.slot(0)[0].is_cuda
            store = self._store = HostStore(file.descriptor, num_places, place_bytes, page_lock=on_gpu)
            store.place({**{key: old.num_bytes(key) for key in kept if old is not None}, **new})
            if old is not None:
                store.take(old, kept[self._node_ranks.index(self._rank) :: len(self._node_ranks)])

        if any(group.gather(grows)):
            try:
                agreed(group, lambda: file.open(create=True) if grows and self._rank == first else None)
                agreed(group, lambda: find() if grows and self._rank in others else None)
                file.unlink()
                agreed(group, lambda: move() if grows else None)
            finally:
                file.close()
                if old is not None and self._store is not old:
                    old.close()
        if not grows and old is not None:
            old.place(new, kept)

    def _write(self, weights: dict[Key, Sequence[torch.Tensor]], version: int) -> None:
        if weights:
            assert self._store is not None
            self._store.write(weights, version)

    def _exchange(self, group: Group, fills: Sequence[Fill], bytes_of: dict[Key, int], version: int) -> None:
        """One round of entries that cross nodes: from their homes to their writers, and into the writers' stores."""
        device = _exchange_device(group)
        out = sorted((fill for fill in fills if fill.home == self._rank), key=lambda fill: fill.writer)
        come = sorted((fill for fill in fills if fill.writer == self._rank), key=lambda fill: fill.home)
        num_sent_G, num_received_G = [0] * group.size, [0] * group.size
        for fill in out:
            num_sent_G[fill.writer] += bytes_of[fill.key]
        for fill in come:
            num_received_G[fill.home] += bytes_of[fill.key]
        parts = [as_bytes(tensor).to(device) for fill in out for tensor in self._buffers.home(*fill.key)]
        sent = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *parts])
        received = torch.empty(sum(num_received_G), dtype=torch.uint8, device=device)
        group.all_to_all(received, sent, num_received_G, num_sent_G)
        cut = received.split([bytes_of[fill.key] for fill in come])
        self._write({fill.key: [part] for fill, part in zip(come, cut, strict=True)}, version)


def _exchange_device(group: Group) -> torch.device:
    """Host memory, where the bytes go anyway; GPU memory for a process group that can carry nothing else (NCCL alone)."""
    if isinstance(group, TorchGroup) and "cpu:" not in dist.get_backend_config(group.process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
