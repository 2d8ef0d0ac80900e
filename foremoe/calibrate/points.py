"""Points, which are the measurements of a calibration. Each point states the amount of work that was timed."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An operation that was timed on all ranks at once.

    Attributes:
        kind: The operation that was timed. If it was an exchange or a copy between nodes, or compute during such a copy, the kind
            ends in "across nodes".

            * "experts": expert compute alone
            * "layer": whole layers at home, whose experts return their input
            * "planned": the same layers with a plan that copies nothing
            * "exchange": tokens to all ranks of a node
            * "copy": expert weights to another rank of the node
            * "copy from host": expert weights from the host store
            * "beside copy": seconds that concurrent copies add to compute
        seconds: Time of the slowest rank in seconds, as the median over repeats. The time of "beside copy" is negative if noise
            exceeds the slowdown.
        spread: (third - first quartile) / median over the repeats. For "beside copy", the divisor is the time of the copies
            alone.
        backward: True if the backward pass of the compute was timed, or False if the forward pass was timed.
        pairs: Number of (token, expert) pairs on the busiest rank.
        busy: Number of busy slots on that rank.
        calls: Number of layers whose expert compute was timed.
        layers: Number of whole layers that were timed.
        tokens: Number of tokens on a rank times the number of layers, or 0 for expert loads without routing.
        attention_flops: FLOPs of attention in all layers on a rank, for the forward pass.
        moved: Number of pairs that the busiest rank receives and permutes, both to its experts and back.
        exchanges: Number of consecutive messages to all ranks.
        exchange_bytes: Bytes of these messages in the busiest direction.
        copies: Number of consecutive copies on the busiest link.
        copy_bytes: Bytes of these copies.
        backend: Transfer backend of the copies, or "" for points without copies.
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
    """All measurements of a calibration, with a description of the machine.

    Attributes:
        points: All points.
        flops_per_s: FLOP/s of a large matrix product on one rank, while all ranks run such a product.
        memory_bytes: Memory of one rank in bytes.
        node_of_rank: Node of each rank.
        hardware: Description of the hardware.
        versions: Versions of torch and other software, by name.
        unavailable: Names of the transfer backends that were not measured, with the reasons.
    """

    points: tuple[Point, ...]
    flops_per_s: float
    memory_bytes: int
    node_of_rank: tuple[int, ...]
    hardware: str
    versions: dict[str, str]
    unavailable: dict[str, str] = field(default_factory=dict)
