"""`HostStore`: expert weights in memory that a node's ranks share, each with the version of the last write."""

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

# Letters: N places of the store, each for one expert.

Key = tuple[int, int]  # layer, expert

_ALIGN_BYTES = 4096  # places begin on page boundaries, so that writers do not share pages
_PORTABLE = 1  # cudaHostRegisterPortable, page-locked for every GPU of this process
_BEGUN, _DONE, _MARK = range(3)  # stamps of a place
_MARKED_BYTES = 256
# Largest copy to a GPU, which has one engine for copies from the host. Copies of other streams run only between two copies.
_COPY_BYTES = 4 << 20
_lock = threading.Lock()


class _Place(NamedTuple):
    row: int
    num_bytes: int


class HostStore:
    """One rank's view of the store of its node.

    Every rank of the node creates one such object over the same file and calls `place` with the same arguments as the other
    ranks. The ranks need not agree on anything else.

    The store consists of equally large places, each for one expert. A place has three stamps in the shared memory: the version
    last begun, the version last completed, and a checksum of evenly sampled bytes. A reader calls `read`, which reads the second
    stamp and copies, and then `check`, which reads the other two stamps. This detects concurrent writes, unfinished writes and
    wrong versions. It also detects bytes that were overwritten by something else, unless they lie between two sampled bytes. Each
    version of an entry is written only once. A reader may come before the writer and can ask `version` whether an entry is
    complete.

    The file must be open and writable. It gets its size here and may be closed afterwards. Memory is page-locked for DMA to GPUs
    of this process. Raises TransferError if there is not enough memory or if it cannot be page-locked.
    """

    def __init__(self, file: int, num_places: int, place_bytes: int, *, page_lock: bool = False) -> None:
        self.num_places, self.place_bytes = num_places, _aligned(place_bytes)
        self._place: dict[Key, _Place] = {}
        head_bytes = _head_bytes(num_places)
        size = head_bytes + num_places * self.place_bytes
        _reserve(file, 0, size)
        self._map: mmap.mmap | None = mmap.mmap(file, size)
        self._locked_address = 0
        # numpy is used because torch.frombuffer does not prevent the map from being closed while a tensor still reads it.
        bytes_ = np.frombuffer(self._map, np.uint8)
        self._stamp_N3 = bytes_[: num_places * 3 * 8].view(np.int64).reshape(num_places, 3)
        self._bytes = torch.from_numpy(bytes_[head_bytes:])
        if page_lock:
            self._lock(bytes_.ctypes.data, size)

    def __contains__(self, key: Key) -> bool:
        return key in self._place

    def num_bytes(self, key: Key) -> int:
        """Returns the size of an entry in bytes."""
        return self._place[key].num_bytes

    def place(self, new: Mapping[Key, int], kept: Collection[Key] = ()) -> None:
        """Assigns places to new entries, a mapping from key to bytes, in order. Removes entries that are neither new nor kept."""
        self._place = {key: self._place[key] for key in kept}
        taken = {place.row for place in self._place.values()}
        free = iter(sorted(set(range(self.num_places)) - taken))
        for key, num_bytes in new.items():
            assert num_bytes <= self.place_bytes
            self._place[key] = _Place(next(free), num_bytes)

    def write(self, weights: Mapping[Key, Tensors], version: int) -> None:
        """Writes weights of a version to entries. The entries are complete when the method returns."""
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
        """Returns the last version that was written completely, or 0."""
        found = int(self._stamp_N3[self._place[key].row, _DONE])
        _fence()
        return found

    def take(self, other: Self, keys: Iterable[Key]) -> None:
        """Copies entries of another store, including their stamps."""
        for key in keys:
            self._entry(key).copy_(other._entry(key))
            self._stamp_N3[self._place[key].row] = other._stamp_N3[other._place[key].row]

    def read(self, key: Key, tensors: Tensors) -> int:
        """Copies an entry into tensors, and returns the version that was complete before the copy.

        On a GPU, the copy is queued on the current stream, in parts of at most `_COPY_BYTES`. Call `check` after the copy to
        learn whether this version has arrived.
        """
        parts, found = self._parts(key, tensors), self.version(key)
        for stored, tensor in zip(parts, tensors, strict=True):
            most = _COPY_BYTES if tensor.is_cuda else max(tensor.nbytes, 1)
            for there, here in zip(as_bytes(tensor).split(most), stored.split(most), strict=True):
                there.copy_(here, non_blocking=True)
        return found

    def check(self, key: Key, found: int, version: int) -> None:
        """Checks a finished copy, for which `read` returned `found`.

        Raises StaleWeights if the copy did not read `version` completely, and TransferError if the stored bytes differ from the
        bytes that were written.
        """
        layer, expert = key
        whole = self._mark(key) == int(self._stamp_N3[self._place[key].row, _MARK])
        _fence()
        begun = int(self._stamp_N3[self._place[key].row, _BEGUN])
        if not found == begun == version:
            state = f"has version {found}" if found == begun else f"is being overwritten (version {found} by {begun})"
            held = f"expert {expert} of layer {layer} {state} in the host store"
            raise StaleWeights(f"{held}, and version {version} is requested; weights may change only between plans.")
        if not whole:
            cure = "find the writer, or send over another link"
            raise TransferError(f"expert {expert} of layer {layer} was overwritten in the host store; {cure}.")

    def close(self) -> None:
        """Releases the page lock and the memory, which is freed when the last rank closes. It may be called twice."""
        if self._map is None:
            return
        if self._locked_address:
            torch.cuda.cudart().cudaHostUnregister(self._locked_address)
            self._locked_address = 0
        self._place = {}
        self._stamp_N3, self._bytes = np.empty((0, 3), np.int64), torch.empty(0, dtype=torch.uint8)
        with contextlib.suppress(BufferError):  # a view is still alive, for example in a traceback, and frees the memory later
            self._map.close()
        self._map = None

    def _parts(self, key: Key, tensors: Tensors) -> list[torch.Tensor]:
        """Returns the bytes of an entry, cut like `tensors`."""
        sizes, num_bytes = [tensor.nbytes for tensor in tensors], self._place[key].num_bytes
        if sum(sizes) != num_bytes:
            has = f"expert {key[1]} of layer {key[0]} has {num_bytes} bytes in the host store and {sum(sizes)} bytes on this rank"
            raise TransferError(f"{has}; an expert must have the same tensors on every rank.")
        return list(self._entry(key).split(sizes))

    def _entry(self, key: Key) -> torch.Tensor:
        row, num_bytes = self._place[key]
        return self._bytes[row * self.place_bytes : row * self.place_bytes + num_bytes]

    def _mark(self, key: Key) -> int:
        """Returns a checksum of at most twice `_MARKED_BYTES` bytes, evenly sampled from an entry."""
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
    """Keeps the processor from reordering bytes and stamps, because nothing moves across a release and the next acquire."""
    for _ in range(2):
        with _lock:
            pass


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a flat tensor's memory as a uint8 tensor."""
    return tensor.detach().view(torch.uint8)


