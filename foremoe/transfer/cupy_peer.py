"""`CupyPeer`: pulls experts from the memory of other GPUs in the node with copy engines, through CuPy and CUDA IPC."""

import contextlib
import ctypes
import functools
import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from foremoe.base.errors import InputError, StaleWeights, TransferError
from foremoe.distributed.group import Group
from foremoe.plan.transfers import Link
from foremoe.transfer import ipc
from foremoe.transfer.backends import package_of
from foremoe.transfer.base import Buffers, Copy, Entry, TransferBackend
from foremoe.transfer.host_fill import agreed, unpublished
from foremoe.transfer.host_store import Key
from foremoe.transfer.staging import Piece, Staging, require_on_gpu

# Letters: G ranks.

_logger = logging.getLogger(__name__)
_NUM_STREAMS = 4  # for parallel copies from different GPUs; more streams than copy engines do not help


@dataclass(frozen=True, slots=True, eq=False)
class _Pulls:
    """Copies in flight, which keep their destinations alive, with the weights' version and the events that end them."""

    copies: tuple[Copy, ...]
    version: int
    done: tuple[torch.cuda.Event, ...]


class CupyPeer(TransferBackend):
    """Pulls experts directly from the GPU memory of their homes. The copies run on copy engines and do not occupy any SM.

    `publish` sends every rank the locations of the home experts. A location is a CUDA IPC handle of a device allocation, which
    each process opens once, or a plain address if the ranks are threads of one process. Only new or changed locations are sent
    and opened. Homes on another host cannot be reached. The backend must be closed on all ranks before a home frees its experts.

    Weights are read in place, and their version is not verified. The home must not change its weights between `publish` and the
    end of all ranks' copies. Such a change would not be detected.

    CUDA cannot share some kinds of memory between processes, such as expandable segments or memory from cudaMallocAsync. In this
    case, `publish` copies the experts that other ranks pull into memory that foremoe has allocated itself, and ranks read this
    memory instead. The homes may then move or be offloaded.

    Args:
        staged: True if `publish` must always copy experts into foremoe's own memory.
    """

    links: ClassVar[frozenset[Link]] = frozenset({Link.PEER})
    one_sided: ClassVar[bool] = True
    requires: ClassVar[tuple[str, ...]] = ("cupy",)

    def __init__(self, *, staged: bool = False) -> None:
        self._staged = staged

    def open(self, rank: int, group: Group, buffers: Buffers) -> None:
        self._require_closed()
        self._cuda = cuda_runtime()
        self._device = torch.device("cuda", torch.cuda.current_device())
        if buffers.num_buffers:
            self._device = buffers.slot(0)[0].device
        if self._device.type != "cuda":
            raise InputError(f"cupy_peer copies between GPUs, and rank {rank} has its slots on {self._device}; use pinned_host.")
        self._process_G = [ipc.Process(*found) for found in group.gather(tuple(ipc.this_process()))]
        self._several = len(set(self._process_G)) > 1
        self._rank, self._group, self._buffers = rank, group, buffers
        self._streams = [torch.cuda.Stream(self._device) for _ in range(_NUM_STREAMS)]
        self._staging = Staging(self._cuda)
        self._turn = 0
        self._version = 0
        self._version_of: dict[Key, int] = {}
        self._home: dict[Key, tuple[int, tuple[Piece, ...]]] = {}  # experts published with this version -> home rank, tensors
        self._reads: set[Key] = set()  # published experts that this rank will pull
        self._handle: dict[tuple[int, int], bytes] = {}  # (home rank, base) -> IPC handle of the allocation
        self._base: dict[tuple[int, int], int] = {}  # (home rank, base) -> address of the allocation in this process

    def publish(self, entries: Sequence[Entry], version: int) -> None:
        group = self._opened()
        # Experts published before with this version stay readable but may have moved, if weights were offloaded and came back.
        kept = {key for key in self._home if self._version_of.get(key) == version}
        shares = agreed(group, lambda: (hash((version, *entries)), *self._export(entries, kept)))
        for home, (digest, pieces, handles) in enumerate(shares):
            if digest != shares[0][0]:
                raise InputError(f"rank {home} publishes other entries or another version than rank 0; give all ranks the same.")
            self._home.update({key: (home, tuple(Piece(*piece) for piece in expert)) for key, expert in pieces})
            for base, handle in handles:
                self._detach((home, base))  # a freed address that is reused is another allocation
                self._handle[home, base] = handle
        kept.update((entry.layer, entry.expert) for entry in entries)
        self._home = {key: self._home[key] for key in kept}
        used = {(home, piece.base) for home, pieces in self._home.values() for piece in pieces}
        for where in (self._handle.keys() | self._base.keys()) - used:
            self._detach(where)
            self._handle.pop(where, None)
        self._reads = (self._reads & kept) | {(entry.layer, entry.expert) for entry in entries if entry.dst_rank == self._rank}
        agreed(group, self._attach)
        self._staging.free()  # allocations that are not used any more are not open anywhere
        self._version = version
        self._version_of.update(dict.fromkeys(kept, version))

    def start(self, copies: Sequence[Copy]) -> _Pulls:
        self._opened()
        moves, used = [self._moves(copy) for copy in copies], dict[int, torch.cuda.Stream]()
        with torch.cuda.device(self._device):
            # Work queued so far may still use the buffers.
            ready = torch.cuda.current_stream().record_event()
            try:
                for pieces in moves:
                    stream = self._streams[self._turn]
                    if self._turn not in used:
                        stream.wait_event(ready)
                        used[self._turn] = stream
                    self._turn = (self._turn + 1) % _NUM_STREAMS
                    for dst, src, num_bytes in pieces:
                        self._cuda.memcpyAsync(dst, src, num_bytes, self._cuda.memcpyDeviceToDevice, stream.cuda_stream)
                return _Pulls(tuple(copies), self._version, tuple(stream.record_event() for stream in used.values()))
            except BaseException:
                for stream in used.values():
                    stream.synchronize()  # queued copies must not land after this
                raise

    def wait(self, handle: _Pulls, timeout_s: float) -> None:
        """Makes the current stream, but not the host, wait for the copies of a handle.

        There is no timeout, because no other rank takes part. If a copy fails, the next call that waits for the GPU raises the
        error.
        """
        self._opened()
        for event in handle.done:
            torch.cuda.current_stream(self._device).wait_event(event)
        if handle.version != self._version:
            started = f"copies were started with version {handle.version} of the weights"
            since = f"version {self._version} has been published since"
            raise StaleWeights(f"{started}, and {since}; wait for the copies of a plan before the next one begins.")

    def close(self) -> None:
        if self._group is None:
            return
        self._group = None
        with contextlib.suppress(Exception):  # a lost GPU has no copies or handles left
            for stream in self._streams:
                stream.synchronize()
        for where in list(self._base):
            self._detach(where)
        self._staging.free(everything=True)
        self._base, self._handle, self._home, self._version_of, self._streams = {}, {}, {}, {}, []

    def _export(
        self, entries: Sequence[Entry], kept: Set[Key]
    ) -> tuple[list[tuple[Key, list[list[int]]]], list[tuple[int, bytes]]]:
        """Returns the locations of home experts and handles of their allocations, if they differ from those already sent."""
        mine = {key for key in kept if self._home[key][0] == self._rank}
        mine.update((entry.layer, entry.expert) for entry in entries if entry.home_rank == self._rank)
        with torch.cuda.device(self._device):
            pieces, handles = self._shared(mine, kept)
        torch.cuda.synchronize(self._device)  # other ranks' copies are not ordered after this rank's streams
        return (
            [(key, list(map(list, expert))) for key, expert in pieces.items() if self._home.get(key) != (self._rank, expert)],
            [(base, handle) for base, handle in handles.items() if self._handle.get((self._rank, base)) != handle],
        )

    def _shared(self, mine: Set[Key], kept: Set[Key]) -> tuple[dict[Key, tuple[Piece, ...]], dict[int, bytes]]:
        """Returns locations where other ranks can read experts, staged if necessary, and handles of their allocations."""
        if not self._staged:
            try:
                pieces = {key: tuple(self._piece(key, tensor) for tensor in self._buffers.home(*key)) for key in sorted(mine)}
                return pieces, self._handles(pieces)
            except _NotShareable as error:
                _logger.warning("rank %d copies experts before others read them, from now on: %s", self._rank, error)
                self._staged, kept = True, frozenset()
        pieces = self._staging.put(mine, kept, self._buffers)
        return pieces, self._handles(pieces)

    def _handles(self, pieces: Mapping[Key, tuple[Piece, ...]]) -> dict[int, bytes]:
        bases = {piece.base: key for key, expert in pieces.items() for piece in expert if piece.num_bytes and self._several}
        return {base: self._ipc_handle(key, base) for base, key in bases.items()}

    def _piece(self, key: Key, tensor: torch.Tensor) -> Piece:
        pointer, num_bytes = tensor.data_ptr(), tensor.nbytes
        require_on_gpu(key, tensor)
        if not self._several or not num_bytes:
            return Piece(pointer, 0, num_bytes)
        base, size = _allocation(pointer)
        if pointer + num_bytes > base + size:
            raise _not_shareable(key, "it spans several allocations")
        return Piece(base, pointer - base, num_bytes)

    def _ipc_handle(self, key: Key, base: int) -> bytes:
        try:
            return bytes(self._cuda.ipcGetMemHandle(base))
        except Exception as error:
            raise _not_shareable(key, str(error)) from error

    def _attach(self) -> None:
        """Opens the allocations that this rank will read and has not opened yet."""
        me = self._process_G[self._rank]
        for key in self._reads:
            home, pieces = self._home[key]
            process = self._process_G[home]
            if process.host != me.host:
                continue  # an expert of another host is published for a backend that can reach it
            for piece in pieces:
                where = (home, piece.base)
                if where in self._base or not piece.num_bytes:
                    continue
                # A process cannot open its own handles, and does not need to.
                self._base[where] = piece.base if process == me else self._open_handle(home, self._handle[where])

    def _detach(self, where: tuple[int, int]) -> None:
        """Closes an allocation, if this rank has it open."""
        base = self._base.pop(where, None)
        if base is not None and self._process_G[where[0]] != self._process_G[self._rank]:
            with contextlib.suppress(Exception), torch.cuda.device(self._device):
                for stream in self._streams:  # copies in flight may read it
                    stream.synchronize()
                self._cuda.ipcCloseMemHandle(base)

    def _open_handle(self, home: int, handle: bytes) -> int:
        try:
            with torch.cuda.device(self._device):
                return int(self._cuda.ipcOpenMemHandle(handle))
        except Exception as error:
            needs = "the two GPUs need peer access, and containers one IPC namespace (--ipc=host)"
            raise TransferError(f"the GPU memory of rank {home} cannot be opened ({error}); {needs}.") from error

    def _moves(self, copy: Copy) -> list[tuple[int, int, int]]:
        """Returns destination, source and size in bytes of each tensor of a copy."""
        layer, expert = key = (copy.layer, copy.expert)
        written = self._version_of.get(key)
        if written != self._version:
            raise unpublished(key, written, self._version, "was never published")
        home, pieces = self._home[key]
        assert copy.dst is not None
        sizes = [tensor.nbytes for tensor in copy.dst]
        theirs = [piece.num_bytes for piece in pieces]
        if sizes != theirs:
            has = f"tensors of {theirs} bytes on rank {home} and of {sizes} bytes on rank {self._rank}"
            raise TransferError(f"expert {expert} of layer {layer} has {has}; sizes must be the same on every rank.")
        if any(piece.num_bytes and (home, piece.base) not in self._base for piece in pieces):
            where = f"on rank {home}, whose GPU memory is not open on rank {self._rank}"
            cure = "publish it for this rank, and pull from other hosts with another backend"
            raise TransferError(f"expert {expert} of layer {layer} is {where}; {cure}.", (home,))
        return [
            (tensor.data_ptr(), self._base[home, piece.base] + piece.offset, piece.num_bytes)
            for tensor, piece in zip(copy.dst, pieces, strict=True)
            if piece.num_bytes
        ]


