"""Points: what a calibration measured, one timed thing each, and the amounts of work that its seconds stand for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

KINDS = (
    "experts",  # expert compute alone
    "layer",  # a layer whose experts pass tokens through, at home
    "planned",  # the same by a plan that moves nothing
    "exchange",  # tokens to all ranks of a node
    "exchange across nodes",  # tokens to all ranks of other nodes
    "copy",  # experts' weights to another rank of the node
    "copy across nodes",
    "copy from host",
    "beside copy",  # what compute takes longer while such copies run
    "beside copy across nodes",
    "beside copy from host",
)
"""What is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One thing that was timed on all ranks at once.

    Attributes:
        kind: one of `KINDS`.
        seconds: of the slowest rank, median over repeats.
        spread: (third - first quartile) / median over the repeats.
        backward: backward of the compute, else forward.
        pairs, busy: (token, expert) pairs and busy slots of expert compute on the rank with most.
        layers: layers run.   tokens: (token, layer) pairs on a rank, 0 for expert loads that no routing made.
        attention_flops: of the layers, forward, on a rank.
        moved: pairs received by the rank with most, permuted there and back.
        exchanges, exchange_bytes: messages to all ranks one after the other, and bytes of their busiest direction.
        copies, copy_bytes: copies one after the other on the busiest link, and their bytes.
    """

    kind: str
    seconds: float
    spread: float = 0.0
    backward: bool = False
    pairs: float = 0.0
    busy: float = 0.0
    layers: float = 0.0
    tokens: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0
    exchanges: float = 0.0
    exchange_bytes: float = 0.0
    copies: float = 0.0
    copy_bytes: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """What is not at its default, as plain values."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return {name: value for name, value, default in fields if value != default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All points of one machine.

    Attributes:
        points: `Point`.
        flops_per_s: what one large matrix product reaches on a rank while all ranks run one.
        memory_bytes: of one rank.   node_of_rank: node of every rank.
        hardware: what it ran on, in words.   versions: of torch and others, by name.
    """

    points: tuple[Point, ...]
    flops_per_s: float
    memory_bytes: int
    node_of_rank: tuple[int, ...]
    hardware: str
    versions: dict[str, str]
