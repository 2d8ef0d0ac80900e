"""What every transfer backend is: byte copies between the ranks of one EP group, started early and waited for late."""

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from foremoe.base.errors import InputError
from foremoe.distributed.group import Group
from foremoe.plan.transfers import Link

Tensors = Sequence[torch.Tensor]
HOST = -1  # as a source rank: the host store of the destination's node


class Buffers(Protocol):
    """Tells where an expert's weights and gradients are on this rank; the engine and the backends use no other model memory.

    An expert is one or several flat (1-D, contiguous) tensors, in the same number, order and size everywhere. Layers are indices
    of the plan, experts logical, buffers as in `TransferList.buffer_C`. What a buffer has stays the same memory from
    `TransferBackend.open` to `close`; what an expert has at its home may lie elsewhere at the next plan.
    """

    num_buffers: int

    def home(self, layer: int, expert: int) -> Tensors:
        """Returns the weights of an expert whose home is this rank."""

    def slot(self, buffer: int) -> Tensors:
        """Returns the weights in a buffer."""

    def main_grad(self, layer: int, expert: int) -> Tensors:
        """Returns the main gradients of an expert whose home is this rank: float32, float64 for float64 weights, or bfloat16."""

    def slot_grad(self, buffer: int) -> Tensors:
        """Returns the gradient of the replica in a buffer, in the dtype of `main_grad`; float32 if that is bfloat16."""


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A transfer of one expert's weights (or gradient) from one rank to another.

    Attributes:
        key: Equal on both ends and unique among the copies in flight; from 0, below 2**31 - 1.
        layer: Layer of the plan.
        expert: Logical expert that is copied.
        src_rank: Rank it comes from; `HOST` for the store of the destination's node.
        dst_rank: Rank it goes to; never the source.
        src: The tensors to read, on the source; None elsewhere.
        dst: The tensors to write, on the destination; None elsewhere.
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
    """One expert that one rank reads through a one-sided backend.

    Attributes:
        layer: Layer of the plan.
        expert: Logical expert.
        home_rank: The rank that owns it.
        dst_rank: The rank that will pull it.
        need: Position of the first use that needs it there.
    """

    layer: int
    expert: int
    home_rank: int
    dst_rank: int
    need: int = 0


class TransferBackend(abc.ABC):
    """Moves bytes for the engine. Instances are configuration until `open`.

    Law: `start` does not block on another rank; both ends start the same keys in the same order; after `wait`, work on the
    current stream sees ``dst == src`` bit for bit and ``src`` may be reused. Bytes only: never a cast, never a sum. Several
    handles may be in flight at once and may be waited for in any order.

    Attributes:
        links: Links that this backend serves.
        one_sided: Whether the destination pulls alone; `start` is then called there only, with ``src=None``. It
            reads home weights, never gradients. Two-sided: both ends call `start`, each with its own tensors.
        requires: Modules that must be importable.
    """

    links: ClassVar[frozenset[Link]]
    one_sided: ClassVar[bool]
    requires: ClassVar[tuple[str, ...]] = ()
    _group: Group | None = None  # set by our own backends between `open` and `close`

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abc.abstractmethod
    def open(self, rank: int, group: Group, buffers: Buffers) -> None:
        """Gets ready on this rank; called on all ranks of the group, which may talk to each other in it."""

    def publish(self, entries: Sequence[Entry], version: int) -> None:  # noqa: B027 (nothing to do is a good default)
        """Makes home weights readable for one-sided pulls. Called on all ranks, with the same arguments, before the first
        `start` of a plan; pulls after it must see these weights, of this version, or raise `StaleWeights`. What has to be copied
        for it may be under way until `finish`; pulls wait for it.

        Homes may be other ranks and lie at other addresses than at the call before: look both up at every call.

        Args:
            entries: What the plan reads through this backend, on all ranks; in the order of need, no duplicates. What was
                published before with the same version stays readable.
            version: Counts changes of the weights, from 1.
        """

    def advance(self, position: int) -> None:  # noqa: B027 (nothing to do is a good default)
        """The use at `position` is this rank's next one; work in the background that it needs of this rank is done on return.
        Called before every use of a plan, also where no copy starts; never raises."""

    def finish(self) -> None:  # noqa: B027 (nothing to do is a good default)
        """Returns when nothing reads home weights for `publish` any more. Called on all ranks, when a plan is over.

        Raises:
            TransferError: Not everything that was published could be made readable.
        """

    @abc.abstractmethod
    def start(self, copies: Sequence[Copy]) -> Any:
        """Begins copies in which this rank takes part and returns a handle for all of them.

        Raises:
            TransferError: None of these copies will arrive. Any error of a library means the same.
        """

    @abc.abstractmethod
    def wait(self, handle: Any, timeout_s: float) -> None:
        """Returns when the copies of a handle are done.

        Raises:
            TransferError: It failed or took longer than `timeout_s`. Nothing is known of the destination's contents, and nothing
                of this handle is written to it any more. A source may be written then: what was not read of it by now makes the
                destination's `wait` fail, too.
            StaleWeights: A one-sided source has weights of another version.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives everything back that `open` took; safe to call twice and after an error."""

    def _require_closed(self) -> None:
        if self._group is not None:
            raise InputError(f"this {type(self).__name__} is open already; close it first, and give every rank one of its own.")

    def _opened(self) -> Group:
        if self._group is None:
            raise InputError(f"this {type(self).__name__} is not open; call open(rank, group, buffers) first.")
        return self._group
