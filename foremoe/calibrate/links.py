"""Measures links with exchanges of tokens inside nodes and between nodes."""

from collections.abc import Sequence

import numpy as np
import torch

from foremoe.calibrate.points import Point
from foremoe.calibrate.stopwatch import Lap, Stopwatch
from foremoe.distributed.group import Group
from foremoe.machine.model import Model

# Letters: G ranks, H hidden size.

_REPEATS = 2  # number of exchanges in one lap


def exchange_points(
    group: Group, watch: Stopwatch, node_of_rank: Sequence[int], across: bool, rows: Sequence[int], model: Model,
    dtype: torch.dtype, budget_s: float,
) -> list[Point]:  # fmt: skip
    """Measures exchanges in which every rank sends equal parts of `rows` to itself and to ranks of its node or of other nodes.

    One of the sizes is also measured with an uneven exchange. In this exchange, half of the rows for other ranks are sent to the
    first permitted rank.
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
                # Received into fresh memory, as in the runtime.
                group.all_to_all(sent.new_empty(sum(of), sent.shape[1]), sent, of, to)
            lap()

        ((seconds, spread),) = watch.laps(run, budget_s / (len(rows) + 1))
        num_bytes = _REPEATS * busiest * sent.shape[1] * sent.element_size()
        points.append(Point(kind=kind, seconds=seconds, spread=spread, exchanges=_REPEATS, exchange_bytes=num_bytes))
    return points


def _shares(num: int, rank: int, node_of_rank: Sequence[int], across: bool, uneven: bool) -> list[int]:
    """Returns the number of rows from a rank to every rank."""
    to = [g for g, node in enumerate(node_of_rank) if g == rank or (node != node_of_rank[rank]) == across]
    out = [max(1, num // len(to)) if g in to else 0 for g in range(len(node_of_rank))]
    if uneven and len(to) > 1:  # a rank that is alone in its node sends only to itself
        first = next(g for g in to if g != rank)
        out[first] += num // 2
    return out
