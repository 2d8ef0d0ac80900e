"""Points: what a calibration measured, one timed thing each, and the amounts of work that its seconds stand for."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An operation that was timed on all ranks at once.

    Attributes:
        kind: "experts" (their compute alone), "layer" (at home; its experts pass tokens through), "planned" (the same by a plan
            that moves nothing), "exchange" (tokens to all ranks of a node), "copy" (experts' weights to another rank of the
            node), "copy from host", or "beside copy" (what compute takes longer while copies run). Between nodes exchanges and
            copies end in "across nodes"; what is timed beside copies ends as they do.
        seconds: Seconds of the slowest rank, median over repeats; of "beside copy" below 0 where noise exceeds the loss.
        spread: (third - first quartile) / median over the repeats; of "beside copy" relative to the copies alone.
        backward: Whether backward of the compute was timed, or forward.
        pairs: (token, expert) pairs on the rank with most.
        busy: Busy slots of expert compute on that rank.
        calls: Layers whose expert compute was timed.
        tokens: (token, layer) pairs on a rank, 0 for expert loads that no routing made.
        attention_flops: FLOPs of the layers' attention, forward, on a rank.
        moved: Pairs received by the rank with most, permuted there and back.
        exchanges: Messages to all ranks one after the other.
        exchange_bytes: Bytes of their busiest direction.
        copies: Copies one after the other on the busiest link.
        backend: Transfer backend that made them; "" for what is not a copy.
    """

    kind: str
    seconds: float
    spread: float = 0.0
    backward: bool = False
    pairs: float = 0.0
    busy: float = 0.0
    calls: float = 0.0
    layers: float = 0.0
    tokens: float = 0.0
    attention_flops: float = 0.0
    moved: float = 0.0
    exchanges: float = 0.0
    exchange_bytes: float = 0.0
    copies: float = 0.0
    copy_bytes: float = 0.0
    backend: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Returns what is not at its default, as plain values."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return {name: value for name, value, default in fields if value != default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All points of one machine.

    Attributes:
        flops_per_s: What one large matrix product reaches on a rank while all ranks run one.
        memory_bytes: Memory of one rank.
        hardware: What it ran on, in words.
        versions: Versions of torch and others, by name.
        unavailable: Transfer backends that were not measured, and the reason of each.
    """

    points: tuple[Point, ...]
    flops_per_s: float
    memory_bytes: int
    node_of_rank: tuple[int, ...]
    hardware: str
    versions: dict[str, str]
    unavailable: dict[str, str] = field(default_factory=dict)
