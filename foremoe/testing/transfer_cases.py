"""Cases of the conformance suite for transfer backends. This module does not import pytest or hypothesis."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foremoe.distributed.group import Group
from foremoe.plan.transfers import Link
from foremoe.transfer.base import HOST, Copy, Entry, TransferBackend

# Letters: L layers, E experts.

_KINDS = ("home", "slot", "main_grad", "slot_grad")
# The two highest bytes of a NaN with a payload, which a copy through arithmetic would change.
_NAN = {
    "float64": (0xF1, 0x7F), "float32": (0x81, 0x7F), "bfloat16": (0x81, 0x7F), "float16": (0x01, 0x7D),
    "float8_e4m3fn": (0x7F,), "uint8": (),
}  # fmt: skip
DTYPES = tuple(_NAN)


@dataclass(frozen=True, slots=True)
class Op:
    """One copy, either of weights from their home to a buffer of `rank`, or of the gradient in this buffer to the home."""

    key: int
    layer: int
    expert: int
    rank: int
    buffer: int
    gradient: bool = False


@dataclass(frozen=True, slots=True)
class Round:
    """Batches of copies that all start before the memory is checked. On each rank, every batch has one handle."""

    batches: tuple[tuple[Op, ...], ...]
    new_weights: bool = True  # whether home weights change before the round


@dataclass(frozen=True, slots=True)
class TransferCase:
    """Copies between all ranks of a group, in rounds."""

    num_ranks: int
    home_LE: tuple[tuple[int, ...], ...]  # home rank of every expert
    num_buffers: int  # buffers of every rank
    dtype: str
    sizes: tuple[int, ...]  # number of elements of each tensor of an expert
    rounds: tuple[Round, ...]
    seed: int = 0  # seed of the contents of memory, and of the order in which each rank waits for handles

    def __str__(self) -> str:
        head = f"{self.num_ranks} ranks, experts of {self.dtype} tensors with {self.sizes} elements, seed {self.seed}"
        lines = [head, *(f"layer {layer}: homes on ranks {home_E}" for layer, home_E in enumerate(self.home_LE))]
        for r, step in enumerate(self.rounds):
            lines.append(f"round {r}" + (", after a change of the weights:" if step.new_weights else ":"))
            lines += [f"  handle {b}: {'; '.join(map(self.text, ops)) or 'nothing'}" for b, ops in enumerate(step.batches)]
        return "\n".join(lines)

    def text(self, op: Op) -> str:
        """Returns a description of one copy."""
        home, what = self.home_LE[op.layer][op.expert], f"layer {op.layer} expert {op.expert}"
        if op.gradient:
            return f"key {op.key} gradient of {what}, rank {op.rank} buffer {op.buffer} -> rank {home}"
        return f"key {op.key} {what}, rank {home} -> rank {op.rank} buffer {op.buffer}"

    def ends(self, op: Op) -> tuple[int, int]:
        """Returns the source rank and the destination rank of a copy."""
        home = self.home_LE[op.layer][op.expert]
        return (op.rank, home) if op.gradient else (home, op.rank)


class Memory:
    """`Buffers` of one rank. The gaps between tensors must not be written to. `expected` is the required content of the memory.

    Home weights are in a separate block of memory, which moves with every second version of the weights.
    """

    def __init__(self, case: TransferCase, rank: int, device: str) -> None:
        self.case, self.rank, self.num_buffers, self.version = case, rank, case.num_buffers, 1
        self._device = device
        self._dtype: torch.dtype = getattr(torch, case.dtype)
        self._grad_dtype = torch.float64 if case.dtype == "float64" else torch.float32
        homes = [(x, e) for x, home_E in enumerate(case.home_LE) for e, home in enumerate(home_E) if home == rank]
        slots = [(rank, b) for b in range(case.num_buffers)]
        self._places: dict[tuple[str, int, int], list[slice]] = {}
        end = self._num_home = 0
        for kind in _KINDS:
            size = self.dtype(kind).itemsize
            if kind == "slot":
                end = self._num_home = -(-end // 8) * 8  # homes end here, aligned for any dtype
            for where in homes if kind in ("home", "main_grad") else slots:
                self._places[kind, *where] = places = []
                for num in case.sizes:
                    begin = -(-(end + 5) // size) * size
                    end = begin + num * size
                    places.append(slice(begin, end))
        self.expected = torch.from_numpy(np.random.default_rng([case.seed, rank]).integers(0, 256, end + 5, dtype=np.uint8))
        self._rest = self.allocate(self.expected[self._num_home :])
        self._move_homes()
        for kind in _KINDS:
            self.refill(kind, self.version)

    def allocate(self, contents: torch.Tensor) -> torch.Tensor:
        """Allocates memory on the device and fills it with the given bytes."""
        return contents.to(self._device, copy=True)

    def contents(self) -> torch.Tensor:
        """Returns the current content of all memory."""
        return torch.cat([self._homes.cpu(), self._rest.cpu()])

    def dtype(self, kind: str) -> torch.dtype:
        """Returns the dtype of tensors of a kind, such as "home" or "slot_grad"."""
        return self._grad_dtype if "grad" in kind else self._dtype

    def home(self, layer: int, expert: int) -> list[torch.Tensor]:
        return self._tensors("home", layer, expert)

    def slot(self, buffer: int) -> list[torch.Tensor]:
        return self._tensors("slot", self.rank, buffer)

    def main_grad(self, layer: int, expert: int) -> list[torch.Tensor]:
        return self._tensors("main_grad", layer, expert)

    def slot_grad(self, buffer: int) -> list[torch.Tensor]:
        return self._tensors("slot_grad", self.rank, buffer)

    def fill(self, where: tuple[str, int, int], version: int) -> None:
        """Writes to tensors of this rank as a model would."""
        self.expect(where, where, version)
        for place in self._places[where]:
            self._bytes(place).copy_(self.expected[place].clone(), non_blocking=True)

    def expect(self, where: tuple[str, int, int], source: tuple[str, int, int], version: int) -> None:
        """Requires tensors of this rank to have the contents of `source`, which may be on another rank."""
        for i, place in enumerate(self._places[where]):
            self.expected[place] = self._contents(source, version, i, place.stop - place.start)

    def change_weights(self) -> None:
        """Simulates an optimizer step that moves home weights to other memory. The old memory is overwritten."""
        self.version += 1
        if self.version % 2 == 0:
            self._homes.fill_(0xEE)
            self._move_homes()
        self.refill("home", self.version)

    def refill(self, kind: str, version: int) -> None:
        """Writes to all tensors of a kind."""
        for where in self._places:
            if where[0] == kind:
                self.fill(where, version)

    def wrong(self, where: tuple[str, int, int]) -> str:
        """Returns an error message if the tensors at a location do not have the expected contents, or else an empty string."""
        contents = self.contents()
        for i, place in enumerate(self._places[where]):
            bad = (contents[place] != self.expected[place]).nonzero().flatten().tolist()
            if bad:
                return f"{len(bad)} of {place.stop - place.start} bytes of tensor {i} are wrong, the first is byte {bad[0]}"
        return ""

    def wrong_anywhere(self) -> str:
        """Returns an error message if any memory does not have the expected contents, or else an empty string."""
        bad = (self.contents() != self.expected).nonzero().flatten().tolist()
        if not bad:
            return ""
        for where, places in self._places.items():
            if any(place.start <= bad[0] < place.stop for place in places):
                return f"{len(bad)} bytes are wrong, the first in {where[0]}{where[1:]}"
        return f"{len(bad)} bytes are wrong, the first in a gap between tensors"

    def _move_homes(self) -> None:
        self._homes = self.allocate(self.expected[: self._num_home])

    def _bytes(self, place: slice) -> torch.Tensor:
        block, begin = (self._homes, 0) if place.stop <= self._num_home else (self._rest, self._num_home)
        return block[place.start - begin : place.stop - begin]

    def _tensors(self, *where: Any) -> list[torch.Tensor]:
        return [self._bytes(place).view(self.dtype(where[0])) for place in self._places[where]]

    def _contents(self, source: tuple[str, int, int], version: int, i: int, num_bytes: int) -> torch.Tensor:
        kind, *where = source
        rng = np.random.default_rng([self.case.seed, _KINDS.index(kind), *where, version, i])
        data = rng.integers(0, 256, num_bytes, dtype=np.uint8)
        dtype = self.dtype(kind)
        nan = _NAN[str(dtype).removeprefix("torch.")]
        if nan and num_bytes:
            row = data.reshape(-1, dtype.itemsize)
            row[rng.random(len(row)) < 0.25, -len(nan) :] = nan
        return torch.from_numpy(data)


def copy_of(case: TransferCase, op: Op, memory: Memory, backend: TransferBackend) -> Copy | None:
    """Returns this rank's end of a copy, or None if this rank does not take part in the copy."""
    (src_rank, dst_rank), me = case.ends(op), memory.rank
    src = dst = None
    if me == src_rank and not backend.one_sided:
        src = memory.slot_grad(op.buffer) if op.gradient else memory.home(op.layer, op.expert)
    elif me == dst_rank:
        dst = memory.main_grad(op.layer, op.expert) if op.gradient else memory.slot(op.buffer)
    else:
        return None
    return Copy(op.key, op.layer, op.expert, HOST if backend.links == {Link.HOST} else src_rank, dst_rank, src, dst)


