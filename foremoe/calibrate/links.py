"""What links take: exchanges of tokens, and copies of weights over the backends that the engine uses."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from foremoe.calibrate.points import Point
from foremoe.calibrate.stopwatch import Lap, Stopwatch
from foremoe.distributed.group import Group
from foremoe.machine.model import Model
from foremoe.transfer.base import HOST, Copy, Entry, Tensors, TransferBackend
from foremoe.transfer.collective import Collective
from foremoe.transfer.pinned_host import PinnedHost

# Letters: G ranks, H hidden size.

_SHARES = (16, 4, 1)  # parts of an expert's bytes that are copied
_AT_ONCE = 4  # copies one after the other
_TIMEOUT_S = 120.0
_MOST_LOOPS, _ROUNDS = 200, 4
_REPEATS = 2  # exchanges in one lap


class Blocks:
    """Memory to copy: "layers" are sizes, experts `_AT_ONCE` blocks of each on every rank; the `Buffers` of the backends."""

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
    """Copies from every rank to the one `step` further on, or from the host store, ready to be started again and again."""

    def __init__(self, group: Group, model: Model, device: torch.device, *, step: int, on_host: bool) -> None:
        self.group, self.step = group, step
        self.blocks = Blocks(group.rank, model, device)
        self.backend: TransferBackend = PinnedHost() if on_host else Collective()
        self.backend.open(group.rank, group, self.blocks)
        if on_host:
            G, experts = group.size, range(group.size * _AT_ONCE)
            homes = [(layer, e, e // _AT_ONCE) for layer in range(len(_SHARES)) for e in experts]
            self.backend.publish([Entry(layer, e, home, (home + step) % G) for layer, e, home in homes], 1)

    def start(self, layer: int, num: int) -> Any:
        """Starts `num` copies of a size to this rank, and from it."""
        me, G, host = self.group.rank, self.group.size, self.backend.one_sided
        from_rank, to_rank = (me - self.step) % G, (me + self.step) % G
        copies = []
        for i in range(num):
            # An expert is copied once at a time, so that its number serves as key.
            expert, mine = from_rank * _AT_ONCE + i, me * _AT_ONCE + i
            into = self.blocks.slot(layer * _AT_ONCE + i)
            copies.append(Copy(expert, layer, expert, HOST if host else from_rank, me, None, into))
            if not host:
                copies.append(Copy(mine, layer, mine, me, to_rank, self.blocks.home(layer, mine), None))
        return self.backend.start(copies)


def exchange_points(
    group: Group, watch: Stopwatch, node_of_rank: Sequence[int], across: bool, rows: Sequence[int], model: Model,
    dtype: torch.dtype, budget_s: float,
) -> list[Point]:  # fmt: skip
    """Exchanges of some rows from every rank, an equal part to every rank of its node (or of other nodes) and to itself.

    One of the sizes is also sent unevenly: half of what goes elsewhere goes to the first rank that may have it.
    """
    points, kind = [], "exchange across nodes" if across else "exchange"
    for num, uneven in [*((num, False) for num in rows), (rows[-1], True)]:
        sent_GG = np.array([_shares(num, g, node_of_rank, across, uneven) for g in range(group.size)])
        num_sent_G, num_received_G = sent_GG[group.rank].tolist(), sent_GG[:, group.rank].tolist()
        np.fill_diagonal(sent_GG, 0)
        busiest = int(max(sent_GG.sum(axis=0).max(), sent_GG.sum(axis=1).max()))
        sent = torch.zeros(sum(num_sent_G), model.hidden_size, dtype=dtype, device=watch.device)

        def run(lap: Lap, sent: torch.Tensor = sent, to: list[int] = num_sent_G, of: list[int] = num_received_G) -> None:
            for _ in range(_REPEATS):
                # As the runtime does it: into fresh memory.
                group.all_to_all(sent.new_empty(sum(of), sent.shape[1]), sent, of, to)
            lap()

        ((seconds, spread),) = watch.laps(run, budget_s / (len(rows) + 1))
        num_bytes = _REPEATS * busiest * sent.shape[1] * sent.element_size()
        points.append(Point(kind=kind, seconds=seconds, spread=spread, exchanges=_REPEATS, exchange_bytes=num_bytes))
    return points


def _shares(num: int, rank: int, node_of_rank: Sequence[int], across: bool, uneven: bool) -> list[int]:
    """Rows from a rank to every rank."""
    to = [g for g, node in enumerate(node_of_rank) if g == rank or (node != node_of_rank[rank]) == across]
    out = [max(1, num // len(to)) if g in to else 0 for g in range(len(node_of_rank))]
    if uneven and len(to) > 1:  # a rank alone in its node has nobody else there
        first = next(g for g in to if g != rank)
        out[first] += num // 2
    return out


def copy_points(copies: Copies, watch: Stopwatch, kind: str, budget_s: float) -> list[Point]:
    """Copies of several sizes, one and several at once."""
    points, sizes = [], copies.blocks.sizes
    for layer, size in enumerate(sizes):
        for num in (1, _AT_ONCE):

            def run(lap: Lap, layer: int = layer, num: int = num) -> None:
                copies.backend.wait(copies.start(layer, num), _TIMEOUT_S)
                lap()

            ((seconds, spread),) = watch.laps(run, budget_s / (2 * len(sizes)))
            points.append(Point(kind=kind, seconds=seconds, spread=spread, copies=num, copy_bytes=num * size))
    return points


def beside_point(
    copies: Copies, watch: Stopwatch, kind: str, compute: Callable[[], None], alone_s: float, compute_s: float, budget_s: float
) -> Point:
    """Seconds that copies of whole experts (`alone_s`) add to compute (alone: `compute_s`), which is repeated to cover them."""
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
    lost_s = max(0.0, float(np.median(seconds[:, 1] - seconds[:, 0])))
    num = _ROUNDS * _AT_ONCE
    return Point(kind=f"beside {kind}", seconds=lost_s, copies=num, copy_bytes=num * copies.blocks.sizes[layer])
