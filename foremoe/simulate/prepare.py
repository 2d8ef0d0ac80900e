"""From a problem and its plan to the arrays of the clockwork, and from its clocks back to time."""

from __future__ import annotations

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.objective import activation_bytes, window_seconds
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Uses
from foremoe.problem.slots import SharedSlots
from foremoe.simulate.kernel import Copies, Record, Returns, Stage, State
from foremoe.simulate.result import LINKS
from foremoe.simulate.traffic import exchange, nic_of_rank

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots, U uses, C copies, A gradient returns, R redundant, K links,
# X exchanges.


def stage_inputs(problem: Problem, plan: Plan, uses: Uses, plan_s: float, share_links: bool) -> tuple[Stage, Array]:
    """The `Stage`, and float64 [K, G]: seconds that exchanges keep every link busy over the stage."""
    model, cluster = problem.model, problem.cluster
    row_U = uses.micro_step_U.astype(np.int64) * problem.L + uses.layer_U
    is_backward_U = uses.phase_U == Phase.BACKWARD
    in_block_N = np.zeros(problem.N, bool)
    in_block_N[row_U[uses.phase_U == Phase.REFORWARD]] = True
    again_U = is_backward_U & problem.schedule.reforward & ~in_block_N[row_U]
    rounds_N = np.bincount(row_U, weights=1 + again_U, minlength=problem.N).astype(np.int64)
    sent = exchange(problem, plan, rounds_N)
    busy_NGS = plan.quota_NGS > 0
    at_home_NGB = plan.expert_NGS[..., : plan.B]
    loaded_NGB = (
        np.take_along_axis(problem.load_NE, at_home_NGB.reshape(problem.N, -1).clip(0), axis=1).reshape(at_home_NGB.shape) > 0
    )
    busy_NGS[..., : plan.B] |= loaded_NGB & (at_home_NGB >= 0)
    pair_s = model.flops_per_pair / cluster.expert_flops_per_s + cluster.pair_overhead_s
    compute_NG = pair_s * plan.load_NG + cluster.slot_overhead_s * busy_NGS.sum(axis=2)
    links = (
        (cluster.peer_bytes_per_s, cluster.peer_latency_s),
        (cluster.rdma_bytes_per_s, cluster.rdma_latency_s),
        (cluster.host_bytes_per_s, cluster.host_latency_s),
    )
    stage = Stage(
        row_U=row_U,
        micro_step_U=uses.micro_step_U.astype(np.int64),
        phase_U=uses.phase_U,
        again_U=again_U,
        window_MG=window_seconds(problem),
        compute_NG=compute_NG,
        peer_N=sent.peer_N,
        rdma_N=sent.rdma_N,
        kept_NG=plan.load_NG * activation_bytes(model),
        keeps=bool(problem.schedule.trains and not problem.schedule.reforward),
        slot_layer_N=np.tile(np.arange(problem.L), problem.M) * (not isinstance(problem.slots, SharedSlots)),
        node_G=cluster.node_of_rank_G,
        nic_G=nic_of_rank(cluster),
        latency_s=cluster.exchange_latency_s,
        backward_ratio=cluster.backward_ratio,
        window_ratio=cluster.window_backward_ratio,
        contention=cluster.copy_contention,
        copy_s=np.array([model.expert_bytes / bandwidth + latency for bandwidth, latency in links]),
        gradient_s=np.array([model.gradient_bytes / bandwidth + latency for bandwidth, latency in links]),
        plan_s=float(plan_s),
        shares_links=share_links,
    )
    peer_G, rdma_G = sent.peer_busy_G, sent.rdma_busy_G
    return stage, np.stack([peer_G, peer_G, rdma_G, rdma_G, np.zeros(problem.G)])


def copy_inputs(plan: Plan, num_uses: int, prefetch: int, known: str) -> Copies:
    """The plan's copies in the order in which they start: at most `prefetch` uses ahead, in a buffer that is free."""
    t = plan.transfers if plan.executable else TransferList.none()
    need_C, after_C = t.need_C.astype(np.int64), t.after_C.astype(np.int64)
    late_C = (t.phase_C == Phase.FORWARD) & (known == "router")
    begin_C = np.maximum(after_C + 1, need_C - prefetch).clip(0)
    begin_C[late_C] = need_C[late_C]
    feed_C, depth_C = _feeds(plan, t)
    # As the engine does: a use later than the copy that is passed on, or in the same one if that would be too late.
    for depth in range(1, int(depth_C.max(initial=0)) + 1):
        relays = np.flatnonzero(depth_C == depth)
        begin_C[relays] = np.maximum(begin_C[relays], np.minimum(begin_C[feed_C[relays]] + 1, need_C[relays]))
    order_C = np.lexsort((depth_C, need_C, begin_C))
    ahead_C = order_C[~late_C[order_C]]
    by_need_C = np.lexsort((depth_C, need_C))
    uses = np.arange(num_uses + 1)
    return Copies(
        src_C=t.src_C.astype(np.int64),
        dst_C=t.dst_C.astype(np.int64),
        link_C=t.link_C,
        feed_C=feed_C,
        late_C=late_C,
        ahead_C=ahead_C,
        ahead_U=np.searchsorted(begin_C[ahead_C], uses),
        need_C=by_need_C,
        need_U=np.searchsorted(need_C[by_need_C], uses),
        start_C=np.zeros(len(t)),
        end_C=np.zeros(len(t)),
    )


