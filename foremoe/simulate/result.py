"""`Simulation`: the timeline of one stage of one EP group, with the time of the stage by part."""

import dataclasses
from dataclasses import dataclass

import numpy as np

from foremoe.base.arrays import Array, ArrayValue, array
from foremoe.base.shown import seconds_words, table

# Letters: U uses (a layer in a pass, see Schedule.uses), G ranks, C weight copies, A gradient returns, W links (`LINKS`).

LINKS = ("peer out", "peer in", "rdma out", "rdma in", "host in")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Time of a stage in seconds, divided by what the slowest rank does. The parts add up to the length of the stage.

    Attributes:
        window_s: Time of attention and other work before the experts, on the slowest rank.
        dispatch_s: Time of sending tokens to the experts.
        compute_s: Time of expert compute on the slowest rank.
        combine_s: Time of sending the outputs of experts back.
        transfer_s: Time of waiting for weights, plus the compute time that is lost to copies.
        gradient_s: Time of waiting until replica gradients have left their buffers or, at the end of the stage, have arrived.
        planning_s: Time of exposed planning (online balancing).
        outside_s: Time of work outside the MoE layers.
        bubble_s: Time of waiting for other pipeline ranks.
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
        """Length of the stage in seconds."""
        return sum(getattr(self, name) for name in PARTS)

    def to_dict(self) -> dict[str, float]:
        """Returns the seconds of every part by name."""
        return dataclasses.asdict(self)


PARTS = tuple(part.name for part in dataclasses.fields(Parts))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulation(ArrayValue):
    """The events of one stage of one EP group. Times are in seconds since the beginning of the stage.

    The window of a backward use includes the activation recomputation of its layer, if there is any, and the waits during it.

    Attributes:
        micro_step_U: Micro-step of every use, in order of execution.
        layer_U: Layer of every use.
        phase_U: `Phase` of every use.
        start_U: Time at which the group begins the use.
        window_U: Time at which the slowest rank is ready and dispatch begins.
        dispatched_U: Time at which all tokens have reached their experts.
        ready_U: Time at which replicas are in place on all ranks. Each rank computes as soon as its own replicas are in place.
        computed_U: Time at which the slowest rank has computed its experts.
        end_U: Time at which the use is over on all ranks.
        window_UG: Length of the window in seconds per rank, float32.
        wait_UG: Seconds per rank from `dispatched_U` until its replicas are in place, float32.
        compute_UG: Seconds of expert compute per rank, float32.
        copy_start_C: Time at which every copy of ``plan.transfers`` starts.
        copy_end_C: Time at which every copy of ``plan.transfers`` ends.
        return_micro_step_A: Micro-step of every replica gradient that is returned.
        return_layer_A: Layer of every returned gradient.
        return_expert_A: Expert of every returned gradient.
        return_src_A: Rank that sends every returned gradient.
        return_dst_A: Home rank of every returned gradient.
        return_start_A: Time at which every gradient return starts.
        return_end_A: Time at which every gradient return arrives.
        link_busy_WG: Time in seconds that each of `LINKS` is busy, including exchanges.
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

    def _repr_html_(self) -> str:
        parts_s = {name: part_s for name, part_s in self.parts.to_dict().items() if part_s > 0}
        shown = {name.removesuffix("_s"): f"{seconds_words(x)} ({x / self.total_s:.1%})" for name, x in parts_s.items()}
        busy_s = {name: float(busy_G.max()) for name, busy_G in zip(LINKS, self.link_busy_WG, strict=True)}
        busy = [f"{name} {seconds_words(most_s)}" for name, most_s in busy_s.items() if most_s > 0]
        counts = f"{len(self.micro_step_U)} uses, {len(self.copy_start_C)} copies, {len(self.return_start_A)} gradients returned"
        ends = {"busiest links": ", ".join(busy), "events": counts}
        return table("Simulation", {"stage": seconds_words(self.total_s), **shown, **ends})

    @property
    def total_s(self) -> float:
        """Length of the stage in seconds."""
        return self.parts.total_s
