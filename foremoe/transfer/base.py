"""Interface of transfer backends, which copy bytes between the ranks of one EP group while the model computes."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.plan.transfers import Link

Tensors = Sequence[torch.Tensor]
HOST = -1  # source rank that stands for the host store of the destination's node


class Buffers(Protocol):
    """Locations of the weights and gradients of experts on this rank. Engine and backends access no other model memory.

    An expert consists of one or more flat (1-D, contiguous) tensors. Their number, order and sizes are the same for all experts
    on all ranks. Layers are numbered as in the plan, experts are logical experts, and buffers are numbered as in
    `TransferList.buffer_C`. The memory of a buffer must not change between `TransferBackend.open` and `close`. The memory of an
    expert at home may change between plans.
    """

    num_buffers: int

    def home(self, layer: int, expert: int) -> Tensors:
        """Returns the weights of an expert whose home is this rank."""

    def slot(self, buffer: int) -> Tensors:
        """Returns the weights in a buffer."""

    def main_grad(self, layer: int, expert: int) -> Tensors:
        """Returns the main gradients of an expert whose home is this rank: float32, bfloat16, or float64 for float64 weights."""

    def slot_grad(self, buffer: int) -> Tensors:
        """Returns the gradient of the replica in a buffer. It has the dtype of `main_grad`, or float32 if that is bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Transfer of one expert's weights or gradient from one rank to another.

    Attributes:
        key: Number in [0, 2**31 - 1) that identifies the copy on both ends. It is unique among the copies in flight.
        layer: Layer of the plan.
        expert: Logical expert.
        src_rank: Rank that sends, or `HOST` for the host store of the destination's node.
        dst_rank: Rank that receives. It differs from the source.
        src: Tensors that the source reads, or None on other ranks.
        dst: Tensors that the destination writes, or None on other ranks.
    """

    key: int
    layer: int
    expert: int
    src_rank: int
    dst_rank: int
    src: Tensors | None
    dst: Tensors | None


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """Expert that a rank pulls through a one-sided backend.

    Attributes:
        layer: Layer of the plan.
        expert: Logical expert.
        home_rank: Rank where the expert is at home.
        dst_rank: Rank that will pull the expert.
        need: Position of the first use on `dst_rank` that needs the expert.
    """

    layer: int
    expert: int
    home_rank: int
    dst_rank: int
    need: int = 0


class TransferBackend(abc.ABC):
    """Copies bytes for the engine. An instance is only a configuration until it is opened with `open`.

    Every backend must keep these laws:

    * `start` does not wait for another rank.
    * Both ends start the same keys in the same order.
    * After `wait`, work on the current stream sees that ``dst`` equals ``src`` bit for bit, and ``src`` may be reused.
    * Bytes are copied unchanged, without casts or sums.
    * Several handles may be in flight at once, and they may be awaited in any order.
    * The `TransferError` of a wait that timed out names the ranks that are late, in its text and in ``ranks``.

    Attributes:
        links: Links that this backend serves.
        one_sided: True if the destination pulls without the source's help. The engine then calls `start` only on the destination,
            with ``src=None``, and only for home weights, never for gradients. If False, both ends call `start`, each with its own
            tensors.
        requires: Names of modules that must be importable.
    """

    links: ClassVar[frozenset[Link]]
    one_sided: ClassVar[bool]
    requires: ClassVar[tuple[str, ...]] = ()
    _group: Group | None = None  # set by our own backends between `open` and `close`

    def __init_subclass__(cls) -> None:
        lacking = [name for name in ("links", "one_sided") if not hasattr(cls, name)]
        if lacking and abc.ABC not in cls.__bases__:
            cure = "set links = frozenset({Link.PEER, ...}), which it serves, and one_sided = True or False, in the class"
            raise InputError(f"transfer backend {cls.__name__} lacks {' and '.join(lacking)}; {cure}.")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abc.abstractmethod
    def open(self, rank: int, group: Group, buffers: Buffers) -> None:
        """Prepares the backend on this rank. All ranks of the group call it, so they may communicate here."""

    def publish(self, entries: Sequence[Entry], version: int) -> None:  # noqa: B027 (nothing to do is a good default)
        """Makes home weights readable for one-sided pulls.

        All ranks call it with the same arguments before the first `start` of a plan. Later pulls must see the weights of this
        version or raise `StaleWeights`. If publishing copies weights, these copies may be in flight until `finish`, and pulls
        wait for them. Home ranks and addresses may have changed since the previous call, so every call must look them up again.

        Args:
            entries: Experts that any rank will pull through this backend in the plan, without duplicates and sorted by the use
                that needs them first. Experts that were published before with the same version stay readable.
            version: Version of the weights, counted from 1.
        """

    def advance(self, position: int) -> None:  # noqa: B027 (nothing to do is a good default)
        """Finishes the part of this rank's background work that the next use, at `position`, depends on.

        The engine calls it before every use of a plan, even if no copy starts. It never raises.
        """

    def finish(self) -> None:  # noqa: B027 (nothing to do is a good default)
        """Waits until the work that `publish` started no longer reads home weights. All ranks call it when a plan ends.

        Raises:
            TransferError: Some of the published weights could not be made readable.
        """

    @abc.abstractmethod
    def start(self, copies: Sequence[Copy]) -> Any:
        """Starts copies in which this rank takes part and returns a handle for all of them.

        Raises:
            TransferError: None of these copies will arrive. An error of any other type means the same.
        """

    @abc.abstractmethod
    def wait(self, handle: Any, timeout_s: float) -> None:
        """Waits until the copies of a handle are done.

        Raises:
            TransferError: A copy failed or took longer than `timeout_s`. The destination then has undefined content, but the
                copies of this handle no longer write to it. The source may be overwritten. If the source was not read completely,
                `wait` fails on the destination as well.
            StaleWeights: A one-sided source has weights of another version.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases all resources that `open` acquired. It may be called twice and after an error."""

    def _require_closed(self) -> None:
        if self._group is not None:
            raise InputError(f"this {type(self).__name__} is already open; close it first, and give every rank its own instance.")

    def _opened(self) -> Group:
        if self._group is None:
            raise InputError(f"this {type(self).__name__} is not open; call open(rank, group, buffers) first.")
        return self._group
