"""Timeline: what an engine did in one stage, copy by copy, as seen from one rank."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Event(NamedTuple):
    """One copy that reached this rank, or failed to."""

    kind: str  # "weights" or "gradient"
    micro_step: int
    layer: int  # of the plan
    expert: int
    src_rank: int  # -1 for the host store
    backend: str  # class name of the one that delivered
    num_bytes: int
    start_s: float  # when the copy was started, in seconds since `begin`
    ready_s: float  # when the engine knew it had arrived, in seconds since `begin`
    exposed_s: float  # seconds that this rank waited for it; on a GPU the waiting happens on streams and is not seen here
    outcome: str  # "done", "failed over" (arrived over another link than planned), or "missing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One stage of one rank.

    Attributes:
        begin_s: Seconds that `Engine.begin` took.
        wall_s: Seconds from then to the end of `end`.
        events: `Event`, in the order in which they were known to be over.
        fell_back: (micro-step, layer) that ran at home placement.
        retired: Two-sided backends given up.
    """

    rank: int
    begin_s: float
    wall_s: float
    events: tuple[Event, ...] = ()
    fell_back: tuple[tuple[int, int], ...] = ()
    retired: tuple[str, ...] = ()

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank waited for copies."""
        return sum(event.exposed_s for event in self.events)

    @property
    def bytes_by_backend(self) -> dict[str, int]:
        """Bytes that reached this rank, by backend."""
        total: dict[str, int] = {}
        for event in self.events:
            if event.outcome != "missing":
                total[event.backend] = total.get(event.backend, 0) + event.num_bytes
        return total

    def to_dict(self) -> dict[str, Any]:
        """Totals, for metrics and JSON."""
        return {
            "rank": self.rank, "begin_s": self.begin_s, "wall_s": self.wall_s, "exposed_s": self.exposed_s,
            "weight_copies": sum(e.kind == "weights" for e in self.events),
            "gradient_returns": sum(e.kind == "gradient" for e in self.events), "bytes_by_backend": self.bytes_by_backend,
            "failed_over": sum(e.outcome == "failed over" for e in self.events),
            "missing": sum(e.outcome == "missing" for e in self.events), "fell_back": len(self.fell_back),
            "retired": list(self.retired),
        }  # fmt: skip
