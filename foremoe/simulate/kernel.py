"""Kernel of the simulator. Uses run one after another, exchanges run on all ranks together, and copies run in parallel.

Copies and gradient returns that become possible with a use start after the last exchange of this use. Ranks wait for copies after
the first exchange and before their experts.

Each class of links has one clock for copies, which stops while an exchange occupies the class. Exchanges therefore have priority
on a link, and copies use the remaining time. On one link, copies run one after another, in the order of need.
"""

import numpy as np

from foremoe.base.compiled import kernel
from foremoe.plan.transfers import Link
from foremoe.problem.schedule import Phase

# Letters: U uses, N rows, G ranks, C copies, A gradient returns. Arguments: see foremoe.simulate.state.

_FORWARD, _BACKWARD, _REFORWARD = int(Phase.FORWARD), int(Phase.BACKWARD), int(Phase.REFORWARD)
_PEER, _RDMA, _HOST = int(Link.PEER), int(Link.RDMA), int(Link.HOST)
WINDOW, DISPATCH, COMPUTE, COMBINE, TRANSFER, GRADIENT, PLANNING, OUTSIDE, BUBBLE = range(9)
NOW, PEER_CLOCK, RDMA_CLOCK = range(3)


@kernel
def run_uses(low, high, stage, copies, returns, state, record):
    """Runs uses [low, high). `state.free_at_G` has the times at which ranks become free."""
    clock = state.clock
    for u in range(low, high):
        if u == 0:
            _issue(0, stage, copies, state)
        record.time_6U[0, u] = clock[NOW]
        backward = stage.phase_U[u] == _BACKWARD
        if not backward or stage.again_U[u]:
            _run_forward(u, stage, copies, returns, state, record)
        if backward:
            _run_backward(u, stage, copies, returns, state, record)
        record.time_6U[5, u] = clock[NOW]


@kernel
def _run_forward(u, stage, copies, returns, state, record):
    """Runs attention, then the experts. Copies for later uses start, unless the layer's backward pass is part of the same use."""
    n, m, phase = stage.row_U[u], stage.micro_step_U[u], stage.phase_U[u]
    clock, parts = state.clock, state.parts
    begin = clock[NOW]
    plain, late = begin, begin
    for g in range(state.free_at_G.size):
        window = stage.window_MG[m, g]
        record.window_UG[u, g] += window
        plain = max(plain, state.free_at_G[g] + window)
        late = max(late, state.free_at_G[g] + window + state.slow_G[g])
    state.slow_G[:] = 0.0
    parts[WINDOW] += plain - begin
    parts[TRANSFER] += late - plain
    if phase == _FORWARD and stage.plan_s > 0.0:
        late += stage.plan_s
        parts[PLANNING] += stage.plan_s
    clock[NOW] = late
    record.time_6U[1, u] = late
    _issue_late(u, stage, copies, state)
    _exchange(n, DISPATCH, stage, state, record)
    _compute(u, False, stage, copies, returns, state, record)
    _exchange(n, COMBINE, stage, state, record)
    if phase != _BACKWARD:
        _issue(u + 1, stage, copies, state)
    state.free_at_G[:] = clock[NOW]


@kernel
def _run_backward(u, stage, copies, returns, state, record):
    """Runs the experts, then attention. Gradients of replicas are sent, and copies for later uses start."""
    n, m = stage.row_U[u], stage.micro_step_U[u]
    clock, parts = state.clock, state.parts
    begin, late = clock[NOW], clock[NOW]
    for g in range(state.free_at_G.size):
        late = max(late, state.free_at_G[g] + state.slow_G[g])
    state.slow_G[:] = 0.0
    parts[TRANSFER] += late - begin
    clock[NOW] = late
    record.time_6U[1, u] = late
    _exchange(n, COMBINE, stage, state, record)
    _compute(u, True, stage, copies, returns, state, record)
    _exchange(n, DISPATCH, stage, state, record)
    _send_gradients(n, stage, returns, state)
    _issue(u + 1, stage, copies, state)
    begin = clock[NOW]
    for g in range(state.free_at_G.size):
        window = stage.window_ratio * stage.window_MG[m, g]
        record.window_UG[u, g] += window
        state.free_at_G[g] = begin + window
        clock[NOW] = max(clock[NOW], state.free_at_G[g])
    parts[WINDOW] += clock[NOW] - begin


@kernel
def _exchange(n, part, stage, state, record):
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
def _compute(u, back, stage, copies, returns, state, record):
    """Runs the experts of all ranks, in backward if `back`. A rank's first products wait for its weights, not for other ranks. In
    a backward use, they also wait until the rank's gradient buffers can be zeroed."""
    n, clock, parts = stage.row_U[u], state.clock, state.parts
    begin, begin_G = clock[NOW], np.full(state.free_at_G.size, clock[NOW])
    took_G = stage.back_NG[n] if back else stage.compute_NG[n]
    plain = _slowest(begin_G, took_G)
    late = last = plain
    if not (back and stage.again_U[u]):
        _await_weights(u, copies, state, begin_G)
        late = last = _slowest(begin_G, took_G)
        if stage.phase_U[u] == _BACKWARD:
            _await_buffers(n, returns, state, begin_G)
            last = _slowest(begin_G, took_G)
    parts[COMPUTE] += plain - begin
    parts[TRANSFER] += late - plain
    parts[GRADIENT] += last - late
    record.time_6U[2, u] = begin
    record.time_6U[3, u] = begin_G.max()
    record.time_6U[4, u] = last
    for g in range(begin_G.size):
        record.wait_UG[u, g] = begin_G[g] - begin
        record.compute_UG[u, g] += took_G[g]
    clock[NOW] = last


