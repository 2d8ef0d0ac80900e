"""Measures weight copies over every available transfer backend, alone and while experts compute."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from foremoe.base.errors import first_line
from foremoe.calibrate.points import Point
from foremoe.calibrate.stopwatch import Lap, Stopwatch
from foremoe.distributed.group import Group
from foremoe.machine.model import Model
from foremoe.plan.transfers import Link
from foremoe.transfer.backends import backend_names, resolve_backend
from foremoe.transfer.base import HOST, Copy, Entry, Tensors, TransferBackend

# Letters: G ranks.

_SHARES = (16, 4, 1)  # divisors of an expert's bytes, for the sizes to copy
_AT_ONCE = 4  # number of copies that are started together
_TIMEOUT_S = 120.0
_MOST_LOOPS, _ROUNDS = 200, 4


class Way(NamedTuple):
    """A combination of a transfer backend and a kind of link."""

    backend: str
    kind: str  # kind of its points
    to_G: tuple[int, ...]  # rank to which each rank's experts are copied; between ranks, its own number means no copy


class Blocks:
    """Memory to copy, as `Buffers` of the backends. A layer number stands for a size, and its experts are blocks of that size."""

    def __init__(self, rank: int, model: Model, device: torch.device) -> None:
        make = lambda size: [torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(_AT_ONCE)]  # noqa: E731
        self.sizes = [max(64, model.expert_bytes // share // 64 * 64) for share in _SHARES]
        self._rank, self._home, self._slot = rank, [make(size) for size in self.sizes], [make(size) for size in self.sizes]
        self.num_buffers = len(self.sizes) * _AT_ONCE

    def home(self, layer: int, expert: int) -> Tensors:
        return (self._home[layer][expert % _AT_ONCE],)

    def slot(self, buffer: int) -> Tensors:
        layer, i = divmod(buffer, _AT_ONCE)
        return (self._slot[layer][i],)

    def main_grad(self, layer: int, expert: int) -> Tensors:
        raise NotImplementedError("only weights are copied")

    def slot_grad(self, buffer: int) -> Tensors:
        raise NotImplementedError("only weights are copied")


class Copies:
    """Repeatable copy operations, either from every rank to its next rank or from the host store."""

    def __init__(self, group: Group, model: Model, device: torch.device, way: Way) -> None:
        self.group, self.way, self.by_host = group, way, way.kind == "copy from host"
        self.blocks = Blocks(group.rank, model, device)
        self.backend: TransferBackend = resolve_backend(way.backend)
        try:
            self.backend.open(group.rank, group, self.blocks)
            if self.backend.one_sided:
                homes = [home for home, to in enumerate(way.to_G) if home != to or self.by_host]
                blocks = [(layer, i, home) for layer in range(len(_SHARES)) for home in homes for i in range(_AT_ONCE)]
                entries = [Entry(layer, home * _AT_ONCE + i, home, way.to_G[home]) for layer, i, home in blocks]
                self.backend.publish(sorted(entries), 1)
                self.backend.finish()
        except BaseException:
            self.backend.close()
            raise

    def start(self, layer: int, num: int) -> Any:
        """Starts this rank's end of `num` copies of one size, both to this rank and from it."""
        me = self.group.rank
        from_rank, to_rank = self.way.to_G.index(me), self.way.to_G[me]
        if to_rank == me and not self.by_host:
            return self.backend.start([])
        source = HOST if self.backend.links == {Link.HOST} else from_rank
        copies = []
        for i in range(num):
            # Each expert is in at most one copy at a time, so its number can be the key.
            expert, mine = from_rank * _AT_ONCE + i, me * _AT_ONCE + i
            into = self.blocks.slot(layer * _AT_ONCE + i)
            copies.append(Copy(expert, layer, expert, source, me, None, into))
            if not self.backend.one_sided:
                copies.append(Copy(mine, layer, mine, me, to_rank, self.blocks.home(layer, mine), None))
        return self.backend.start(copies)


