"""Remap: which physical slot serves each (token, expert) pair of a source rank, so that quotas are met exactly."""

from typing import NamedTuple, Self

import torch
from torch.nn.functional import pad

# Letters: T tokens, K top-k, Z = T*K pairs in token order, E experts, P physical slots of all ranks, J = 1 + P + E intervals; X
# any leading axes (rows).

_EXPERT = 2**32  # places of an expert on the line of all experts' pairs


class Intervals(NamedTuple):
    """The pairs of one source as intervals on one line: each expert's planned ones slot by slot, then all others, at home."""

    end_XJ: torch.Tensor  # int64, where the intervals end, in their order
    slot_XJ: torch.Tensor  # int64
    unplanned_XJ: torch.Tensor  # bool

    @classmethod
    def of(cls, split_XP: torch.Tensor, expert_XP: torch.Tensor, home_slot_XE: torch.Tensor) -> Self:
        """Of every row; any integer dtypes, as in `remap`."""
        num_experts, (*rows, num_slots) = home_slot_XE.shape[-1], expert_XP.shape
        line = _line(split_XP, expert_XP, num_experts)
        end_XP = line.number_XP * _EXPERT + line.begin_XP + line.width_XP
        end_E = torch.arange(1, num_experts + 1, device=end_XP.device) * _EXPERT - 1
        # A slot that takes nothing comes behind the one that ends where it does, so that no place is found in it.
        # In front of all, slot -1 takes numbers below 0, which are no experts: whoever counts pairs by slot fails there.
        end_XJ, order_XJ = torch.cat([pad(end_XP, (1, 0)), end_E.expand(*rows, -1)], dim=-1).sort(dim=-1, stable=True)
        slot_P, home_XE = torch.arange(-1, num_slots, device=end_XP.device), home_slot_XE.long().expand(*rows, -1)
        slot_XJ = torch.cat([slot_P.expand(*rows, -1), home_XE], dim=-1).gather(-1, order_XJ)
        return cls(end_XJ, slot_XJ, order_XJ > num_slots)

    def row(self, *index: int) -> Self:
        """One of the rows."""
        return type(self)(*(values[index] for values in self))


