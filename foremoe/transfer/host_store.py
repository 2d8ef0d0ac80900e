"""HostStore: expert weights in memory that the ranks of one node share, each with the version it was written at."""

import contextlib
import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple, Self

import numpy as np
import torch

from foremoe.base.errors import StaleWeights, TransferError
from foremoe.transfer.base import Tensors

# Letters: N places of the store.

Key = tuple[int, int]  # layer, expert

_ALIGN_BYTES = 4096  # places begin on pages, so that no two writers share one
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every GPU of this process
_BEGUN, _DONE, _MARK = range(3)  # stamps of a place
_MARKED_BYTES = 256
_lock = threading.Lock()


class _Place(NamedTuple):
    row: int
    num_bytes: int


class HostStore:
    """One rank's view of its node's store. Every rank of the node makes one over the same file, with the same arguments, and
    calls `place` with the same arguments; nothing else has to be agreed.

    The store is a row of equally large places, one expert each. A place has three stamps in the shared memory: the version whose
    writing has begun, the version whose writing is done, and a checksum of bytes taken evenly from it. A reader looks at the
    second one before it copies and at the others after it (`read`, then `check`): a writer in between, an unfinished or another
    version are seen, and so are bytes that anything else has overwritten, but for stretches between two bytes of the checksum.
    One version of an entry is written once. Readers may come before the writer: what `version` says tells them when an entry is
    there.

    The file, open and writable, gets its size here and may be closed afterwards. Page-locked memory is for DMA to GPUs of this
    process. Raises TransferError where there is not enough memory, or it cannot be page-locked.
    """

    def __init__(self, file: int, num_places: int, place_bytes: int, *, page_lock: bool = False) -> None:
        self.num_places, self.place_bytes = num_places, _aligned(place_bytes)
        self._place: dict[Key, _Place] = {}
        head_bytes = _head_bytes(num_places)
        size = head_bytes + num_places * self.place_bytes
        _reserve(file, 0, size)
        self._map: mmap.mmap | None = mmap.mmap(file, size)
        self._locked_address = 0
        # Through numpy, because torch.frombuffer does not keep the map from being closed under a tensor that still reads it.
        bytes_ = np.frombuffer(self._map, np.uint8)
        self._stamp_N3 = bytes_[: num_places * 3 * 8].view(np.int64).reshape(num_places, 3)
        self._bytes = torch.from_numpy(bytes_[head_bytes:])
        if page_lock:
            self._lock(bytes_.ctypes.data, size)

    def __contains__(self, key: Key) -> bool:
        return key in self._place

    def num_bytes(self, key: Key) -> int:
        """Bytes of an entry."""
        return self._place[key].num_bytes

    def place(self, new: Mapping[Key, int], kept: Collection[Key] = ()) -> None:
        """Gives places to new entries, in their order, with bytes by key; entries that are neither new nor kept lose theirs."""
        self._place = {key: self._place[key] for key in kept}
        taken = {place.row for place in self._place.values()}
        free = iter(sorted(set(range(self.num_places)) - taken))
        for key, num_bytes in new.items():
            assert num_bytes <= self.place_bytes
            self._place[key] = _Place(next(free), num_bytes)

    def write(self, weights: Mapping[Key, Tensors], version: int) -> None:
        """Fills entries with weights of a version; the bytes are there when it returns."""
        rows = [self._place[key].row for key in weights]
        self._stamp_N3[rows, _BEGUN] = version
        for key, tensors in weights.items():
            for stored, tensor in zip(self._parts(key, tensors), tensors, strict=True):
                stored.copy_(as_bytes(tensor), non_blocking=True)
        for device in {tensor.device for tensors in weights.values() for tensor in tensors if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self._stamp_N3[rows, _MARK] = [self._mark(key) for key in weights]
        _fence()
        self._stamp_N3[rows, _DONE] = version

    def version(self, key: Key) -> int:
        """The version that was written last and is whole; 0 before the first."""
        found = int(self._stamp_N3[self._place[key].row, _DONE])
        _fence()
        return found

    def take(self, other: Self, keys: Iterable[Key]) -> None:
        """Copies entries of another store, with their stamps."""
        for key in keys:
            self._entry(key).copy_(other._entry(key))
            self._stamp_N3[self._place[key].row] = other._stamp_N3[other._place[key].row]

    def read(self, key: Key, tensors: Tensors) -> int:
        """Copies an entry into tensors; on a GPU the copy is queued on the current stream. Returns the version that was done
        before; only `check` after the copy tells whether it is what arrived.
        """
        parts, found = self._parts(key, tensors), self.version(key)
        for stored, tensor in zip(parts, tensors, strict=True):
            as_bytes(tensor).copy_(stored, non_blocking=True)
        return found

    def check(self, key: Key, found: int, version: int) -> None:
        """Raises StaleWeights if a copy that found version `found` and is over now has not read the whole of `version`, and
        TransferError if its bytes are not those that were written.
        """
        layer, expert = key
        whole = self._mark(key) == int(self._stamp_N3[self._place[key].row, _MARK])
        _fence()
        begun = int(self._stamp_N3[self._place[key].row, _BEGUN])
        if not found == begun == version:
            state = f"has version {found}" if found == begun else f"is being overwritten (version {found} by {begun})"
            held = f"expert {expert} of layer {layer} {state} in the host store"
            raise StaleWeights(f"{held}, and version {version} is asked for; weights may change between plans only.")
        if not whole:
            cure = "find what writes there, or send by another link"
            raise TransferError(f"expert {expert} of layer {layer} was overwritten in the host store; {cure}.")

    def close(self) -> None:
        """Gives back page lock and memory; the last rank's close frees it. Safe to call twice."""
        if self._map is None:
            return
        if self._locked_address:
            torch.cuda.cudart().cudaHostUnregister(self._locked_address)
            self._locked_address = 0
        self._place = {}
        self._stamp_N3, self._bytes = np.empty((0, 3), np.int64), torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # a view of it is alive, in a traceback say; the memory goes with the view
            self._map.close()
        self._map = None

    def _parts(self, key: Key, tensors: Tensors) -> list[torch.Tensor]:
        """The bytes of an entry, cut like tensors."""
        sizes, num_bytes = [tensor.nbytes for tensor in tensors], self._place[key].num_bytes
        if sum(sizes) != num_bytes:
            has = f"expert {key[1]} of layer {key[0]} has {num_bytes} bytes in the host store and {sum(sizes)} bytes on this rank"
            raise TransferError(f"{has}; an expert must have the same tensors on every rank.")
        return list(self._entry(key).split(sizes))

    def _entry(self, key: Key) -> torch.Tensor:
        row, num_bytes = self._place[key]
        return self._bytes[row * self.place_bytes : row * self.place_bytes + num_bytes]

    def _mark(self, key: Key) -> int:
        """Checksum of at most twice `_MARKED_BYTES` bytes, taken evenly from an entry."""
        entry = self._entry(key).numpy()
        return zlib.crc32(entry[:: max(len(entry) // _MARKED_BYTES, 1)].tobytes())

    def _lock(self, address: int, size: int) -> None:
        error = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if error:
            self.close()
            cure = "raise the limit of locked memory (ulimit -l), or send fewer experts by host"
            raise TransferError(f"{size} bytes of the host store cannot be page-locked (CUDA error {error}); {cure}.")
        self._locked_address = address


def _fence() -> None:
    """Keeps bytes and stamps in order where the processor would not: nothing moves across a release and the next acquire."""
    for _ in range(2):
        with _lock:
            pass


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat tensor's memory as uint8."""
    return tensor.detach().view(torch.uint8)


class NodeFile:
    """A file that the ranks of a node open together. It has a name only until they have, so nothing is left behind however a
    process ends; until then it is empty. All ranks know the name before the file is made, so that whoever survives can remove it.
    """

    def __init__(self, name: str) -> None:
        self.path = os.path.join(_directory(), f"foremoe-{name}")
        self.descriptor = -1

    def open(self, *, create: bool = False) -> None:
        """Opens the file; one rank creates it, before the others come."""
        self.descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)

    def unlink(self) -> None:
        """Takes its name away; by any rank, any number of times."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Gives back descriptor and name."""
        self.unlink()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _directory() -> str:
    """In memory, if the system has a place for such files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _head_bytes(num_places: int) -> int:
    return _aligned(num_places * 3 * 8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def reserve_share(file: int, num_places: int, place_bytes: int, share: int, num_shares: int) -> None:
    """Takes the memory of every `num_shares`-th place of a store to come, from place `share` on.

    Memory comes from the NUMA node of the processor that asks for it. Where every rank of a node takes a share before the store
    is made, the store lies spread over the NUMA nodes that the ranks run on, and their copies over the memory channels of all.
    """
    head_bytes, place_bytes = _head_bytes(num_places), _aligned(place_bytes)
    for place in range(share, num_places if place_bytes else 0, num_shares):
        _reserve(file, head_bytes + place * place_bytes, place_bytes)


def _reserve(file: int, begin: int, size: int) -> None:
    """Gives a part of a file its memory: a map of a file that outgrows /dev/shm would kill the process at first touch."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, begin, size)
        elif begin + size > os.fstat(file).st_size:
            os.ftruncate(file, begin + size)
    except OSError as error:
        where = os.fstatvfs(file)
        have = f"{_directory()} has {where.f_bavail * where.f_frsize} left ({error.strerror})"
        cure = "enlarge it (containers: --shm-size), or send fewer experts by host"
        raise TransferError(f"the host store needs {size} bytes and {have}; {cure}.") from error
