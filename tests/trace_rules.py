"""Rules of Chrome's trace event format that viewers rely on, as one function that a test calls on a trace."""

from __future__ import annotations

from collections import defaultdict
from typing import Any


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises AssertionError where an event breaks a rule; returns the slices."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"} and trace["displayTimeUnit"] in ("ms", "ns")
    slices, flows, named, counted = defaultdict(list), defaultdict(dict), defaultdict(set), defaultdict(list)
    for event in trace["traceEvents"]:
        assert {"ph", "ts", "pid", "tid", "name"} <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["ts"] >= 0 and event["name"]
        if event["ph"] == "M":
            named[event["name"]].add((event["pid"], event["tid"]))
        elif event["ph"] == "X":
            assert event["dur"] > 0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "C":
            assert event["args"] and all(isinstance(value, int | float) and value >= 0 for value in event["args"].values())
            counted[event["pid"], event["name"]].append((event["ts"], set(event["args"])))
        else:
            assert event["ph"] in "sf" and event["ph"] not in flows[event["id"]]
            flows[event["id"]][event["ph"]] = event
    assert set(slices) <= named["thread_name"] and {pid for pid, _ in slices} == {pid for pid, _ in named["process_name"]}
    for (pid, _), events in counted.items():
        # A counter has one series and belongs to a group; its events are in order, so the last one at a time counts.
        assert pid in {pid for pid, _ in slices} and [at for at, _ in events] == sorted(at for at, _ in events)
        assert all(series == events[0][1] for _, series in events)
    for track in slices.values():
        # Slices of a track nest: what begins inside another one ends inside it. That is what balances begin and end.
        track.sort(key=lambda e: (e["ts"], -e["dur"]))
        open_until: list[float] = []
        for event in track:
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"] + 1e-6:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-6, event
            open_until.append(end)
    for pair in flows.values():
        assert set(pair) == {"s", "f"} and pair["f"]["bp"] == "e" and pair["s"]["name"] == pair["f"]["name"]
        for event in pair.values():
            assert any(s["ts"] <= event["ts"] <= s["ts"] + s["dur"] for s in slices[event["pid"], event["tid"]]), event
    return [event for track in slices.values() for event in track]
