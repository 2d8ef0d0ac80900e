"""Points: the measurements of a calibration, each with the amounts of work that its seconds cover."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An operation timed on all ranks at once.

    Attributes:
        kind: "experts" (their compute alone), "layer" (at home; its experts pass tokens through), "planned" (the same with a plan
            that moves nothing), "exchange" (tokens to all ranks of a node), "copy" (experts' weights to another rank of the
            node), "copy from host", or "beside copy" (additional seconds of compute while copies run). Between nodes, exchanges
            and copies end in "across nodes", and so do points timed during such copies.
        seconds: Seconds of the slowest rank, median over repeats; of "beside copy" below 0 if noise exceeds the loss.
        spread: (third - first quartile) / median over the repeats; of "beside copy" relative to the copies alone.
        backward: Whether backward of the compute was timed; if False, forward was.
        pairs: (token, expert) pairs on the busiest rank.
        busy: Busy slots of expert compute on that rank.
        calls: Layers whose expert compute was timed.
        tokens: (token, layer) pairs on a rank, 0 for expert loads without routing.
        attention_flops: FLOPs of the layers' attention, forward, on a rank.
        moved: Pairs received by the busiest rank, permuted there and back.
        exchanges: Number of consecutive messages to all ranks.
        exchange_bytes: Bytes of their busiest direction.
        copies: Number of consecutive copies on the busiest link.
        backend: Transfer backend of the copies; "" for other points.
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
        """Returns all values that differ from their defaults, as plain values."""
        fields = ((f.name, getattr(self, f.name), f.default) for f in dataclasses.fields(self))
        return {name: value for name, value, default in fields if value != default}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """All points of one machine.

    Attributes:
        flops_per_s: FLOP/s of one large matrix product on a rank while all ranks run one.
        memory_bytes: Memory of one rank.
        hardware: Description of the hardware.
        versions: Versions of torch and others, by name.
        unavailable: Transfer backends that were not measured, with the reasons.
    """

    points: tuple[Point, ...]
    flops_per_s: float
    memory_bytes: int
    node_of_rank: tuple[int, ...]
    hardware: str
    versions: dict[str, str]
    unavailable: dict[str, str] = field(default_factory=dict)
