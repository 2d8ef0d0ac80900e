"""The clockwork of the simulator: uses one after the other, exchanges in step, copies beside them.

Copies have clocks of their own, one for each link class, that stand still while an exchange keeps the class busy: exchanges go
first on a link, and copies use what is left. On a link, copies go one after the other in the order in which they are needed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from foremoe.base.arrays import Array
from foremoe.base.compiled import kernel
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase

# Letters: U uses, M micro-steps, N rows, G ranks, K NICs, C copies, A gradient returns, R redundant, X exchanges.

_FORWARD, _BACKWARD, _REFORWARD = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.REFORWARD)
_PEER, _RDMA, _HOST = int(Link.PEER), int(Link.RDMA), int(Link.HOST)
WINDOW, DISPATCH, COMPUTE, COMBINE, TRANSFER, GRADIENT, PLANNING, OUTSIDE, BUBBLE = range(9)
NOW, PEER_CLOCK, RDMA_CLOCK = range(3)


class Stage(NamedTuple):
    """What is known before the stage runs.

    row_U, micro_step_U, phase_U; again_U: this backward runs the layer's forward first. window_MG, compute_NG: seconds of one
    forward. peer_N, rdma_N: seconds that one exchange keeps a link class busy. kept_NG: bytes of activations. slot_layer_N: which
    gradient buffers a row uses. The rest are seconds, and the ratios of backward to forward: of experts, and of the window.
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
    copy_s: Array  # by Link
    gradient_s: Array  # by Link
    plan_s: float
    shares_links: bool


class Copies(NamedTuple):
    """Weight copies, columns in the order of `Plan.transfers`. `ahead_C`: sorted by the use at whose begin they may start, with
    `ahead_U` where each use's begin; `need_C`, `need_U`: sorted by the use that needs them. `late_C`: only known in that use."""

    src_C: Array
    dst_C: Array
    link_C: Array
    feed_C: Array  # the copy that a relay passes on, or -1
    late_C: Array
    ahead_C: Array
    ahead_U: Array
    need_C: Array
    need_U: Array
    start_C: Array  # out: on the link's clock
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
    """What the clockwork carries from use to use."""

    clock: Array  # NOW, and how long exchanges kept each link class busy so far
    parts: Array
    free_at_G: Array
    slow_G: Array  # compute lost to copies, not yet served
    peer_2G: Array  # clock at which a link is free: out, in
    rdma_2K: Array
    host_G: Array
    busy_KG: Array
    ring: Array  # [G, L or 1, R, depth]: clock and class of the last gradient from a buffer
    ring_path: Array
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


@kernel
def run_uses(low, high, stage, copies, returns, state, record):  # type: ignore[no-untyped-def]
    """Runs uses [low, high); ranks are free at `state.free_at_G`."""
    G = stage.node_G.size
    parts, clock, free_G = state.parts, state.clock, state.free_at_G
    release_G = np.empty(G)
    for u in range(low, high):
        n, m, phase = stage.row_U[u], stage.micro_step_U[u], stage.phase_U[u]
        if u == 0:
            _issue(0, free_G, stage, copies, state)
        record.time_6U[0, u] = clock[NOW]
        backward, again = phase == _BACKWARD, stage.again_U[u]
        kept_G = stage.kept_NG[n]
        if not backward or again:  # a forward: attention, then the experts
            begin = clock[NOW]
            plain, late = begin, begin
            for g in range(G):
                window = stage.window_MG[m, g]
                record.window_UG[u, g] += window
                plain = max(plain, free_G[g] + window)
                late = max(late, free_G[g] + window + state.slow_G[g])
            state.slow_G[:] = 0.0
            parts[WINDOW] += plain - begin
            parts[TRANSFER] += late - plain
            record.time_6U[1, u] = late
            if phase == _FORWARD and stage.plan_s > 0.0:
                late += stage.plan_s
                parts[PLANNING] += stage.plan_s
            clock[NOW] = late
            _issue_late(u, stage, copies, state)
            _await_weights(u, copies, state)
            record.time_6U[2, u] = clock[NOW]
            _exchange(n, DISPATCH, stage, state, record)
            record.time_6U[3, u] = clock[NOW]
            _compute(u, n, 1.0, stage, state, record, release_G)
            record.time_6U[4, u] = clock[NOW]
            if not backward:
                _issue(u + 1, release_G, stage, copies, state)
            _exchange(n, COMBINE, stage, state, record)
            free_G[:] = clock[NOW]
            for g in range(G):
                state.peak_G[g] = max(state.peak_G[g], state.live_G[g] + kept_G[g])
                if phase == _REFORWARD or (phase == _FORWARD and stage.keeps):
                    state.live_G[g] += kept_G[g]
        if backward:
            begin, late = clock[NOW], clock[NOW]
            for g in range(G):
                late = max(late, free_G[g] + state.slow_G[g])
            state.slow_G[:] = 0.0
            parts[TRANSFER] += late - begin
            clock[NOW] = late
            record.time_6U[1, u] = late
            if not again:
                _await_weights(u, copies, state)
            _await_buffers(n, stage, returns, state)
            record.time_6U[2, u] = clock[NOW]
            _exchange(n, COMBINE, stage, state, record)
            record.time_6U[3, u] = clock[NOW]
            _compute(u, n, stage.backward_ratio, stage, state, record, release_G)
            record.time_6U[4, u] = clock[NOW]
            _send_gradients(n, release_G, stage, returns, state)
            _issue(u + 1, release_G, stage, copies, state)
            _exchange(n, DISPATCH, stage, state, record)
            begin = clock[NOW]
            for g in range(G):
                window = stage.window_ratio * stage.window_MG[m, g]
                record.window_UG[u, g] += window
                free_G[g] = begin + window
                clock[NOW] = max(clock[NOW], free_G[g])
                if not again:
                    state.live_G[g] -= kept_G[g]
            parts[WINDOW] += clock[NOW] - begin
        record.time_6U[5, u] = clock[NOW]