def entries_of(case: TransferCase, ops: Sequence[Op]) -> list[Entry]:
    """Returns the entries that a one-sided backend must publish for these copies."""
    return sorted({Entry(op.layer, op.expert, case.home_LE[op.layer][op.expert], op.rank) for op in ops})


def run_case(group: Group, backend: TransferBackend, case: TransferCase, device: str, timeout_s: float) -> list[str]:
    """Runs a case on one rank and returns the error messages."""
    memory = Memory(case, group.rank, device)
    backend.open(group.rank, group, memory)
    try:
        wrong = list(_rounds(group, backend, case, memory, timeout_s))
        group.barrier()
    finally:
        backend.close()
    late = memory.wrong_anywhere()
    return [f"rank {group.rank}, {text}" for text in [*wrong, *([f"after close: {late}"] if late else [])]]


def _rounds(group: Group, backend: TransferBackend, case: TransferCase, memory: Memory, timeout_s: float) -> Iterator[str]:
    published: set[Entry] = set()
    for r, step in enumerate(case.rounds):
        rng = np.random.default_rng([case.seed, r, group.rank])
        if r:
            # A two-sided source may be reused after this rank has waited, and a one-sided source after all ranks have.
            if backend.one_sided:
                group.barrier()
            if step.new_weights:
                memory.change_weights()
                published.clear()
            memory.refill("slot_grad", r + 1)
        if backend.one_sided:
            entries = set(entries_of(case, [op for ops in step.batches for op in ops]))
            new = entries - published if case.seed % 2 else entries
            published |= entries
            if new:
                backend.publish(sorted(new), memory.version)
        in_flight: list[tuple[int, Any]] = []
        for b, ops in enumerate(step.batches):
            copies = [copy for op in ops if (copy := copy_of(case, op, memory, backend)) is not None]
            in_flight.append((b, backend.start(copies)))
            while in_flight and rng.random() < (0.3 if b + 1 < len(step.batches) else 1.0):
                waited, handle = in_flight.pop(int(rng.integers(len(in_flight))))
                backend.wait(handle, timeout_s)
                for text in _check_arrivals(case, step.batches[waited], memory, r):
                    yield f"round {r}, after wait for handle {waited}: {text}"
        if memory.wrong_anywhere():
            yield f"round {r}, at its end: {memory.wrong_anywhere()}"


def _check_arrivals(case: TransferCase, ops: Sequence[Op], memory: Memory, r: int) -> Iterator[str]:
    for op in ops:
        if case.ends(op)[1] != memory.rank:
            continue
        if op.gradient:
            where = ("main_grad", op.layer, op.expert)
            memory.expect(where, ("slot_grad", op.rank, op.buffer), r + 1)
        else:
            where = ("slot", op.rank, op.buffer)
            memory.expect(where, ("home", op.layer, op.expert), memory.version)
        if text := memory.wrong(where):
            yield f"{case.text(op)}: {text}"
