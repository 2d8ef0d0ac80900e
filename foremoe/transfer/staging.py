"""`Staging`: copies home experts into separate device memory, for ranks that cannot read the homes directly."""

from __future__ import annotations

from collections.abc import Set
from typing import Any, NamedTuple

import torch

from foremoe.base.errors import InputError
from foremoe.transfer.base import Buffers
from foremoe.transfer.host_store import Key

_ALIGNED_BYTES = 256


class Piece(NamedTuple):
    """Tensor of an expert in its home's address space. It starts `offset` bytes after `base`, the start of the allocation."""

    base: int
    offset: int
    num_bytes: int


class Staging:
    """Experts of one version of the weights, which `put` has copied. Their memory does not change until this version ends.

    The memory comes from cudaMalloc. Other processes can therefore open it regardless of torch's allocator, even if the homes
    move. The next version reuses the memory if it is large enough.

    Args:
        cuda: CuPy's module for CUDA runtime calls.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._size_of: dict[int, int] = {}  # base -> size of the allocation in bytes
        self._pieces: dict[Key, tuple[Piece, ...]] = {}

    def put(self, keys: Set[Key], kept: Set[Key], buffers: Buffers) -> dict[Key, tuple[Piece, ...]]:
        """Returns the locations of experts, and queues copy operations for new ones on the current stream.

        Args:
            keys: Experts to stage.
            kept: Experts of this version that `put` has already copied. All other experts are copied now.
        """
        self._pieces = {key: pieces for key, pieces in self._pieces.items() if key in kept and key in keys}
        homes = {key: buffers.home(*key) for key in sorted(keys - self._pieces.keys())}
        need = sum(_aligned(tensor.nbytes) for tensors in homes.values() for tensor in tensors)
        base, offset = self._room(need) if need else 0, 0
        stream = torch.cuda.current_stream().cuda_stream
        for key, tensors in homes.items():
            pieces = []
            for tensor in tensors:
                require_on_gpu(key, tensor)
                pieces.append(Piece(base, offset, tensor.nbytes))
                if tensor.nbytes:
                    to = self._cuda.memcpyDeviceToDevice
                    self._cuda.memcpyAsync(base + offset, tensor.data_ptr(), tensor.nbytes, to, stream)
                offset += _aligned(tensor.nbytes)
            self._pieces[key] = tuple(pieces)
        return dict(self._pieces)

    def free(self, *, everything: bool = False) -> None:
        """Frees unused allocations. Call it only when no other process has them open."""
        used = set() if everything else {piece.base for pieces in self._pieces.values() for piece in pieces}
        for base in self._size_of.keys() - used:
            del self._size_of[base]
            self._cuda.free(base)
        if everything:
            self._pieces = {}

    def _room(self, num_bytes: int) -> int:
        """Returns an empty allocation that is large enough."""
        used = {piece.base for pieces in self._pieces.values() for piece in pieces}
        for base, size in self._size_of.items():
            if size >= num_bytes and base not in used:
                return base
        base = int(self._cuda.malloc(num_bytes))
        self._size_of[base] = num_bytes
        return base


def require_on_gpu(key: Key, tensor: torch.Tensor) -> None:
    """Raises InputError for an expert that a GPU's copy engines cannot read."""
    if not tensor.is_cuda:
        raise InputError(f"expert {key[1]} of layer {key[0]} lies on {tensor.device}, not on a GPU; use pinned_host.")


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
