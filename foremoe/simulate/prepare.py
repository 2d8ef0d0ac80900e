"""Conversion of a problem and its plan to the simulator's arrays, and of the simulator's clocks to time."""

import numpy as np

from foremoe.base.arrays import Array, order_of
from foremoe.machine.elements import pair_overhead_seconds
from foremoe.machine.host import host_waits_s
from foremoe.machine.tiles import padded_pairs
from foremoe.plan.plan import Plan
from foremoe.plan.programme import start_positions
from foremoe.plan.replicas import Replicas
from foremoe.plan.rounds import rounds_of
from foremoe.plan.transfers import Link, TransferList
from foremoe.problem.estimate import window_seconds
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Uses
from foremoe.simulate.fill import fill_inputs
from foremoe.simulate.result import LINKS, PARTS
from foremoe.simulate.state import Copies, Record, Returns, Stage, State
from foremoe.simulate.traffic import Exchange, exchange

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots, U uses, C copies, A gradient returns, R redundant, W links,
# X exchanges.


def stage_inputs(problem: Problem, plan: Plan, uses: Uses, plan_s: float, share_links: bool) -> tuple[Stage, Array]:
    """Returns the `Stage`, and how many seconds exchanges keep each of `LINKS` busy in the whole stage, float64 [W, G]."""
    model, cluster = problem.model, problem.cluster
    row_U = uses.micro_step_U.astype(np.int64) * problem.L + uses.layer_U
    is_backward_U = uses.phase_U == Phase.BACKWARD
    in_block_N = np.zeros(problem.N, bool)
    in_block_N[row_U[uses.phase_U == Phase.REFORWARD]] = True
    again_U = is_backward_U & problem.schedule.reforward & ~in_block_N[row_U]
    rounds_N = np.bincount(row_U, weights=1 + again_U, minlength=problem.N).astype(np.int64)
    sent = exchange(problem, plan, rounds_N)
    busy_NGS, at_home_NGB = plan.quota_NGS > 0, plan.expert_NGS[..., : plan.B]
    home_load_NX = np.take_along_axis(problem.load_NE, at_home_NGB.reshape(problem.N, -1).clip(0), axis=1)
    busy_NGS[..., : plan.B] |= (home_load_NX.reshape(at_home_NGB.shape) > 0) & (at_home_NGB >= 0)
    gemm_s = model.flops_per_pair / cluster.expert_flops_per_s
    padded_NG = padded_pairs(plan.quota_NGS.astype(np.int64), cluster.tile_pairs).sum(axis=2)
    compute_NG = gemm_s * padded_NG + pair_overhead_seconds(model, cluster) * plan.load_NG
    busy_NG = busy_NGS.sum(axis=2)
    back_NG = cluster.backward_ratio * compute_NG + cluster.backward_slot_s * busy_NG
    compute_NG += cluster.slot_overhead_s * busy_NG
    # Without host stores, a plan has no copies from them.
    rate_3 = np.array([cluster.peer_bytes_per_s, cluster.rdma_bytes_per_s, cluster.host_bytes_per_s or np.inf])
    return_3 = np.minimum(rate_3, cluster.return_bytes_per_s or np.inf)
    latency_3 = np.array([cluster.peer_latency_s, cluster.rdma_latency_s, cluster.host_latency_s])
    window_MG = _window_seconds(problem, compute_NG, back_NG, sent)
    if plan.num_replicas:
        compute_NG = compute_NG + np.repeat(_planned_seconds(problem), problem.L, axis=0)
    stage = Stage(
        row_U=row_U, micro_step_U=uses.micro_step_U.astype(np.int64), phase_U=uses.phase_U, again_U=again_U,
        window_MG=window_MG, compute_NG=compute_NG, back_NG=back_NG,
        peer_N=sent.peer_N, rdma_N=sent.rdma_N,
        node_G=cluster.node_of_rank_G, nic_G=cluster.nic_of_rank_G, latency_s=cluster.exchange_latency_s,
        window_ratio=cluster.window_backward_ratio, contention=cluster.copy_contention,
        copy_s=model.expert_bytes / rate_3 + latency_3, gradient_s=model.gradient_bytes / return_3 + latency_3,
        plan_s=float(plan_s), shares_links=share_links,
    )  # fmt: skip
    return stage, np.stack([sent.peer_busy_G, sent.peer_busy_G, sent.rdma_busy_G, sent.rdma_busy_G, np.zeros(problem.G)])


def _window_seconds(problem: Problem, compute_NG: Array, back_NG: Array, sent: Exchange) -> Array:
    """Returns the window in seconds, including waits for a host that is slower than the layers, float64 [M, G].

    The host's queue evens out differences between layers, so the average layer of a micro-step counts.
    """
    window_MG, cluster = window_seconds(problem), problem.cluster
    if not cluster.host_layer_s:
        return window_MG
    backward, again = float(problem.schedule.trains), float(problem.schedule.reforward)
    passes = 1.0 + cluster.window_backward_ratio * backward + again
    exchange_N = np.maximum(sent.peer_N, sent.rdma_N) + cluster.exchange_latency_s
    device_N = (1.0 + again) * compute_NG.max(axis=1) + backward * back_NG.max(axis=1)
    device_N += 2.0 * (1.0 + backward + again) * exchange_N
    device_M = device_N.reshape(problem.M, problem.L).mean(axis=1) + passes * window_MG.max(axis=1)
    return window_MG + host_waits_s(cluster.host_layer_s, device_M, passes)[:, None]


