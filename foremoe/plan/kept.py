"""Replicas that stay in resident slots from one row to a later one, and what rows cost then."""

import numpy as np

from foremoe.base.arrays import Array
from foremoe.plan.transfers import TransferList, derive_transfers
from foremoe.problem.cost import Cost
from foremoe.problem.placement import Placement
from foremoe.problem.pricing import price
from foremoe.problem.problem import Problem
from foremoe.problem.slots import ResidentSlots

# Letters: M micro-steps, L layers, N = M*L rows, G ranks, S slots, C copies.


def transfers_of(problem: Problem, placement: Placement) -> TransferList:
    """The copies of a placement that keeps homes, micro-steps in the order given."""
    return derive_transfers(
        placement.expert_NGS, placement.quotas_NGS, problem.home_LE, schedule=problem.schedule, slots=problem.slots,
        order_M=np.arange(problem.M, dtype=np.int32), node_of_rank_G=problem.cluster.node_of_rank_G,
        resident_LGS=problem.resident_LGS,
    )  # fmt: skip


def kept_slots(problem: Problem, placement: Placement, transfers: TransferList) -> Array:
    """bool [N, G, S]: replicas that serve a row and are not sent for it."""
    kept_NGS = placement.quotas_NGS > 0
    kept_NGS[:, :, : problem.B] = False
    row_C = transfers.micro_step_C.astype(np.int64) * problem.L + transfers.layer_C
    kept_NGS[row_C, transfers.dst_C, transfers.slot_C] = False
    return kept_NGS


def price_as_sent(problem: Problem, placement: Placement, transfers: TransferList | None = None) -> Cost:
    """`price` of every row, [N], where replicas that stay in resident slots are paid for once.

    Args:
        transfers: Copies of the placement; default: those of `transfers_of`.
    """
    moves_homes = (placement.expert_NGS[:, :, : problem.B] != problem.base_NGB).any()
    if not isinstance(problem.slots, ResidentSlots) or moves_homes:
        return price(problem, placement)
    transfers = transfers_of(problem, placement) if transfers is None else transfers
    return price(problem, placement, kept_slots(problem, placement, transfers))
