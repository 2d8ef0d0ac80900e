"""The pages that the demo leaves: a report of its last update, and a trace of its copies."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from examples.grpo.planning import StagePlan
from foremoe.base.trace_events import TraceEvents
from foremoe.distributed.group import Group
from foremoe.report import write_report
from foremoe.transfer.timeline import Event, Timeline

REPORT, TRACE = "report.html", "trace.json"


def write_pages(folder: Path, group: Group, planned: StagePlan, timeline: Timeline) -> None:
    """Writes both on rank 0, with what the engines of all ranks measured; collective."""
    fields = {field.name: getattr(timeline, field.name) for field in dataclasses.fields(timeline)}
    by_rank = group.gather(fields | {"events": [tuple(event) for event in timeline.events]})
    if group.rank:
        return
    timelines = [
        Timeline(
            **of | {"events": tuple(Event(*event) for event in of["events"]), "fell_back": tuple(map(tuple, of["fell_back"]))}
        )
        for of in by_rank
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_report(
        folder / REPORT, planned.problem, planned.plan, timelines=timelines,
        source="the demo's last update, which ran on this machine",
    )  # fmt: skip
    trace = TraceEvents()
    for one in timelines:
        trace.events += one.to_trace().events
    trace.save(folder / TRACE)