def _planned_seconds(problem: Problem) -> Array:
    """Returns the seconds that a plan with replicas adds to a layer's forward pass, float64 [M, G]."""
    tokens_MG = np.zeros((problem.M, problem.G)) if problem.tokens_MG is None else problem.tokens_MG
    return problem.cluster.planned_layer_s + problem.cluster.planned_token_s * tokens_MG


def copy_inputs(problem: Problem, plan: Plan, num_uses: int, prefetch: int, known: str) -> Copies:
    """Returns the plan's copies in the order in which they start (see `start_positions`)."""
    t = plan.transfers if plan.executable else TransferList.none()
    need_C = t.need_C.astype(np.int64)
    late_C = (t.phase_C == Phase.FORWARD) & (known == "router")
    start_C = start_positions(t, prefetch, late_C)
    round_C = rounds_of(need_C, t.slot_C, t.src_C, t.dst_C, problem.cluster)
    order_C = order_of(start_C, need_C, round_C)
    ahead_C = order_C[~late_C[order_C]]
    by_need_C = order_of(need_C, round_C)
    uses = np.arange(num_uses + 1)
    fills, fill_C = fill_inputs(problem, plan, t)
    return Copies(
        src_C=t.src_C.astype(np.int64), dst_C=t.dst_C.astype(np.int64), link_C=t.link_C, late_C=late_C,
        ahead_C=ahead_C, ahead_U=np.searchsorted(start_C[ahead_C], uses), need_C=by_need_C,
        need_U=np.searchsorted(need_C[by_need_C], uses), start_C=np.zeros(len(t)), end_C=np.zeros(len(t)),
        fill_C=fill_C, fills=fills,
    )  # fmt: skip


def return_inputs(plan: Plan) -> tuple[Returns, Replicas]:
    """Returns the gradient returns of all replicas, row by row in the order of sending, and the replicas in the same order."""
    returns_any = plan.executable and plan.header.schedule.trains
    replicas = Replicas.of(plan, np.full((plan.M, plan.L), returns_any))
    round_Z = rounds_of(replicas.row_Z, replicas.slot_Z, replicas.rank_Z, replicas.home_Z, plan.header.cluster)
    order_Z = order_of(replicas.row_Z, round_Z)
    replicas = Replicas(*(column_Z[order_Z] for column_Z in replicas))
    first_N, times = np.searchsorted(replicas.row_Z, np.arange(plan.N + 1)), np.zeros((2, len(replicas.row_Z)))
    return Returns(first_N, replicas.rank_Z, replicas.home_Z, replicas.slot_Z - plan.B, *times), replicas


def empty_state(problem: Problem, stage: Stage) -> State:
    """Returns the state of the simulator before the first use."""
    G, num_nics = problem.G, int(stage.nic_G.max()) + 1
    ring = (G, problem.R, problem.slot_depth)
    return State(
        clock=np.zeros(3), parts=np.zeros(len(PARTS)), free_at_G=np.zeros(G), slow_G=np.zeros(G), peer_2G=np.zeros((2, G)),
        rdma_2Y=np.zeros((2, num_nics)), host_G=np.zeros(G), store_G=np.zeros(G), busy_WG=np.zeros((len(LINKS), G)),
        ring=np.zeros(ring), ring_link=np.full(ring, -1, np.int64), turn=np.zeros(ring[:2], np.int64),
    )  # fmt: skip


def empty_record(num_uses: int, num_ranks: int) -> Record:
    """Allocates an empty record of events. A use has at most four exchanges."""
    window_UG, wait_UG, compute_UG = np.zeros((3, num_uses, num_ranks), np.float32)
    at_2X, took_2X = np.zeros((2, 2, 4 * num_uses))
    return Record(np.zeros((6, num_uses)), window_UG, wait_UG, compute_UG, at_2X, took_2X, np.zeros(1, np.int64))


def wall_seconds(clock_A: Array, link_A: Array, record: Record, *, begin: bool = False) -> Array:
    """Converts the link clocks `clock_A` to time by adding the duration of all earlier exchanges.

    A clock stops during an exchange. A reading that falls on an exchange is the time before it, or with `begin` the time after
    it, regardless of rounding.
    """
    out_A = clock_A.astype(np.float64)
    read_A = out_A * (1.0 + 1e-12 if begin else 1.0 - 1e-12)
    num = int(record.num_X[0])
    for k, link in enumerate((Link.PEER, Link.RDMA)):
        mine_A = link_A == link
        before_A = np.searchsorted(record.at_2X[k, :num], read_A[mine_A], side="right" if begin else "left")
        out_A[mine_A] += np.concatenate([[0.0], np.cumsum(record.took_2X[k, :num])])[before_A]
    return out_A