def _feeds(plan: Plan, t: TransferList) -> tuple[Array, Array]:
    """Per copy: the copy that brought the expert to the rank it comes from, -1 from home or host; and how many came before it."""
    feed_C, depth_C = np.full(len(t), -1), np.zeros(len(t), np.int64)
    if not len(t):
        return feed_C, depth_C
    home_C = plan.home_LE[t.layer_C, t.expert_C] // plan.B
    relays = np.flatnonzero((t.src_C >= 0) & (t.src_C != home_C))
    arrived: dict[tuple[int, int, int], list[int]] = {}
    wanted = set(zip(t.layer_C[relays].tolist(), t.expert_C[relays].tolist(), strict=True))
    for c in range(len(t) if wanted else 0):
        layer, expert = int(t.layer_C[c]), int(t.expert_C[c])
        if (layer, expert) in wanted:
            arrived.setdefault((layer, expert, int(t.dst_C[c])), []).append(c)
    for c in relays.tolist():
        before = arrived.get((int(t.layer_C[c]), int(t.expert_C[c]), int(t.src_C[c])), [])
        feed_C[c] = max((i for i in before if t.need_C[i] <= t.need_C[c]), default=-1)  # in order of need; -1: resident
    left = feed_C >= 0
    while left.any():
        depth_C[left] += 1
        at = np.flatnonzero(left)
        up_C = feed_C.copy()
        for _ in range(int(depth_C.max())):
            up_C[at] = np.where(up_C[at] >= 0, feed_C[up_C[at]], -1)
        left = left & (up_C >= 0)
    return feed_C, depth_C


def return_inputs(plan: Plan) -> tuple[Returns, dict[str, Array]]:
    """The gradients of all replicas, row by row, and their columns for the timeline."""
    head = plan.header
    used_NGR = plan.quota_NGS[..., plan.B :] > 0
    if not (plan.executable and head.schedule.trains):
        used_NGR = np.zeros_like(used_NGR)
    at_N, at_G, at_R = np.nonzero(used_NGR)
    expert_A = plan.expert_NGS[at_N, at_G, plan.B + at_R].astype(np.int64)
    micro_step_A, layer_A = at_N // plan.L, at_N % plan.L
    dst_A = (plan.home_LE[layer_A, expert_A] // plan.B).astype(np.int64)
    returns = Returns(
        first_N=np.searchsorted(at_N, np.arange(plan.N + 1)),
        src_A=at_G,
        dst_A=dst_A,
        slot_A=at_R,
        start_A=np.zeros(len(at_N)),
        end_A=np.zeros(len(at_N)),
    )
    return returns, {"micro_step": micro_step_A, "layer": layer_A, "expert": expert_A, "src": at_G, "dst": dst_A}


def empty_state(problem: Problem, stage: Stage) -> State:
    """Nothing has run yet."""
    G, R = problem.G, problem.R
    shared = isinstance(problem.slots, SharedSlots)
    depth = problem.slots.num_buffers(1, 1)
    ring = (G, 1 if shared else problem.L, R, depth)
    return State(
        clock=np.zeros(3),
        parts=np.zeros(9),
        free_at_G=np.zeros(G),
        slow_G=np.zeros(G),
        peer_2G=np.zeros((2, G)),
        rdma_2K=np.zeros((2, int(stage.nic_G.max()) + 1)),
        host_G=np.zeros(G),
        busy_KG=np.zeros((len(LINKS), G)),
        ring=np.zeros(ring),
        ring_path=np.full(ring, -1, np.int64),
        turn=np.zeros(ring[:3], np.int64),
        live_G=np.zeros(G),
        peak_G=np.zeros(G),
    )


def empty_record(num_uses: int, num_ranks: int) -> Record:
    """Room for the timeline; a use has at most four exchanges."""
    return Record(
        time_6U=np.zeros((6, num_uses)),
        window_UG=np.zeros((num_uses, num_ranks), np.float32),
        compute_UG=np.zeros((num_uses, num_ranks), np.float32),
        at_2X=np.zeros((2, 4 * num_uses)),
        took_2X=np.zeros((2, 4 * num_uses)),
        num_X=np.zeros(1, np.int64),
    )


def wall_seconds(clock_A: Array, link_A: Array, record: Record, *, begin: bool = False) -> Array:
    """When the clocks of links show `clock_A`: what exchanges took before that is added.

    A clock shows one time all through an exchange: copies end before it, and `begin` after it.
    """
    out_A = clock_A.astype(np.float64)
    num = int(record.num_X[0])
    for k, path in enumerate((Link.PEER, Link.RDMA)):
        mine_A = link_A == path
        before_A = np.searchsorted(record.at_2X[k, :num], clock_A[mine_A], side="right" if begin else "left")
        out_A[mine_A] += np.concatenate([[0.0], np.cumsum(record.took_2X[k, :num])])[before_A]
    return out_A
