"""What the simulator's clockwork reads and writes: stage, copies, gradient returns, clocks, and the record of what happened."""

from __future__ import annotations

from typing import NamedTuple

from foremoe.base.arrays import Array

# Letters: U uses, M micro-steps, N rows, G ranks, Y NICs, W links (`LINKS`), C copies, A gradient returns, R redundant
# slots, X exchanges.


class Stage(NamedTuple):
    """What is known before the stage runs; times in seconds.

    Attributes:
        row_U: Row of every use.
        micro_step_U: Micro-step of every use.
        phase_U: `Phase` of every use.
        again_U: Whether this backward runs the layer's forward first.
        window_MG: Attention of one forward.
        compute_NG: Experts in one forward.
        peer_N: How long one exchange keeps the peer links busy.
        rdma_N: How long one exchange keeps the RDMA links busy.
        kept_NG: Bytes of activations.
        keeps: Whether activations are kept until backward.
        slot_layer_N: Layer whose gradient buffers a row uses; 0 where all layers share them.
        node_G: Node of every rank.
        nic_G: NIC of every rank.
        latency_s: Latency of an exchange.
        backward_ratio: Backward over forward, of experts.
        window_ratio: Backward over forward, of the window.
        contention: Share of a copy's time that its ranks lose.
        copy_s: Seconds of one weight copy, by `Link`.
        gradient_s: Seconds of one gradient, by `Link`.
        plan_s: Exposed planning per forward of a layer.
        shares_links: Whether copies wait for exchanges.
    """

    row_U: Array
    micro_step_U: Array
    phase_U: Array
    again_U: Array
    window_MG: Array
    compute_NG: Array
    peer_N: Array
    rdma_N: Array
    kept_NG: Array
    keeps: bool
    slot_layer_N: Array
    node_G: Array
    nic_G: Array
    latency_s: float
    backward_ratio: float
    window_ratio: float
    contention: float
    copy_s: Array
    gradient_s: Array
    plan_s: float
    shares_links: bool


class Copies(NamedTuple):
    """Weight copies, columns in the order of `Plan.transfers`.

    Attributes:
        src_C: Source rank, -1 for the host store.
        dst_C: Destination rank.
        link_C: `Link`.
        parent_C: Copy that a relay passes on, or -1.
        late_C: Whether it is known only in the use that needs it.
        ahead_C: Copies by the use at whose begin they may start.
        ahead_U: Where the copies of each use begin in `ahead_C`.
        need_C: Copies by the use that needs them.
        need_U: Where the copies of each use begin in `need_C`.
        start_C: Written: start, on the link's clock.
        end_C: Written: end, on the link's clock.
    """

    src_C: Array
    dst_C: Array
    link_C: Array
    parent_C: Array
    late_C: Array
    ahead_C: Array
    ahead_U: Array
    need_C: Array
    need_U: Array
    start_C: Array
    end_C: Array


class Returns(NamedTuple):
    """Replica gradients by row: `first_N[n]` to `first_N[n + 1]`; start and end are written, on the link's clock."""

    first_N: Array
    src_A: Array
    dst_A: Array
    slot_A: Array
    start_A: Array
    end_A: Array


class State(NamedTuple):
    """The clockwork between two uses."""

    clock: Array  # NOW, and how long exchanges kept each link class busy so far
    parts: Array
    free_at_G: Array
    slow_G: Array  # compute lost to copies, not yet served
    peer_2G: Array  # clock at which a link is free: out, in
    rdma_2Y: Array
    host_G: Array
    busy_WG: Array
    ring: Array  # [G, L or 1, R, depth]: clock of the last gradient from a buffer
    ring_link: Array  # its `Link`, -1 none
    turn: Array
    live_G: Array
    peak_G: Array


class Record(NamedTuple):
    """What is kept for the timeline."""

    time_6U: Array  # start, window, ready, dispatched, computed, end
    window_UG: Array
    compute_UG: Array
    at_2X: Array  # clock of each link class when an exchange begins
    took_2X: Array
    num_X: Array
