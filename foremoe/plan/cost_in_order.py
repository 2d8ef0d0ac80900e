"""The cost of a sequence of micro-steps as its weights are really sent: what a buffer still holds is not sent again."""

import dataclasses

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.transfers import TransferList, derive_transfers
from foremoe.problem.bounds import seconds_bound
from foremoe.problem.cost import Cost
from foremoe.problem.estimate import estimate_rows, problem_rates, row_times
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates
from foremoe.problem.schedule import Phase
from foremoe.problem.slots import ResidentSlots

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, R redundant slots, C copies, 2 link classes (peer, RDMA), 22G those of
# every rank by direction (out, in).


def refusal(problem: Problem, keeps_homes: bool) -> str:
    """Why transitions do not matter for a problem, as a sentence; empty if they do."""
    if not isinstance(problem.slots, ResidentSlots):
        return "shared slots keep nothing from one micro-step to the next; use slots=ResidentSlots()."
    if problem.cost.objective != "time":
        return 'what is kept saves time, which the objective "balance" does not count.'
    if not keeps_homes:
        return "plans that move homes are scored, never executed, and send no replicas."
    if problem.R == 0 or problem.G == 1:
        return f"{problem.G} ranks with {problem.R} redundant slots hold no replicas."
    return ""


def transfers_in_order(problem: Problem, placement: Placement, order_M: Array) -> TransferList:
    """The weight copies of a placement whose micro-steps run in `order_M`."""
    return derive_transfers(
        placement.expert_NGS, placement.quotas_NGS, problem.home_LE, schedule=problem.schedule, slots=problem.slots,
        order_M=order_M, node_of_rank_G=problem.cluster.node_of_rank_G, resident_LGS=problem.resident_LGS,
    )  # fmt: skip


def weight_price(rates: Rates) -> Array:
    """float64 [2]: what sending its weights adds to the price of a replica (`Rates.replica_peer_s` and `replica_rdma_s`)."""
    return np.array([rates.copy_peer_s, rates.copy_rdma_s]) * rates.contention


def sequence_cost(problem: Problem, placement: Placement, transfers: TransferList) -> Cost:
    """`estimate_rows` with `transfer_s` and `gradient_s` of the copies in `transfers` alone, [N].

    Copies count on the link to their home, whichever link they are advised to take, in the row that they are sent for: those for
    forward hide as in `estimate_rows`, those for backward (re-sent where too few buffers held them) share links with gradients.
    """
    r, times = problem_rates(problem), row_times(problem)
    price_2 = weight_price(r)
    row_C = transfers.micro_step_C.astype(np.int64) * problem.L + transfers.layer_C
    home_C = problem.home_LE[transfers.layer_C, transfers.expert_C] // problem.B
    at_N, at_G, at_R = np.nonzero(placement.quotas_NGS[:, :, problem.B :] > 0)
    replica_X = placement.expert_NGS[at_N, at_G, problem.B + at_R]
    fan_N22G = _fans(problem, at_N, problem.home_LE[at_N % problem.L, replica_X] // problem.B, at_G)
    # The price of a replica is that of its weights and of its gradient; replicas that are kept return gradients all the same.
    transfer_N = _count(fan_N22G) @ (np.array([r.replica_peer_s, r.replica_rdma_s]) - price_2)
    sent_2N22G = [
        _fans(problem, row_C[mask_C], home_C[mask_C], transfers.dst_C[mask_C])
        for mask_C in (transfers.phase_C == Phase.FORWARD, transfers.phase_C != Phase.FORWARD)
    ]
    copy_s_2N22G = [sent_N22G * np.array([r.copy_peer_s, r.copy_rdma_s])[:, None, None] for sent_N22G in sent_2N22G]
    gradient_2 = np.array([r.gradient_peer_s, r.gradient_rdma_s]) * r.returns_gradients
    # A gradient goes against its weights.
    gradient_s_N22G = fan_N22G[:, :, ::-1] * gradient_2[:, None, None]
    forward_N, weights_N, backward_N = (
        np.maximum(0.0, s_N22G.max(axis=(1, 2, 3)) - hide_N)
        for s_N22G, hide_N in (
            (copy_s_2N22G[0], times.hide_forward_N), (copy_s_2N22G[1], times.hide_backward_N),
            (copy_s_2N22G[1] + gradient_s_N22G, times.hide_backward_N),
        )
    )  # fmt: skip
    transfer_N = transfer_N + forward_N + weights_N + sum(_count(sent_N22G) @ price_2 for sent_N22G in sent_2N22G)
    cost = estimate_rows(problem, placement)
    return dataclasses.replace(cost, transfer_s=transfer_N, gradient_s=backward_N - weights_N)


def sequence_bound(problem: Problem, load_bound_N: Array) -> Array:
    """float64 [N], seconds: no row costs less in any sequence, whatever it finds in its buffers."""
    r = problem_rates(problem)
    peer_s, rdma_s = np.array([r.replica_peer_s, r.replica_rdma_s]) - weight_price(r)
    kept = r._replace(copy_peer_s=0.0, copy_rdma_s=0.0, replica_peer_s=peer_s, replica_rdma_s=rdma_s)
    return seconds_bound(problem, kept, row_times(problem), load_bound_N)


def _fans(problem: Problem, row_C: Array, src_C: Array, dst_C: Array) -> Array:
    """int64 [N, 2, 2, G]: copies of every row by link class, out of every rank and into it."""
    shape, node_G = (problem.N, 2, 2, problem.G), problem.cluster.node_of_rank_G
    link_C = (node_G[src_C] != node_G[dst_C]).astype(np.int64)
    at_2C = [
        np.ravel_multi_index((row_C, link_C, np.full_like(link_C, way), end_C), shape) for way, end_C in ((0, src_C), (1, dst_C))
    ]
    return np.bincount(np.concatenate(at_2C), minlength=int(np.prod(shape))).reshape(shape)


def _count(fan_N22G: Array) -> Array:
    """int64 [N, 2]: copies of every row by link class."""
    return np.asarray(fan_N22G[:, :, 0].sum(axis=2))