def cuda_runtime() -> Any:
    """Returns CuPy's module for CUDA runtime calls."""
    try:
        import cupy
    except ImportError as error:
        why = str(error).splitlines()[0]
        raise InputError(f"cupy_peer needs cupy ({why}); pip install {package_of('cupy')}.") from None
    if not (cupy.cuda.is_available() and torch.cuda.is_available()):
        raise InputError("cupy_peer needs a GPU that cupy and torch can use, and there is none; use pinned_host or collective.")
    return cupy.cuda.runtime


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _allocation(pointer: int) -> tuple[int, int]:
    """Returns the address and size of the device allocation that contains a pointer. An IPC handle refers to a whole allocation,
    and torch places several tensors in one."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    error = _driver().cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    if error:
        raise TransferError(f"CUDA does not know the allocation of a home expert (cuMemGetAddressRange: error {error}).")
    return base.value, size.value


class _NotShareable(TransferError):
    """Raised for an expert in memory that other processes cannot open."""


def _not_shareable(key: Key, why: str) -> TransferError:
    lies = f"expert {key[1]} of layer {key[0]} is in memory that CUDA cannot share between processes ({why})"
    cure = "give containers one IPC namespace (--ipc=host), or use collective"
    return _NotShareable(f"{lies}, and a copy cannot be shared either; {cure}.")
