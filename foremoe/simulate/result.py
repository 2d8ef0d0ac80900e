"""`Simulation`: the timeline of one stage of one EP group, and its time by part."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array

# Letters: U uses (a layer in a pass, see Schedule.uses), G ranks, C weight copies, A gradient returns, W links (`LINKS`).

LINKS = ("peer out", "peer in", "rdma out", "rdma in", "host in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Seconds of a stage by the activity of the slowest rank. The parts add up to the length of the stage.

    Attributes:
        window_s: Work before the experts, mostly attention, on the slowest rank.
        dispatch_s: Sending tokens to the experts.
        compute_s: Expert compute on the slowest rank.
        combine_s: Sending outputs back.
        transfer_s: Waiting for weights, and compute time lost to copies.
        gradient_s: Waiting for replica gradients to leave their buffers, or to arrive at the end.
        planning_s: Exposed planning (online balancing).
        outside_s: Work outside the MoE layers.
        bubble_s: Waiting for other pipeline ranks.
    """

    window_s: float = 0.0
    dispatch_s: float = 0.0
    compute_s: float = 0.0
    combine_s: float = 0.0
    transfer_s: float = 0.0
    gradient_s: float = 0.0
    planning_s: float = 0.0
    outside_s: float = 0.0
    bubble_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the stage."""
        return sum(getattr(self, name) for name in PARTS)

    def to_dict(self) -> dict[str, float]:
        """Returns the seconds of every part by name."""
        return dataclasses.asdict(self)


PARTS = tuple(part.name for part in dataclasses.fields(Parts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation(ArrayValue):
    """Events of one stage of one EP group, in seconds since the beginning of the stage.

    The window of a backward use includes the activation recomputation of its layer, if any, with its waits.

    Attributes:
        micro_step_U: Micro-step of every use, in order of execution.
        layer_U: Layer of every use.
        phase_U: `Phase` of every use.
        start_U: Time at which the group begins the use.
        window_U: Time at which the slowest rank is ready and dispatch begins.
        dispatched_U: Time at which all tokens have reached their experts.
        ready_U: Time at which replicas are in place on all ranks. Each rank computes as soon as its own replicas are.
        computed_U: Time at which the slowest rank's experts are done.
        end_U: Time at which the use is over on all ranks.
        window_UG: Seconds of the window per rank, float32.
        wait_UG: Seconds per rank from `dispatched_U` until its replicas are in place, float32.
        compute_UG: Seconds of expert compute per rank, float32.
        copy_start_C: Start of every copy of ``plan.transfers``.
        copy_end_C: End of every copy of ``plan.transfers``.
        return_micro_step_A: Micro-step of every returned replica gradient.
        return_layer_A: Layer of every returned gradient.
        return_expert_A: Expert of every returned gradient.
        return_src_A: Rank that sends every returned gradient.
        return_dst_A: Home rank of every returned gradient.
        return_start_A: Time at which every return starts.
        return_end_A: Time at which every return arrives.
        link_busy_WG: Seconds that each of `LINKS` is busy, including exchanges.
    """

    micro_step_U: Array = array(np.int32)
    layer_U: Array = array(np.int16)
    phase_U: Array = array(np.uint8)
    start_U: Array = array(np.float64)
    window_U: Array = array(np.float64)
    dispatched_U: Array = array(np.float64)
    ready_U: Array = array(np.float64)
    computed_U: Array = array(np.float64)
    end_U: Array = array(np.float64)
    window_UG: Array = array(np.float32)
    wait_UG: Array = array(np.float32)
    compute_UG: Array = array(np.float32)
    copy_start_C: Array = array(np.float64)
    copy_end_C: Array = array(np.float64)
    return_micro_step_A: Array = array(np.int32)
    return_layer_A: Array = array(np.int16)
    return_expert_A: Array = array(np.int16)
    return_src_A: Array = array(np.int16)
    return_dst_A: Array = array(np.int16)
    return_start_A: Array = array(np.float64)
    return_end_A: Array = array(np.float64)
    link_busy_WG: Array = array(np.float64)
    parts: Parts

    def __repr__(self) -> str:
        uses, copies = len(self.micro_step_U), len(self.copy_start_C)
        return f"Simulation(total_s={self.total_s:.6g}, {uses} uses, {copies} copies, {self.parts!r})"

    @property
    def total_s(self) -> float:
        """Seconds of the stage."""
        return self.parts.total_s

    def to_dict(self) -> dict[str, Any]:
        """Returns the totals for JSON."""
        busy = {name: float(self.link_busy_WG[k].max()) for k, name in enumerate(LINKS)}
        return {"stage_s": self.total_s, **self.parts.to_dict(), "link_busy_s": busy}
