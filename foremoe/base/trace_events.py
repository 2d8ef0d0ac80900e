"""Writer of Chrome's trace event format, which Perfetto can read and training profilers also write."""

import gzip
import heapq
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from foremoe.base.errors import InputError
from foremoe.base.files import write_file

# Viewers keep a whole trace in memory, and cannot open traces that are much larger than this.
MAX_EVENTS = 2_000_000


class TraceEvents:
    """Events of one trace. Times are given in seconds and written in microseconds, rounded to nanoseconds.

    Slices of one track must be nested or follow each other. Put slices that overlap on several tracks (see `levels`).
    """

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._flows = 0

    def process(self, pid: int, name: str) -> None:
        """Names a group of tracks. Viewers show groups in the order of `pid`."""
        self._add(ph="M", pid=pid, tid=0, ts=0, name="process_name", args={"name": name})
        self._add(ph="M", pid=pid, tid=0, ts=0, name="process_sort_index", args={"sort_index": pid})

    def track(self, pid: int, tid: int, name: str) -> None:
        """Names a track of a group. Viewers show tracks in the order of `tid`."""
        self._add(ph="M", pid=pid, tid=tid, ts=0, name="thread_name", args={"name": name})
        self._add(ph="M", pid=pid, tid=tid, ts=0, name="thread_sort_index", args={"sort_index": tid})

    def slice(self, at: tuple[int, int], name: str, start_s: float, end_s: float, args: Mapping[str, Any] | None = None) -> None:
        """Adds a slice to the track `at`, given as (group, track). Skips slices that are shorter than a nanosecond."""
        start, end = _microseconds(start_s), _microseconds(end_s)
        if end <= start:
            return
        event = {"ph": "X", "pid": at[0], "tid": at[1], "ts": start, "dur": round(end - start, 3), "name": name, "cat": "foremoe"}
        self._add(**event, **({} if args is None else {"args": dict(args)}))

    def flow(self, name: str, begin: tuple[tuple[int, int], float], end: tuple[tuple[int, int], float]) -> None:
        """Adds an arrow between the slices of two tracks at two times in seconds."""
        self._flows += 1
        for ph, ((pid, tid), at_s) in (("s", begin), ("f", end)):
            bound = {"bp": "e"} if ph == "f" else {}
            ts = _microseconds(at_s)
            self._add(ph=ph, pid=pid, tid=tid, ts=ts, name=name, cat="foremoe", id=self._flows, **bound)

    def counter(self, pid: int, name: str, at_s: float, unit: str, value: float) -> None:
        """Sets a counter of a group at a time in seconds. The counter keeps this value until the next event with its name."""
        self._add(ph="C", pid=pid, tid=0, ts=_microseconds(at_s), name=name, cat="foremoe", args={unit: value})

    def to_dict(self) -> dict[str, Any]:
        """Returns the trace as JSON values."""
        return {"traceEvents": self.events, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON, compressed if the name ends in ``.gz``. The same events give the same bytes.

        Raises:
            InputError: The file cannot be written.
        """
        text = json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False).encode()
        write_file(path, gzip.compress(text, 6, mtime=0) if str(path).lower().endswith(".gz") else text)

    def _add(self, **event: Any) -> None:
        if len(self.events) >= MAX_EVENTS:
            raise InputError(f"viewers cannot open a trace of more than {MAX_EVENTS:,} events; give fewer micro-steps or layers.")
        self.events.append(event)


def levels(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the first free level for every span (start, end), so that spans on the same level do not overlap.

    Spans must be sorted by start.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    out, count = [], 0
    for start, end in spans:
        while busy and _microseconds(busy[0][0]) <= _microseconds(start):
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            heapq.heappush(free, count)
            count += 1
        level = heapq.heappop(free)
        heapq.heappush(busy, (end, level))
        out.append(level)
    return out


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)