def remap(
    topk_TK: torch.Tensor, split_P: torch.Tensor, expert_P: torch.Tensor, home_slot_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps the pairs of one source rank, one layer and one micro-step to physical slots.

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
    return remap_planned(topk_TK, Intervals.of(split_P, expert_P, home_slot_E))


def remap_planned(topk_TK: torch.Tensor, planned: Intervals) -> tuple[torch.Tensor, torch.Tensor]:
    """`remap` for intervals of one row that are known already: a stage makes those of all rows at once."""
    end_J, slot_J, unplanned_J = planned
    expert_Z = topk_TK.reshape(-1)
    # How many earlier pairs have the same expert is the place in sorted order behind the first of them.
    sorted_Z, order_Z = narrow(expert_Z, len(slot_J)).sort(stable=True)
    place_Z = torch.arange(len(order_Z), device=order_Z.device) - torch.searchsorted(sorted_Z, sorted_Z)
    occurrence_Z = torch.empty_like(order_Z).scatter_(0, order_Z, place_Z)
    at_Z = torch.searchsorted(end_J, occurrence_Z.add_(expert_Z, alpha=_EXPERT), right=True)
    return slot_J[at_Z].view(topk_TK.shape), unplanned_J[at_Z].sum()


def narrow(numbers: torch.Tensor, most: int) -> torch.Tensor:
    """Numbers below `most` to be sorted: a GPU passes over them once for every byte that they have."""
    return numbers.to(torch.int16 if most < 2**15 else torch.int32)


class _Line(NamedTuple):
    number_XP: torch.Tensor  # of the expert; empty slots have one behind all experts
    width_XP: torch.Tensor
    begin_XP: torch.Tensor  # what earlier slots of the expert take
    planned_XE: torch.Tensor  # one more for empty slots


def _line(split_XP: torch.Tensor, expert_XP: torch.Tensor, num_experts: int) -> _Line:
    number_XP = torch.where(expert_XP >= 0, expert_XP, num_experts).long()
    width_XP = torch.where(expert_XP >= 0, split_XP, 0).long()
    planned_XE = width_XP.new_zeros(*width_XP.shape[:-1], num_experts + 1).scatter_add_(-1, number_XP, width_XP)
    order_XP = torch.argsort(number_XP, dim=-1, stable=True)
    in_order_XP, first_XE = width_XP.gather(-1, order_XP), planned_XE.cumsum(-1) - planned_XE
    before_XP = in_order_XP.cumsum(-1) - in_order_XP - first_XE.gather(-1, number_XP.gather(-1, order_XP))
    return _Line(number_XP, width_XP, torch.empty_like(before_XP).scatter_(-1, order_XP, before_XP), planned_XE)


class DenseIntervals(NamedTuple):
    """Which of an expert's planned pairs, by number, each slot takes from one source."""

    expert_XP: torch.Tensor  # int64; any in empty slots, which take nothing
    begin_XP: torch.Tensor  # int32
    end_XP: torch.Tensor  # int32
    beyond_XP: torch.Tensor  # int32, from where on a slot takes all pairs: behind what is planned at home, elsewhere never
    planned_XE: torch.Tensor  # int64, pairs of an expert

    @classmethod
    def of(cls, split_XP: torch.Tensor, expert_XP: torch.Tensor, home_slot_XE: torch.Tensor) -> Self:
        """Of every row; any integer dtypes, as in `remap`."""
        num_experts, num_slots = home_slot_XE.shape[-1], expert_XP.shape[-1]
        number_XP, width_XP, begin_XP, planned_XE = _line(split_XP, expert_XP, num_experts)
        expert_at_XP = number_XP.clamp(max=num_experts - 1)
        position_P = torch.arange(num_slots, device=expert_XP.device)
        home_XE = home_slot_XE.long().expand(*expert_XP.shape[:-1], -1)
        at_home_XP = (home_XE.gather(-1, expert_at_XP) == position_P) & (expert_XP >= 0)
        beyond_XP = torch.where(at_home_XP, planned_XE.gather(-1, number_XP), torch.iinfo(torch.int32).max)
        return cls(
            expert_at_XP, begin_XP.int(), (begin_XP + width_XP).int(), beyond_XP.int(), planned_XE[..., :num_experts].contiguous()
        )

    def row(self, *index: int) -> Self:
        """One of the rows."""
        return type(self)(*(values[index] for values in self))


def remap_dense(
    routing_TE: torch.Tensor, split_P: torch.Tensor, expert_P: torch.Tensor, home_slot_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`remap` for routers that say yes or no per token and expert, as Megatron-Core's do.

    `routing_TE` says, as bool, that token t goes to expert e; the result says the same of physical slot p, as often in every row,
    and comes with the number of pairs beyond the split. Nothing waits for an accelerator: all shapes are known beforehand.
    """
    return remap_dense_planned(routing_TE, DenseIntervals.of(split_P, expert_P, home_slot_E))


def remap_dense_planned(routing_TE: torch.Tensor, planned: DenseIntervals) -> tuple[torch.Tensor, torch.Tensor]:
    """`remap_dense` for intervals of one row that are known already."""
    expert_P, begin_P, end_P, beyond_P, planned_E = planned
    # Along a GPU's outer axis a scan has one thread per column; along the inner one it has them all.
    routing_ET = routing_TE.t().contiguous()
    occurrence_PT = (routing_ET.cumsum(1, dtype=torch.int32) - 1).index_select(0, expert_P)
    mine_PT = (occurrence_PT >= begin_P[:, None]) & (occurrence_PT < end_P[:, None])
    mine_PT |= occurrence_PT >= beyond_P[:, None]
    mine_PT &= routing_ET.index_select(0, expert_P)
    excess_E = routing_ET.sum(1) - planned_E
    return mine_PT.t().contiguous(), excess_E.clamp(min=0).sum()