@kernel
def _exchange(n, part, stage, state, record):  # type: ignore[no-untyped-def]
    clock = state.clock
    if stage.node_G.size == 1:
        return
    x = record.num_X[0]
    if stage.shares_links:
        record.at_2X[0, x] = clock[NOW] - clock[PEER_CLOCK]
        record.at_2X[1, x] = clock[NOW] - clock[RDMA_CLOCK]
        record.took_2X[0, x] = stage.peer_N[n]
        record.took_2X[1, x] = stage.rdma_N[n]
        record.num_X[0] = x + 1
        clock[PEER_CLOCK] += stage.peer_N[n]
        clock[RDMA_CLOCK] += stage.rdma_N[n]
    took = stage.latency_s + max(stage.peer_N[n], stage.rdma_N[n])
    clock[NOW] += took
    state.parts[part] += took


@kernel
def _compute(u, n, factor, stage, state, record, release_G):  # type: ignore[no-untyped-def]
    begin = state.clock[NOW]
    for g in range(release_G.size):
        took = factor * stage.compute_NG[n, g]
        record.compute_UG[u, g] += took
        release_G[g] = begin + took
        state.clock[NOW] = max(state.clock[NOW], release_G[g])
    state.parts[COMPUTE] += state.clock[NOW] - begin


@kernel
def _behind(path, state):  # type: ignore[no-untyped-def]
    """How far the clock of a link class is behind the time."""
    return 0.0 if path == _HOST else state.clock[PEER_CLOCK] if path == _PEER else state.clock[RDMA_CLOCK]


@kernel
def _send(ready, src, dst, path, took, stage, state):  # type: ignore[no-untyped-def]
    """Puts a copy on its links; returns when it starts."""
    if path == _HOST:
        start = max(ready, state.host_G[dst])
        state.host_G[dst] = start + took
        state.busy_KG[4, dst] += took
    else:
        if path == _PEER:
            start = max(ready, max(state.peer_2G[0, src], state.peer_2G[1, dst]))
            state.peer_2G[0, src] = start + took
            state.peer_2G[1, dst] = start + took
        else:
            out, into = stage.nic_G[src], stage.nic_G[dst]
            start = max(ready, max(state.rdma_2K[0, out], state.rdma_2K[1, into]))
            state.rdma_2K[0, out] = start + took
            state.rdma_2K[1, into] = start + took
        row = 0 if path == _PEER else 2
        state.busy_KG[row, src] += took
        state.busy_KG[row + 1, dst] += took
        state.slow_G[src] += stage.contention * took
    state.slow_G[dst] += stage.contention * took
    return start


