"""The cost of a sequence of micro-steps as its weights are really sent: what a buffer still holds is not sent again."""

import dataclasses

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.transfers import TransferList, derive_transfers
from foremoe.problem.bounds import seconds_bound
from foremoe.problem.cost import Cost
from foremoe.problem.objective import price_rows, problem_rates, row_times
from foremoe.problem.placement import Placement
from foremoe.problem.problem import Problem
from foremoe.problem.rates import Rates
from foremoe.problem.schedule import Phase
from foremoe.problem.slots import ResidentSlots

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, R redundant slots, C copies, 2 link classes (peer, RDMA).


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
    """`price_rows` with `transfer_s` of the copies in `transfers` alone, [N].

    Copies count on the link to their home, whichever link they are advised to take, in the row that they are sent for: those for
    forward hide as in `price_rows`, those for backward (re-sent where too few buffers held them) as gradients do.
    """
    r, times = problem_rates(problem), row_times(problem)
    price_2 = weight_price(r)
    row_C = transfers.micro_step_C.astype(np.int64) * problem.L + transfers.layer_C
    home_C = problem.home_LE[transfers.layer_C, transfers.expert_C] // problem.B
    at_N, at_G, at_R = np.nonzero(placement.quotas_NGS[:, :, problem.B :] > 0)
    replica_X = placement.expert_NGS[at_N, at_G, problem.B + at_R]
    count_N2, _ = _links(problem, at_N, problem.home_LE[at_N % problem.L, replica_X] // problem.B, at_G)
    # The price of a replica is that of its weights and of its gradient; replicas that are kept return gradients all the same.
    transfer_N = count_N2 @ (np.array([r.replica_peer_s, r.replica_rdma_s]) - price_2)
    for forward, hide_N in ((True, times.hide_forward_N), (False, times.hide_backward_N)):
        mask_C = (transfers.phase_C == Phase.FORWARD) == forward
        count_N2, fan_N2 = _links(problem, row_C[mask_C], home_C[mask_C], transfers.dst_C[mask_C])
        copy_N = (fan_N2 * [r.copy_peer_s, r.copy_rdma_s]).max(axis=1)
        transfer_N = transfer_N + np.maximum(0.0, copy_N - hide_N) + count_N2 @ price_2
    return dataclasses.replace(price_rows(problem, placement), transfer_s=transfer_N)


def sequence_bound(problem: Problem, load_bound_N: Array) -> Array:
    """float64 [N], seconds: no row costs less in any sequence, whatever it finds in its buffers."""
    r = problem_rates(problem)
    peer_s, rdma_s = np.array([r.replica_peer_s, r.replica_rdma_s]) - weight_price(r)
    kept = r._replace(copy_peer_s=0.0, copy_rdma_s=0.0, replica_peer_s=peer_s, replica_rdma_s=rdma_s)
    return seconds_bound(problem, kept, load_bound_N)


def _links(problem: Problem, row_C: Array, src_C: Array, dst_C: Array) -> tuple[Array, Array]:
    """Copies of every row by link class, and the most of them through one rank and direction: both int64 [N, 2]."""
    N, G = problem.N, problem.G
    node_G = problem.cluster.node_of_rank_G
    count_N2, fan_N2 = np.zeros((N, 2), np.int64), np.zeros((N, 2), np.int64)
    for link in range(2):
        mask_C = (node_G[src_C] != node_G[dst_C]) == bool(link)
        row, ends = row_C[mask_C], (src_C[mask_C], dst_C[mask_C])
        count_N2[:, link] = np.bincount(row, minlength=N)
        fan_N2[:, link] = np.max([np.bincount(row * G + end, minlength=N * G).reshape(N, G).max(axis=1) for end in ends], axis=0)
    return count_N2, fan_N2
