"""`Timeline`: when the copies of an engine ran in one stage, as seen from one rank."""

import logging
import time
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from foremoe.base.trace_events import TraceEvents, levels

_logger = logging.getLogger(__name__)


class Event(NamedTuple):
    """A copy that reached this rank or failed to reach it."""

    kind: str  # "weights" or "gradient"
    micro_step: int
    layer: int  # layer of the plan
    expert: int
    src_rank: int  # -1 for the host store
    backend: str  # class name of the backend that delivered the copy
    num_bytes: int
    start_s: float  # start of the copy in seconds since `begin`
    ready_s: float  # time when the engine knew that the copy had arrived, in seconds since `begin`
    exposed_s: float  # seconds that this rank's host, or on a GPU its current stream, waited for the copy
    outcome: str  # "done", "failed over" (arrived over another link than planned), or "missing"


class Wait:
    """Time that this rank's host, or on a GPU its current stream, waits between the start and the end of a ``with`` block."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> Self:
        self._begin = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self._end = self._now()

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def seconds(self) -> float:
        """Duration in seconds. On a GPU, the host waits until the stream has reached the end of the block."""
        if self._device.type != "cuda":
            return self._end - self._begin
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) / 1e3


class Log:
    """Log of events. The durations of waits are read only at the end."""

    def __init__(self) -> None:
        self._lines: list[tuple[Event, list[Wait]]] = []

    def add(self, event: Event, waits: list[Wait]) -> None:
        """Adds an event, whose `exposed_s` is the sum of `waits`."""
        self._lines.append((event, waits))

    def events(self) -> list[Event]:
        """Returns all events, in the order of their addition."""
        return [event._replace(exposed_s=sum(wait.seconds for wait in waits)) for event, waits in self._lines]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Timeline of one stage on one rank.

    Attributes:
        begin_s: Duration of `Engine.begin` in seconds.
        wall_s: Seconds from the end of `Engine.begin` to the end of `Engine.end`.
        events: All events, ordered by when the engine learned that copies had arrived or failed.
        fell_back: Rows (micro-step, layer) that ran at home.
        retired: Two-sided backends that the ranks have retired in this stage or in an earlier one.
    """

    rank: int
    begin_s: float
    wall_s: float
    events: tuple[Event, ...] = ()
    fell_back: tuple[tuple[int, int], ...] = ()
    retired: tuple[str, ...] = ()

    def logged(self) -> Self:
        """Logs which copies of this rank and, on rank 0, which rows of all ranks deviated from the plan. Returns itself."""
        told = self.to_dict()
        if told["failed_over"] or told["missing"]:
            _logger.warning(
                "rank %d: of %d weight copies, %d used another backend than planned and %d did not arrive.",
                self.rank, told["weight_copies"], told["failed_over"], told["missing"],
            )  # fmt: skip
        if self.fell_back and self.rank == 0:
            m, layer = self.fell_back[0]
            _logger.warning(
                "%d rows ran at home placement because a replica was missing, the first in micro-step %d, layer %d.",
                len(self.fell_back), m, layer,
            )  # fmt: skip
        return self

    @property
    def exposed_s(self) -> float:
        """Seconds that this rank waited for copies."""
        return sum(event.exposed_s for event in self.events)

    @property
    def bytes_by_backend(self) -> dict[str, int]:
        """Number of bytes that reached this rank, by backend."""
        total: dict[str, int] = {}
        for event in self.events:
            if event.outcome != "missing":
                total[event.backend] = total.get(event.backend, 0) + event.num_bytes
        return total

    def to_dict(self) -> dict[str, Any]:
        """Returns totals in a form that suits metrics and JSON."""
        return {
            "rank": self.rank, "begin_s": self.begin_s, "wall_s": self.wall_s, "exposed_s": self.exposed_s,
            "weight_copies": sum(e.kind == "weights" for e in self.events),
            "gradient_returns": sum(e.kind == "gradient" for e in self.events), "bytes_by_backend": self.bytes_by_backend,
            "failed_over": sum(e.outcome == "failed over" for e in self.events),
            "missing": sum(e.outcome == "missing" for e in self.events), "fell_back": len(self.fell_back),
            "retired": list(self.retired),
        }  # fmt: skip

    def to_trace(self, begin_s: float = 0.0) -> TraceEvents:
        """Returns a trace for Perfetto. This rank is one group, with tracks for each backend's copies and a track for stalls.

        The events of several ranks can be added to one trace, and a trace can be loaded next to that of a profiler.

        Args:
            begin_s: Start of the stage on the clock of the profiler's trace, in seconds.
        """
        out = TraceEvents()
        out.process(self.rank, f"foremoe, rank {self.rank}")
        arrived = [event for event in self.events if event.outcome != "missing"]
        stalls = [event for event in self.events if event.exposed_s > 0]
        tracks = {f"{e.kind} by {e.backend}": [x for x in arrived if (x.kind, x.backend) == (e.kind, e.backend)] for e in arrived}
        tid = self._track(out, 0, "stalls", [(e.ready_s - e.exposed_s, e.ready_s, e) for e in stalls], begin_s)
        for title, events in sorted(tracks.items()):
            tid = self._track(out, tid, title, [(e.start_s, e.ready_s, e) for e in events], begin_s)
        return out

    def _track(self, out: TraceEvents, tid: int, title: str, spans: list[tuple[float, float, Event]], begin_s: float) -> int:
        """Puts spans that overlap on different tracks. Returns the number of the next free track."""
        spans = sorted((max(start_s, 0.0), end_s, event) for start_s, end_s, event in spans)
        level_X = levels([(start_s, end_s) for start_s, end_s, _ in spans])
        count = max(level_X, default=0) + 1
        for level in range(count):
            out.track(self.rank, tid + level, title)
        for level, (start_s, end_s, event) in zip(level_X, spans, strict=True):
            source = "host" if event.src_rank < 0 else f"rank {event.src_rank}"
            what = "expert" if event.kind == "weights" else "gradient of expert"
            name = f"{what} {event.expert} from {source}, micro-step {event.micro_step}, layer {event.layer}"
            out.slice((self.rank, tid + level), name, begin_s + start_s, begin_s + end_s, event._asdict())
        return tid + count
