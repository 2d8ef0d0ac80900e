"""`PinnedHost`: pulls experts from a store in host memory that the ranks of a node share, through DMA if slots are on a GPU."""

import contextlib
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from foremoe.base.errors import InputError, TransferError
from foremoe.distributed.group import Group
from foremoe.distributed.private import private_group
from foremoe.plan.transfers import Link
from foremoe.transfer.base import Buffers, Copy, Entry, TransferBackend
from foremoe.transfer.host_fill import Fill, Filling, agreed, exchange, missing, steps, unpublished
from foremoe.transfer.host_store import HostStore, Key, NodeFile, reserve_share

# Letters: G ranks.

_STEP_BYTES = 64 << 20  # limit of bytes that a rank sends or receives at once when a store is filled from another node
_POLL_S = 2e-4


@dataclass(slots=True, eq=False)
class _Pulls:
    """Copies of one `start`: those whose expert is not stored yet, the required version, the versions that the other copies
    found, and on a GPU the events at their start and end."""

    left: list[Copy]
    version: int
    found: list[tuple[Key, int]] = field(default_factory=list)
    ready: torch.cuda.Event | None = None
    done: torch.cuda.Event | None = None


class PinnedHost(TransferBackend):
    """Pulls experts from the host store of the rank's own node, without using another rank or its links.

    The store holds only experts that plans send over the host link. `publish` makes room for them and returns. A thread then
    writes them in the order of need. Each expert is written once per node: by its home rank or, if the home is on another node,
    by the first rank that reads it. Traffic between nodes uses a separate process group, with NCCL if the EP group has it and
    with gloo otherwise. A pull waits only for its own expert. `advance` waits until this rank has written its part for the next
    use, so that the thread's copies are never queued behind kernels that wait for them. If a rank cannot write its part, `finish`
    and pulls of missing experts raise `FillError` on all ranks. This error names the rank, and the next `publish` fills
    everything again.

    The store is an unnamed file in /dev/shm, so nothing is left behind even if a process is killed. It does not shrink before
    `close`. On a GPU, the store is page-locked, and copies run on separate streams. On a CPU, `start` immediately copies experts
    that are already stored.

    Args:
        node_of_rank_G: Node of every rank of the group. Ranks of one node must be able to open the same files. By default, ranks
            with the same host name form a node.
    """

    links: ClassVar[frozenset[Link]] = frozenset({Link.HOST})
    one_sided: ClassVar[bool] = True

    def __init__(self, node_of_rank_G: tuple[int, ...] | None = None) -> None:
        self.node_of_rank_G = node_of_rank_G
        self._store: HostStore | None = None
        self._stream: torch.cuda.Stream | None = None
        self._filling: Filling | None = None
        self._late: list[_Pulls] = []  # copies that wait for their expert
        self._writer: dict[Key, int] = {}  # writers of this node's store

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
        device = buffers.slot(0)[0].device if buffers.num_buffers else torch.device("cpu")
        on_gpu = device.type == "cuda"
        self._device, self._stream = device, torch.cuda.Stream(device) if on_gpu else None
        self._fill_stream = torch.cuda.Stream(device) if on_gpu else None
        self._filling, self._late, self._writer = None, [], {}
        self._open_fills(group)
        self._version = 0
        self._written: dict[tuple[int, int, int], int] = {}  # (node, layer, expert) -> version; the same on all ranks

    def publish(self, entries: Sequence[Entry], version: int) -> None:
        group = self._opened()
        if self._filling is not None:
            self._filling.join()
        try:
            if any(group.gather(self._filling is not None and self._filling.error is not None)):
                self._drop()  # the contents of the stores are unknown
                self._fills.close()
                self._open_fills(group)
            self._publish(group, entries, version)
        except BaseException:
            self._drop()
            raise
        self.advance(0)

    def advance(self, position: int) -> None:
        for pulls in list(self._late):
            with contextlib.suppress(Exception):  # `wait` will raise the error
                self._read(pulls)
        if self._filling is not None:
            self._filling.passed(position)

    def finish(self) -> None:
        if self._filling is not None:
            self._filling.join()
            if self._filling.error is not None:
                raise self._filling.error

    def start(self, copies: Sequence[Copy]) -> _Pulls:
        self._opened()
        pulls = _Pulls(list(copies), self._version)
        if self._stream is not None:
            # Work queued so far may still use the buffers.
            pulls.ready = torch.cuda.current_stream(self._device).record_event()
        self._read(pulls)
        if pulls.left:
            self._late.append(pulls)
        return pulls

    def wait(self, handle: _Pulls, timeout_s: float) -> None:
        """Waits for a handle's copies. On a GPU, only the current stream waits for them. The host waits for experts to be stored.

        Checks the stamps. Only another `publish` can write later, and it first finishes this rank's copies.
        """
        self._opened()
        until = time.monotonic() + timeout_s
        try:
            while self._lacks(handle, time.monotonic() >= until):
                time.sleep(_POLL_S)
        except BaseException:
            self._finish_copies()
            raise
        finally:
            self._late = [pulls for pulls in self._late if pulls is not handle]
        if handle.done is not None:
            torch.cuda.current_stream(self._device).wait_event(handle.done)
        for key, found in handle.found:
            self._store_with(key, handle.version).check(key, found, handle.version)

    def close(self) -> None:
        self._drop()
        if self._group is not None:
            self._fills.close()
        self._group = self._stream = self._fill_stream = None

    def _open_fills(self, group: Group) -> None:
        """Creates a group for the filling thread. Collective."""
        crosses = len(set(self._node_G)) > 1
        self._fills, self._fill_device = private_group(group, self._device if crosses else torch.device("cpu"))

    def _read(self, pulls: _Pulls) -> None:
        """Copies the experts that are already stored."""
        keyed = [((copy.layer, copy.expert), copy) for copy in pulls.left]
        stores = {key: self._store_with(key, pulls.version) for key, _ in keyed}
        stored = {key for key, store in stores.items() if store.version(key) == pulls.version}
        if not stored:
            return
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            try:
                if self._stream is not None and pulls.ready is not None:
                    self._stream.wait_event(pulls.ready)
                for key, copy in keyed:
                    if key in stored and copy.dst is not None:
                        pulls.found.append((key, stores[key].read(key, copy.dst)))
                if self._stream is not None:
                    pulls.done = self._stream.record_event()
            except BaseException:
                self._finish_copies()  # queued copies must not land after this
                raise
        pulls.left = [copy for key, copy in keyed if key not in stored]

    def _lacks(self, pulls: _Pulls, late: bool) -> bool:
        """Returns whether experts are still missing in the store. Raises if they will not be stored, or not in time."""
        filling = self._filling
        over = filling is None or not filling.is_alive()  # checked first, so that everything written before its end is found
        self._read(pulls)
        if not pulls.left:
            return False
        layer, expert = key = pulls.left[0].layer, pulls.left[0].expert
        if over and filling is not None and filling.error is not None:
            raise filling.error
        store = self._store_with(key, pulls.version)
        if over:
            store.check(key, store.version(key), pulls.version)
        if late:
            writer = self._writer[key]
            lack = f"rank {writer} did not store expert {expert} of layer {layer} in time"
            raise TransferError(f"{lack}; look at its log and restart the step.", (writer,))
        return True

    def _store_with(self, key: Key, version: int) -> HostStore:
        """Returns the store, which must have the entry `key`."""
        if self._store is not None and key in self._store:
            return self._store
        written = self._written.get((self._node, *key))
        raise unpublished(key, written, version, f"is not in the host store of node {self._node}")

    def _drop(self) -> None:
        """Releases the store on this rank, and stops a running filling on all ranks."""
        if self._filling is not None:
            self._filling.stop()
        with contextlib.suppress(Exception):  # a lost GPU does not copy anything
            self._finish_copies()
        if self._store is not None:
            self._store.close()
        self._store, self._written, self._filling, self._late = None, {}, None, []

    def _finish_copies(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _publish(self, group: Group, entries: Sequence[Entry], version: int) -> None:
        fills = missing(entries, self._node_G, self._written, version)

        def describe() -> tuple[int, str, list[list[int]]]:
            self._late = []
            self._finish_copies()  # before any rank overwrites what they read
            homes = {fill.key: self._buffers.home(*fill.key) for fill in fills if fill.home == self._rank}
            sizes = [[*key, sum(tensor.nbytes for tensor in home)] for key, home in homes.items()]
            return hash((version, *entries)), secrets.token_hex(8), sizes

        answers = agreed(group, describe)
        other = [g for g, (digest, _, _) in enumerate(answers) if digest != answers[0][0]]
        if other:
            raise InputError(f"rank {other[0]} publishes other entries or another version than rank 0; give all ranks the same.")
        bytes_of = {(layer, e): num_bytes for _, _, sizes in answers for layer, e, num_bytes in sizes}
        new = {fill.key: bytes_of[fill.key] for fill in fills if fill.node == self._node}
        self._make_room(group, new, version, NodeFile(answers[self._node_ranks[0]][1]))

        self._written.update({(fill.node, *fill.key): version for fill in fills})
        self._writer.update({fill.key: fill.writer for fill in fills if fill.node == self._node})
        self._version = version
        # Homes are final after the work that is queued so far.
        ready = None if self._stream is None else torch.cuda.current_stream(self._device).record_event()
        self._filling = Filling(self._fills, steps(fills, bytes_of, _STEP_BYTES), lambda part: self._fill(part, bytes_of, ready))

    def _make_room(self, group: Group, new: dict[Key, int], version: int, file: NodeFile) -> None:
        """Assigns places to new entries, in a larger store if the current one is too small. Collective over all nodes."""
        kept = sorted((layer, e) for (node, layer, e), v in self._written.items() if node == self._node and v == version)
        old, num_places = self._store, len(kept) + len(new)
        place_bytes = max([old.place_bytes if old is not None else 0, *new.values()])
        grows = bool(new) and (old is None or num_places > old.num_places or place_bytes > old.place_bytes)
        first, others = self._node_ranks[0], self._node_ranks[1:]
        share = self._node_ranks.index(self._rank), len(self._node_ranks)

        def find() -> None:
            try:
                file.open()
            except FileNotFoundError:
                lack = f"rank {self._rank} does not see {file.path}, which rank {first} has made"
                cure = "state with node_of_rank_G which ranks share a machine"
                raise InputError(f"ranks {self._node_ranks} count as one node, but {lack}; {cure}.") from None

        def move() -> None:
            store = self._store = HostStore(file.descriptor, num_places, place_bytes, page_lock=self._stream is not None)
            store.place({**{key: old.num_bytes(key) for key in kept if old is not None}, **new})
            if old is not None:
                store.take(old, kept[share[0] :: share[1]])

        if any(group.gather(grows)):
            try:
                agreed(group, lambda: file.open(create=True) if grows and self._rank == first else None)
                agreed(group, lambda: find() if grows and self._rank in others else None)
                file.unlink()
                agreed(group, lambda: reserve_share(file.descriptor, num_places, place_bytes, *share) if grows else None)
                agreed(group, lambda: move() if grows else None)
            finally:
                file.close()
                if old is not None and self._store is not old:
                    old.close()
        if not grows and old is not None:
            old.place(new, kept)

    def _fill(self, fills: Sequence[Fill], bytes_of: dict[Key, int], ready: torch.cuda.Event | None) -> None:
        """Runs one step of the filling, in its thread."""
        with contextlib.ExitStack() as on_gpu:
            if self._fill_stream is not None and ready is not None:
                on_gpu.enter_context(torch.cuda.device(self._device))
                on_gpu.enter_context(torch.cuda.stream(self._fill_stream))
                self._fill_stream.wait_event(ready)
            self._write({fill.key: self._buffers.home(*fill.key) for fill in fills if fill.writer == fill.home == self._rank})
            crossing = [fill for fill in fills if fill.crosses]
            if crossing:
                self._fills.barrier()  # no rank enters an exchange that another rank will not join
                self._write(exchange(self._fills, self._fill_device, crossing, bytes_of, self._buffers))

    def _write(self, weights: dict[Key, Sequence[torch.Tensor]]) -> None:
        if weights:
            assert self._store is not None
            self._store.write(weights, self._version)