def find_ways(group: Group, model: Model, device: torch.device, node_of_rank: Sequence[int]) -> tuple[list[Way], dict[str, str]]:
    """Returns all backends on all available kinds of link, and reasons why other backends cannot be measured. Collective.

    A backend is available if it opens and publishes weights on all ranks.
    """
    ways: list[Way] = []
    unavailable: dict[str, str] = {}
    for name in backend_names():
        mine: list[Way] = []
        reason = ""
        try:
            mine += _ways_of(name, node_of_rank)
            for way in mine:
                Copies(group, model, device, way).backend.close()
            if not mine:
                reason = "it serves links between ranks, and a single rank has none"
        except Exception as error:  # if a library fails, the other backends can still be measured
            reason = first_line(error).rstrip(".") or type(error).__name__
        reasons = [why for why in group.gather(reason) if why]
        if reasons:
            unavailable[name] = reasons[0]
        else:
            ways += mine
    return ways, unavailable


def _ways_of(name: str, node_of_rank: Sequence[int]) -> list[Way]:
    backend = resolve_backend(name)
    inside, across = len(set(node_of_rank)) < len(node_of_rank), len(set(node_of_rank)) > 1
    G, found = len(node_of_rank), []
    if inside and Link.PEER in backend.links:
        found.append(Way(name, "copy", next_rank(node_of_rank, False)))
    if across and Link.RDMA in backend.links:
        found.append(Way(name, "copy across nodes", next_rank(node_of_rank, True)))
    if backend.one_sided and Link.HOST in backend.links:  # two-sided backends have no host store
        found.append(Way(name, "copy from host", tuple((g + 1) % G for g in range(G))))
    return found


def next_rank(node_of_rank: Sequence[int], across: bool) -> tuple[int, ...]:
    """Returns the rank to which each rank sends, in rings inside nodes or, if `across`, in rings of the n-th ranks of all nodes.

    A rank that is alone in its ring sends to itself.
    """
    place_G = [list(node_of_rank[:g]).count(node) for g, node in enumerate(node_of_rank)]
    ring_G = place_G if across else node_of_rank
    rings = {ring: [g for g, mine in enumerate(ring_G) if mine == ring] for ring in ring_G}
    return tuple(rings[ring][(rings[ring].index(g) + 1) % len(rings[ring])] for g, ring in enumerate(ring_G))


def copy_points(copies: Copies, watch: Stopwatch, budget_s: float) -> list[Point]:
    """Measures copies of several sizes, each with one copy at a time and with several copies at once."""
    points, sizes = [], copies.blocks.sizes
    for layer, size in enumerate(sizes):
        for num in (1, _AT_ONCE):

            def run(lap: Lap, layer: int = layer, num: int = num) -> None:
                copies.backend.wait(copies.start(layer, num), _TIMEOUT_S)
                lap()

            ((seconds, spread),) = watch.laps(run, budget_s / (2 * len(sizes)))
            work: dict[str, Any] = {"copies": num, "copy_bytes": num * size}
            points.append(Point(kind=copies.way.kind, backend=copies.way.backend, seconds=seconds, spread=spread, **work))
    return points


def beside_point(
    copies: Copies, watch: Stopwatch, compute: Callable[[], None], alone_s: float, compute_s: float, budget_s: float
) -> Point:
    """Measures the time in seconds that concurrent copies of experts add to compute.

    `alone_s` is the time of the copies without compute, and `compute_s` is the time of the compute. The compute is repeated until
    it takes longer than the copies.
    """
    layer, loops = len(_SHARES) - 1, min(_MOST_LOOPS, int(2.0 * alone_s / compute_s) + 1)

    def run(lap: Lap) -> None:
        for _ in range(loops * _ROUNDS):
            compute()
        lap()
        for _ in range(_ROUNDS):
            handle = copies.start(layer, _AT_ONCE)
            for _ in range(loops):
                compute()
            copies.backend.wait(handle, _TIMEOUT_S)
        lap()

    seconds = watch.repeats(run, budget_s)
    low_s, lost_s, high_s = np.quantile(seconds[:, 1] - seconds[:, 0], (0.25, 0.5, 0.75)).tolist()
    num = _ROUNDS * _AT_ONCE
    return Point(
        kind=f"beside {copies.way.kind}", backend=copies.way.backend, seconds=lost_s,
        spread=(high_s - low_s) / (_ROUNDS * alone_s), copies=num, copy_bytes=num * copies.blocks.sizes[layer],
    )  # fmt: skip