@kernel
def _start_copy(c, ready_s, stage, copies, state):  # type: ignore[no-untyped-def]
    path = copies.link_C[c]
    ready = ready_s - _behind(path, state)
    feed = copies.feed_C[c]
    if feed >= 0:  # a relay passes on what has arrived
        arrived = copies.end_C[feed] + _behind(copies.link_C[feed], state)
        ready = max(ready, arrived - _behind(path, state))
    copies.start_C[c] = _send(ready, copies.src_C[c], copies.dst_C[c], path, stage.copy_s[path], stage, state)
    copies.end_C[c] = copies.start_C[c] + stage.copy_s[path]


@kernel
def _issue(u, release_G, stage, copies, state):  # type: ignore[no-untyped-def]
    """Starts the copies that may start at the begin of use `u`: both ends are past the use before it."""
    if u >= copies.ahead_U.size - 1:
        return
    for i in range(copies.ahead_U[u], copies.ahead_U[u + 1]):
        c = copies.ahead_C[i]
        ready_s = release_G[copies.dst_C[c]]
        if copies.src_C[c] >= 0:
            ready_s = max(ready_s, release_G[copies.src_C[c]])
        _start_copy(c, ready_s, stage, copies, state)


@kernel
def _issue_late(u, stage, copies, state):  # type: ignore[no-untyped-def]
    for i in range(copies.need_U[u], copies.need_U[u + 1]):
        if copies.late_C[copies.need_C[i]]:
            _start_copy(copies.need_C[i], state.clock[NOW], stage, copies, state)


@kernel
def _await_weights(u, copies, state):  # type: ignore[no-untyped-def]
    begin = state.clock[NOW]
    for i in range(copies.need_U[u], copies.need_U[u + 1]):
        c = copies.need_C[i]
        state.clock[NOW] = max(state.clock[NOW], copies.end_C[c] + _behind(copies.link_C[c], state))
    state.parts[TRANSFER] += state.clock[NOW] - begin


@kernel
def _await_buffers(n, stage, returns, state):  # type: ignore[no-untyped-def]
    """A gradient buffer is zeroed when what it held has left."""
    begin, layer = state.clock[NOW], stage.slot_layer_N[n]
    for a in range(returns.first_N[n], returns.first_N[n + 1]):
        g, r = returns.src_A[a], returns.slot_A[a]
        turn = state.turn[g, layer, r] % state.ring.shape[3]
        path = state.ring_path[g, layer, r, turn]
        if path >= 0:
            state.clock[NOW] = max(state.clock[NOW], state.ring[g, layer, r, turn] + _behind(path, state))
    state.parts[GRADIENT] += state.clock[NOW] - begin


@kernel
def _send_gradients(n, release_G, stage, returns, state):  # type: ignore[no-untyped-def]
    layer = stage.slot_layer_N[n]
    for a in range(returns.first_N[n], returns.first_N[n + 1]):
        src, dst, r = returns.src_A[a], returns.dst_A[a], returns.slot_A[a]
        path = _PEER if stage.node_G[src] == stage.node_G[dst] else _RDMA
        ready = max(release_G[src], release_G[dst]) - _behind(path, state)
        returns.start_A[a] = _send(ready, src, dst, path, stage.gradient_s[path], stage, state)
        returns.end_A[a] = returns.start_A[a] + stage.gradient_s[path]
        turn = state.turn[src, layer, r] % state.ring.shape[3]
        state.ring[src, layer, r, turn] = returns.end_A[a]
        state.ring_path[src, layer, r, turn] = path
        state.turn[src, layer, r] += 1


@kernel
def hold(until_s, part, state):  # type: ignore[no-untyped-def]
    """No rank goes on before `until_s`."""
    state.parts[part] += max(0.0, until_s - state.clock[NOW])
    state.clock[NOW] = max(state.clock[NOW], until_s)
    for g in range(state.free_at_G.size):
        state.free_at_G[g] = max(state.free_at_G[g], until_s)


@kernel
def work(seconds_G, part, state):  # type: ignore[no-untyped-def]
    """Every rank works for some seconds of its own."""
    begin = state.clock[NOW]
    for g in range(seconds_G.size):
        state.free_at_G[g] += seconds_G[g]
        state.clock[NOW] = max(state.clock[NOW], state.free_at_G[g])
    state.parts[part] += state.clock[NOW] - begin
