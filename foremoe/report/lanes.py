"""Data of the timeline, from a simulated stage with all its uses or from copies that copy engines measured."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from foremoe.base.errors import InputError
from foremoe.plan.plan import Plan
from foremoe.plan.replicas import Replicas
from foremoe.report.packing import Packer
from foremoe.report.rows import replica_of_copies, replica_of_returns
from foremoe.simulate.trace import reforwarded_alone

if TYPE_CHECKING:
    from foremoe.transfer.timeline import Timeline

# Letters: U uses (a layer in a pass), G ranks, C copies, A gradients that go home, V events.

MAX_LANE_CELLS = 8_000_000  # uses x ranks; with more, the page would open slowly
MAX_COPIES = 2_000_000
BOUNDARIES = ("start", "window", "dispatched", "ready", "computed", "end")
OUTCOMES = ("done", "failed over", "missing")


def pack_simulation(packer: Packer, plan: Plan, replicas: Replicas, simulation: Any) -> dict[str, Any]:
    """Adds a `Simulation` to `packer`, with times in whole ticks, and returns its description for the page."""
    num_uses = len(simulation.start_U)
    if num_uses * plan.G > MAX_LANE_CELLS:
        return {"left_out": f"{num_uses} uses x {plan.G} ranks are too many lanes for one page; report fewer micro-steps."}
    total_s = float(simulation.end_U.max())
    # 1/4000 of a use is far below a pixel at any useful zoom, and small numbers compress well.
    tick_s = max(float(np.median(simulation.end_U - simulation.start_U)) / 4000.0, total_s / 2**30, 1e-9)
    ticks = lambda seconds: np.round(np.asarray(seconds, np.float64) / tick_s)  # noqa: E731
    at = {name: ticks(getattr(simulation, f"{name}_U")) for name in BOUNDARIES}
    packer.add("use_micro_step_U", simulation.micro_step_U, "int32", differences=True)
    packer.add("use_layer_U", simulation.layer_U, "int32", differences=True)
    packer.add("use_phase_U", simulation.phase_U, "uint8")
    packer.add("use_start_U", at["start"], "int32", differences=True)
    for before, name in pairwise(BOUNDARIES):
        packer.add(f"use_{name}_U", at[name] - at[before], "int32")
    for name in ("window", "wait", "compute"):
        part_UG = ticks(getattr(simulation, f"{name}_UG"))
        packer.add(f"use_{name}_UG", part_UG, "uint16" if part_UG.max(initial=0) < 2**16 else "int32")
    facts = {
        "kind": "simulated", "tick_s": tick_s, "total_s": total_s, "copies": False,
        "backward_ratio": plan.header.cluster.window_backward_ratio, "again_L": reforwarded_alone(plan).tolist(),
    }  # fmt: skip
    num_copies = len(simulation.copy_start_C) + len(simulation.return_start_A)
    if num_copies > MAX_COPIES:
        facts["left_out"] = f"{num_copies} copies are too many for one page, so link lanes are left out."
        return facts
    t = plan.transfers
    start_C, start_U = ticks(simulation.copy_start_C), at["start"]
    packer.add("copy_replica_C", replica_of_copies(plan, replicas), "int32", differences=True)
    packer.add("copy_source_C", t.src_C, "int16")
    packer.add("copy_path_C", t.link_C, "uint8")
    packer.add("copy_use_C", t.need_C, "int32", differences=True)
    packer.add("copy_start_C", start_C - start_U[t.need_C], "int32")
    packer.add("copy_length_C", ticks(simulation.copy_end_C) - start_C, "int32")
    row_A = simulation.return_micro_step_A.astype(np.int64) * plan.L + simulation.return_layer_A
    of_A = replica_of_returns(plan, replicas, row_A, simulation.return_expert_A, simulation.return_src_A)
    order_A = np.argsort(simulation.return_start_A, kind="stable")
    start_A = ticks(simulation.return_start_A)[order_A]
    packer.add("return_replica_A", of_A[order_A], "int32", differences=True)
    packer.add("return_start_A", start_A, "int32", differences=True)
    packer.add("return_length_A", ticks(simulation.return_end_A)[order_A] - start_A, "int32")
    facts["copies"] = True
    return facts


def pack_timelines(packer: Packer, plan: Plan, timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Adds measured timelines to `packer`, with every event on the rank that observed it. Returns a description for the page."""
    ranks = [timeline.rank for timeline in timelines]
    if len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(plan.G)):
        raise InputError(f"timelines are of ranks {sorted(ranks)}; give one timeline per rank of the plan's {plan.G}.")
    events = [(timeline.rank, event) for timeline in timelines for event in timeline.events]
    events.sort(key=lambda pair: (pair[1].start_s, pair[0]))
    backends = sorted({event.backend for _, event in events})
    total_s = max((timeline.wall_s for timeline in timelines), default=0.0)
    total_s = max([total_s, *(event.ready_s for _, event in events), 1e-9])
    tick_s = max(1e-6, total_s / 2**30)
    column = lambda read: np.array([read(rank, event) for rank, event in events])  # noqa: E731
    ticks = lambda read: np.round(column(lambda _, event: read(event)) / tick_s) if events else np.zeros(0)  # noqa: E731
    packer.add("event_rank_V", column(lambda rank, _: rank), "int32")
    packer.add("event_gradient_V", column(lambda _, event: event.kind == "gradient"), "uint8")
    for name in ("micro_step", "layer", "expert", "src_rank"):
        packer.add(f"event_{name}_V", column(lambda _, event, name=name: getattr(event, name)), "int32")
    packer.add("event_backend_V", column(lambda _, event: backends.index(event.backend)), "uint8")
    packer.add("event_outcome_V", column(lambda _, event: OUTCOMES.index(event.outcome)), "uint8")
    packer.add("event_bytes_V", column(lambda _, event: float(event.num_bytes)), "float32")
    packer.add("event_start_V", ticks(lambda event: event.start_s), "int32")
    packer.add("event_length_V", ticks(lambda event: event.ready_s - event.start_s), "int32")
    packer.add("event_exposed_V", ticks(lambda event: event.exposed_s), "int32")
    return {
        "kind": "measured", "tick_s": tick_s, "total_s": total_s, "backends": backends, "ranks": sorted(ranks),
        "totals": [timeline.to_dict() for timeline in sorted(timelines, key=lambda t: t.rank)], "outcomes": OUTCOMES,
    }  # fmt: skip
