"""Data of the simulator: the stage, copies, gradient returns, clocks, and the record of events."""

from typing import NamedTuple

from foremoe.base.arrays import Array

# Letters: U uses, M micro-steps, N rows, G ranks, Y NICs, W links (`LINKS`), C copies, F fills of host stores, A gradient
# returns, R redundant slots, X exchanges.


class Stage(NamedTuple):
    """Inputs of the simulator that are known before the stage runs. Times are in seconds."""

    row_U: Array
    micro_step_U: Array
    phase_U: Array  # `Phase` of every use
    again_U: Array  # whether this backward use first recomputes the layer's forward pass
    window_MG: Array  # attention in one forward pass
    compute_NG: Array  # experts in one forward pass
    back_NG: Array  # experts in backward
    peer_N: Array  # seconds for which one exchange keeps the peer links busy
    rdma_N: Array  # seconds for which one exchange keeps the RDMA links busy
    node_G: Array
    nic_G: Array
    latency_s: float  # latency of an exchange
    window_ratio: float  # time of the window in backward over that in forward
    contention: float  # share of a copy's time by which its ranks' compute slows down
    copy_s: Array  # seconds of one weight copy, by `Link`
    gradient_s: Array  # seconds of one gradient, by `Link`
    plan_s: float  # exposed planning per forward pass of a layer
    shares_links: bool  # whether copies wait for exchanges


class Fills(NamedTuple):
    """Copies of experts to host stores."""

    home_F: Array
    writer_F: Array  # rank that writes the store: the home, or a rank of another node
    end_F: Array  # output: time when the expert is stored; -1 before its first copy


class Copies(NamedTuple):
    """Weight copies, as columns with one entry per copy in the order of `Plan.transfers`."""

    src_C: Array  # source rank, or -1 for the host store
    dst_C: Array
    link_C: Array
    late_C: Array  # whether the copy is known only in the use that needs it
    ahead_C: Array  # copies sorted by the use at whose beginning they may start
    ahead_U: Array  # first index of each use in `ahead_C`
    need_C: Array  # copies sorted by the use that needs them
    need_U: Array  # first index of each use in `need_C`
    start_C: Array  # output: start on the link's clock
    end_C: Array  # output: end on the link's clock
    fill_C: Array  # fill that a copy from the host store reads; -1 for all others
    fills: Fills


class Returns(NamedTuple):
    """Gradient returns. The returns of row n are those at indices [first_N[n], first_N[n + 1]). Starts and ends are outputs, on
    the link's clock."""

    first_N: Array
    src_A: Array
    dst_A: Array
    slot_A: Array
    start_A: Array
    end_A: Array


class State(NamedTuple):
    """State of the simulator between two uses."""

    clock: Array  # NOW, and seconds that exchanges have kept each link class busy so far
    parts: Array
    free_at_G: Array
    slow_G: Array  # compute time lost to copies that is not yet added
    peer_2G: Array  # clock at which a link becomes free: out, in
    rdma_2Y: Array
    host_G: Array
    store_G: Array  # time when a rank may write to its node's store
    busy_WG: Array
    ring: Array  # [G, R, slot_depth]: clock of the last gradient from a buffer
    ring_link: Array  # `Link` of that gradient, or -1
    turn: Array


class Record(NamedTuple):
    """Record of the events of a timeline."""

    time_6U: Array  # start, window, dispatched, ready, computed, end
    window_UG: Array
    wait_UG: Array
    compute_UG: Array
    at_2X: Array  # clock of each link class when an exchange begins
    took_2X: Array
    num_X: Array
