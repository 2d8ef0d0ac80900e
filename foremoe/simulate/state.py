"""The simulator's data: stage, copies, gradient returns, clocks, and the record of events."""

from typing import NamedTuple

from foremoe.base.arrays import Array

# Letters: U uses, M micro-steps, N rows, G ranks, Y NICs, W links (`LINKS`), C copies, F fills of host stores, A gradient
# returns, R redundant slots, X exchanges.


class Stage(NamedTuple):
    """Inputs that are known before the stage runs; times in seconds."""

    row_U: Array
    micro_step_U: Array
    phase_U: Array  # `Phase` of every use
    again_U: Array  # whether this backward runs the layer's forward first
    window_MG: Array  # attention of one forward
    compute_NG: Array  # experts in one forward
    back_NG: Array  # experts in backward
    peer_N: Array  # how long one exchange keeps the peer links busy
    rdma_N: Array  # how long one exchange keeps the RDMA links busy
    node_G: Array
    nic_G: Array
    latency_s: float  # of an exchange
    window_ratio: float  # backward over forward, of the window
    contention: float  # share of a copy's time that its ranks lose
    copy_s: Array  # seconds of one weight copy, by `Link`
    gradient_s: Array  # seconds of one gradient, by `Link`
    plan_s: float  # exposed planning per forward of a layer
    shares_links: bool  # whether copies wait for exchanges


class Fills(NamedTuple):
    """Experts that are being copied to host stores."""

    home_F: Array
    writer_F: Array  # rank that writes the store: the home, or one of another node
    end_F: Array  # written: when the expert is stored; -1 before its first copy


class Copies(NamedTuple):
    """Weight copies, columns in the order of `Plan.transfers`."""

    src_C: Array  # -1: the host store
    dst_C: Array
    link_C: Array
    parent_C: Array  # copy that a relay passes on, or -1
    late_C: Array  # whether it is known only in the use that needs it
    ahead_C: Array  # copies by the use at whose begin they may start
    ahead_U: Array  # where the copies of each use begin in `ahead_C`
    need_C: Array  # copies by the use that needs them
    need_U: Array  # where the copies of each use begin in `need_C`
    start_C: Array  # written: start, on the link's clock
    end_C: Array  # written: end, on the link's clock
    fill_C: Array  # what a copy from the host store reads, -1 for all others
    fills: Fills


class Returns(NamedTuple):
    """Replica gradients by row: `first_N[n]` to `first_N[n + 1]`; start and end are written, on the link's clock."""

    first_N: Array
    src_A: Array
    dst_A: Array
    slot_A: Array
    start_A: Array
    end_A: Array


class State(NamedTuple):
    """The simulator's state between two uses."""

    clock: Array  # NOW, and how long exchanges kept each link class busy so far
    parts: Array
    free_at_G: Array
    slow_G: Array  # compute lost to copies, not yet served
    peer_2G: Array  # clock at which a link is free: out, in
    rdma_2Y: Array
    host_G: Array
    store_G: Array  # when a rank may write to its node's store
    busy_WG: Array
    ring: Array  # [G, R, slot_depth]: clock of the last gradient from a buffer
    ring_link: Array  # its `Link`, -1 none
    turn: Array


class Record(NamedTuple):
    """The events that a timeline needs."""

    time_6U: Array  # start, window, dispatched, ready, computed, end
    window_UG: Array
    wait_UG: Array
    compute_UG: Array
    at_2X: Array  # clock of each link class when an exchange begins
    took_2X: Array
    num_X: Array