@kernel
def _slowest(begin_G, took_G):
    """Returns the time when the last rank's experts are done."""
    last = 0.0
    for g in range(begin_G.size):
        last = max(last, begin_G[g] + took_G[g])
    return last


@kernel
def _behind(link, state):
    """Returns how many seconds the clock of a link class is behind the simulated time."""
    return 0.0 if link == _HOST else state.clock[PEER_CLOCK] if link == _PEER else state.clock[RDMA_CLOCK]


@kernel
def _send(ready, src, dst, link, took, stage, state):
    """Schedules a copy on its links and returns its start time."""
    if link == _HOST:
        start = max(ready, state.host_G[dst])
        state.host_G[dst] = start + took
        state.busy_WG[4, dst] += took
    else:
        if link == _PEER:
            start = max(ready, max(state.peer_2G[0, src], state.peer_2G[1, dst]))
            state.peer_2G[0, src] = start + took
            state.peer_2G[1, dst] = start + took
        else:
            out, into = stage.nic_G[src], stage.nic_G[dst]
            start = max(ready, max(state.rdma_2Y[0, out], state.rdma_2Y[1, into]))
            state.rdma_2Y[0, out] = start + took
            state.rdma_2Y[1, into] = start + took
        row = 0 if link == _PEER else 2
        state.busy_WG[row, src] += took
        state.busy_WG[row + 1, dst] += took
        state.slow_G[src] += stage.contention * took
    state.slow_G[dst] += stage.contention * took
    return start


@kernel
def _stored_s(f, stage, fills, state):
    """Returns the time when fill `f` is in the host store. Fills run in the background, as soon as their links are free, in the
    order of need."""
    if fills.end_F[f] < 0.0:
        stored, home, writer = 0.0, fills.home_F[f], fills.writer_F[f]
        if home != writer:
            took = stage.copy_s[_RDMA]
            stored = _send(0.0, home, writer, _RDMA, took, stage, state) + took + _behind(_RDMA, state)
        took = stage.copy_s[_HOST]
        fills.end_F[f] = max(stored, state.store_G[writer]) + took
        state.store_G[writer] = fills.end_F[f]
        state.slow_G[writer] += stage.contention * took
    return fills.end_F[f]


@kernel
def _start_copy(c, ready_s, stage, copies, state):
    link = copies.link_C[c]
    ready = ready_s - _behind(link, state)
    if copies.fill_C[c] >= 0:
        ready = max(ready, _stored_s(copies.fill_C[c], stage, copies.fills, state))
    copies.start_C[c] = _send(ready, copies.src_C[c], copies.dst_C[c], link, stage.copy_s[link], stage, state)
    copies.end_C[c] = copies.start_C[c] + stage.copy_s[link]


@kernel
def _issue(u, stage, copies, state):
    """Starts the copies that may start at the beginning of use `u`, when the last exchange of the previous use is over."""
    if u >= copies.ahead_U.size - 1:
        return
    for i in range(copies.ahead_U[u], copies.ahead_U[u + 1]):
        _start_copy(copies.ahead_C[i], state.clock[NOW], stage, copies, state)


@kernel
def _issue_late(u, stage, copies, state):
    for i in range(copies.need_U[u], copies.need_U[u + 1]):
        if copies.late_C[copies.need_C[i]]:
            _start_copy(copies.need_C[i], state.clock[NOW], stage, copies, state)


@kernel
def _await_weights(u, copies, state, begin_G):
    for i in range(copies.need_U[u], copies.need_U[u + 1]):
        c = copies.need_C[i]
        g = copies.dst_C[c]
        begin_G[g] = max(begin_G[g], copies.end_C[c] + _behind(copies.link_C[c], state))


@kernel
def _await_buffers(n, returns, state, begin_G):
    """Makes ranks wait until the previous gradients have left their buffers, which can then be zeroed."""
    for a in range(returns.first_N[n], returns.first_N[n + 1]):
        g, r = returns.src_A[a], returns.slot_A[a]
        turn = state.turn[g, r] % state.ring.shape[2]
        link = state.ring_link[g, r, turn]
        if link >= 0:
            begin_G[g] = max(begin_G[g], state.ring[g, r, turn] + _behind(link, state))


@kernel
def _send_gradients(n, stage, returns, state):
    for a in range(returns.first_N[n], returns.first_N[n + 1]):
        src, dst, r = returns.src_A[a], returns.dst_A[a], returns.slot_A[a]
        link = _PEER if stage.node_G[src] == stage.node_G[dst] else _RDMA
        ready = state.clock[NOW] - _behind(link, state)
        returns.start_A[a] = _send(ready, src, dst, link, stage.gradient_s[link], stage, state)
        returns.end_A[a] = returns.start_A[a] + stage.gradient_s[link]
        turn = state.turn[src, r] % state.ring.shape[2]
        state.ring[src, r, turn] = returns.end_A[a]
        state.ring_link[src, r, turn] = link
        state.turn[src, r] += 1


@kernel
def hold(until_s, part, state):
    """Makes all ranks wait until `until_s`. The waiting time counts as `part`."""
    state.parts[part] += max(0.0, until_s - state.clock[NOW])
    state.clock[NOW] = max(state.clock[NOW], until_s)
    for g in range(state.free_at_G.size):
        state.free_at_G[g] = max(state.free_at_G[g], until_s)


@kernel
def work(seconds_G, part, state):
    """Makes every rank work for its entry of `seconds_G`. The time counts as `part`."""
    begin = state.clock[NOW]
    for g in range(seconds_G.size):
        state.free_at_G[g] += seconds_G[g]
        state.clock[NOW] = max(state.clock[NOW], state.free_at_G[g])
    state.parts[part] += state.clock[NOW] - begin
