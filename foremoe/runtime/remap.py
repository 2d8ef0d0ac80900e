"""Remap: which physical slot serves each (token, expert) pair of a source rank, so that quotas are met exactly."""

import torch

# Letters: T tokens, K top-k, Z = T*K pairs in token order, E experts, P physical slots of all ranks.


def remap(
    topk_TK: torch.Tensor, split_P: torch.Tensor, expert_P: torch.Tensor, home_slot_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Physical slots of the pairs of one source rank, one layer and one micro-step.

    In token order the first ``split_P[p]`` pairs of an expert go to slot p, its slots in ascending order; what is beyond the
    expert's summed split goes to its home slot. So drift is always served rightly, and a slot never gets more than its split
    unless it is the home.

    Args:
        topk_TK: Any integer dtype, logical experts of each token.
        split_P: Any integer dtype, what the plan gave this source; zero in slots it does not use.
        expert_P: Any integer dtype, logical expert in each slot, -1 empty.
        home_slot_E: Any integer dtype, the physical slot where each expert is at home.

    Returns:
        slot_TK: int64.
        num_drift: int64 [], pairs beyond the split.

    All tensors are on one device; on an accelerator nothing waits for it.
    """
    num_experts, num_slots = home_slot_E.shape[0], expert_P.shape[0]
    expert_Z = topk_TK.reshape(-1).long()
    occurrence_Z = _occurrence(expert_Z, num_experts)

    # The n-th pair of an expert lies at the start of its expert plus n.
    _, width_P, slot_order_P, planned_E = _line(split_P, expert_P, num_experts)
    end_P, start_E = width_P[slot_order_P].cumsum(0), planned_E.cumsum(0) - planned_E

    planned_Z = occurrence_Z < planned_E[expert_Z]
    at_Z = torch.searchsorted(end_P, start_E[expert_Z] + occurrence_Z, right=True).clamp_(max=num_slots - 1)
    slot_Z = torch.where(planned_Z, slot_order_P[at_Z], home_slot_E.long()[expert_Z])
    return slot_Z.view(topk_TK.shape), (~planned_Z).sum()


def _line(split_P: torch.Tensor, expert_P: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """One line of intervals, expert by expert and within an expert slot by slot.

    Returns the expert and the width of each slot, the order of the slots on the line, and the width of each expert. Empty slots
    get a number behind all experts and no width.
    """
    slot_expert_P = torch.where(expert_P >= 0, expert_P, num_experts).long()
    width_P = torch.where(expert_P >= 0, split_P, 0).long()
    planned_E = width_P.new_zeros(num_experts + 1).index_add_(0, slot_expert_P, width_P)
    return slot_expert_P, width_P, torch.argsort(slot_expert_P, stable=True), planned_E


def _occurrence(expert_Z: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How many earlier pairs have the same expert."""
    order_Z = torch.argsort(expert_Z, stable=True)
    # Not bincount: it would ask the device for its largest value.
    count_E = expert_Z.new_zeros(num_experts).scatter_add_(0, expert_Z, torch.ones_like(expert_Z))
    start_E = count_E.cumsum(0) - count_E
    position_Z = torch.arange(len(expert_Z), device=expert_Z.device)
    return torch.empty_like(order_Z).scatter_(0, order_Z, position_Z - start_E[expert_Z[order_Z]])


def remap_dense(
    routing_TE: torch.Tensor, split_P: torch.Tensor, expert_P: torch.Tensor, home_slot_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`remap` for routers that say yes or no per token and expert, as Megatron-Core's do.

    `routing_TE` says, as bool, that token t goes to expert e; the result says the same of physical slot p, as often in every row,
    and comes with the number of pairs beyond the split. Nothing waits for an accelerator: all shapes are known beforehand.
    """
    num_experts, num_slots = home_slot_E.shape[0], expert_P.shape[0]
    slot_expert_P, width_P, order_P, planned_E = _line(split_P, expert_P, num_experts)
    # Where a slot's interval of its expert's pairs begins: what earlier slots of the expert take.
    before_P, first_E = width_P[order_P].cumsum(0) - width_P[order_P], planned_E.cumsum(0) - planned_E
    begin_P = torch.empty_like(before_P).scatter_(0, order_P, before_P - first_E[slot_expert_P[order_P]])

    expert_at_P = slot_expert_P.clamp(max=num_experts - 1)
    position_P = torch.arange(num_slots, device=expert_P.device)
    at_home_P = (home_slot_E.long()[expert_at_P] == position_P) & (expert_P >= 0)
    # Along a GPU's outer axis a scan has one thread per column; along the inner one it has them all.
    routing_ET = routing_TE.t().contiguous()
    occurrence_PT = (routing_ET.cumsum(1, dtype=torch.int32) - 1).index_select(0, expert_at_P)
    begin_P1, end_P1 = begin_P[:, None], (begin_P + width_P)[:, None]
    mine_PT = (occurrence_PT >= begin_P1) & (occurrence_PT < end_P1)
    mine_PT |= at_home_P[:, None] & (occurrence_PT >= planned_E[expert_at_P][:, None])
    mine_PT &= routing_ET.index_select(0, expert_at_P)
    excess_E = routing_ET.sum(1) - planned_E[:num_experts]
    return mine_PT.t().contiguous(), excess_E.clamp(min=0).sum()