class NodeFile:
    """A file that all ranks of a node open.

    When all have opened it, its name is removed, so nothing is left behind even if a process is killed. Until then, the file is
    empty. All ranks know its name before it is created, so that any surviving rank can remove it.
    """

    def __init__(self, name: str) -> None:
        self.path = os.path.join(_directory(), f"foremoe-{name}")
        self.descriptor = -1

    def open(self, *, create: bool = False) -> None:
        """Opens the file. One rank must create it before the other ranks open it."""
        self.descriptor = os.open(self.path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)

    def unlink(self) -> None:
        """Removes the file's name. Any rank may call it, any number of times."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)

    def close(self) -> None:
        """Closes the file and removes its name."""
        self.unlink()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _directory() -> str:
    """Returns a folder for the file, in memory if the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir()


def _head_bytes(num_places: int) -> int:
    return _aligned(num_places * 3 * 8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def reserve_share(file: int, num_places: int, place_bytes: int, share: int, num_shares: int) -> None:
    """Allocates memory for every `num_shares`-th place of a store that will be created, starting at place `share`.

    Memory is allocated on the NUMA node of the processor that requests it. If every rank of a node allocates a share before the
    store is created, the store is spread over the NUMA nodes of all ranks. Copies can then use the memory channels of all these
    NUMA nodes.
    """
    head_bytes, place_bytes = _head_bytes(num_places), _aligned(place_bytes)
    for place in range(share, num_places if place_bytes else 0, num_shares):
        _reserve(file, head_bytes + place * place_bytes, place_bytes)


def _reserve(file: int, begin: int, size: int) -> None:
    """Allocates memory for a part of a file. Otherwise, first access to a map larger than /dev/shm would kill the process."""
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
