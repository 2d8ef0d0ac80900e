"""Remapping of a source rank's (token, expert) pairs to physical slots, such that every slot's quota is met exactly."""

from typing import NamedTuple, Self

import torch
from torch.nn.functional import pad

# Letters: T tokens, K top-k, Z = T*K pairs in token order, E experts, P physical slots of all ranks, J = 1 + P + E intervals; X
# any leading axes (rows).

_EXPERT = 2**32  # length of an expert's section on the line of all experts' pairs


class Intervals(NamedTuple):
    """Pairs of one source as intervals on a line. An expert's planned pairs come first, slot by slot, then its drift at home."""

    end_XJ: torch.Tensor  # int64, ends of the intervals, ascending
    slot_XJ: torch.Tensor  # int64
    unplanned_XJ: torch.Tensor  # bool

    @classmethod
    def of(cls, split_XP: torch.Tensor, expert_XP: torch.Tensor, home_slot_XE: torch.Tensor) -> Self:
        """Returns the intervals of every row. Takes the same arguments as `remap`, for all rows and with any integer dtypes."""
        num_experts, (*rows, num_slots) = home_slot_XE.shape[-1], expert_XP.shape
        line = _line(split_XP, expert_XP, num_experts)
        end_XP = line.number_XP * _EXPERT + line.begin_XP + line.width_XP
        end_E = torch.arange(1, num_experts + 1, device=end_XP.device) * _EXPERT - 1
        # A slot without pairs follows the one with the same end, so that no place is found in it.
        # Slot -1 comes first and takes numbers below 0, which are not experts. Code that counts pairs by slot fails on it.
        end_XJ, order_XJ = torch.cat([pad(end_XP, (1, 0)), end_E.expand(*rows, -1)], dim=-1).sort(dim=-1, stable=True)
        slot_P, home_XE = torch.arange(-1, num_slots, device=end_XP.device), home_slot_XE.long().expand(*rows, -1)
        slot_XJ = torch.cat([slot_P.expand(*rows, -1), home_XE], dim=-1).gather(-1, order_XJ)
        return cls(end_XJ, slot_XJ, order_XJ > num_slots)

    def row(self, *index: int) -> Self:
        """Returns the intervals of one row."""
        return type(self)(*(values[index] for values in self))


def remap(
    topk_TK: torch.Tensor, split_P: torch.Tensor, expert_P: torch.Tensor, home_slot_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Maps the pairs that one source rank has in one layer and one micro-step to physical slots.

    The slots of an expert are filled in ascending order. Each slot p gets the next ``split_P[p]`` pairs in token order. Any
    further pairs of the expert are drift and go to its home slot. Drift is therefore always served correctly, and only a home
    slot can get more than its split. All tensors must be on one device. If it is an accelerator, the host does not wait for it.

    Args:
        topk_TK: Logical experts of each token, any integer dtype.
        split_P: Number of pairs that the plan sends from this source to each slot, any integer dtype. It is zero for unused
            slots.
        expert_P: Logical expert in each slot, any integer dtype. -1 marks an empty slot.
        home_slot_E: Physical home slot of each expert, any integer dtype.

    Returns:
        slot_TK: Physical slot of each pair, int64.
        num_drift: Number of drift pairs, int64 [].
    """
    return remap_planned(topk_TK, Intervals.of(split_P, expert_P, home_slot_E))


def remap_planned(topk_TK: torch.Tensor, planned: Intervals) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the work of `remap` for one row whose intervals are given. A stage computes the intervals of all rows at once."""
    end_J, slot_J, unplanned_J = planned
    expert_Z = topk_TK.reshape(-1)
    # The number of earlier pairs with the same expert is the distance to the first of these pairs in sorted order.
    sorted_Z, order_Z = narrow(expert_Z, len(slot_J)).sort(stable=True)
    place_Z = torch.arange(len(order_Z), device=order_Z.device) - torch.searchsorted(sorted_Z, sorted_Z)
    occurrence_Z = torch.empty_like(order_Z).scatter_(0, order_Z, place_Z)
    at_Z = torch.searchsorted(end_J, occurrence_Z.add_(expert_Z, alpha=_EXPERT), right=True)
    return slot_J[at_Z].view(topk_TK.shape), unplanned_J[at_Z].sum()


def narrow(numbers: torch.Tensor, most: int) -> torch.Tensor:
    """Casts numbers below `most` to a narrow dtype.

    Sorting narrow keys is faster, because a GPU sort makes one pass for every byte of its keys.
    """
    return numbers.to(torch.int16 if most < 2**15 else torch.int32)


class _Line(NamedTuple):
    number_XP: torch.Tensor  # index of the expert; empty slots have the index after the last expert
    width_XP: torch.Tensor
    begin_XP: torch.Tensor  # pairs that earlier slots of the expert take
    planned_XE: torch.Tensor  # planned pairs per expert, with one more entry for empty slots


def _line(split_XP: torch.Tensor, expert_XP: torch.Tensor, num_experts: int) -> _Line:
    number_XP = torch.where(expert_XP >= 0, expert_XP, num_experts).long()
    width_XP = torch.where(expert_XP >= 0, split_XP, 0).long()
    planned_XE = width_XP.new_zeros(*width_XP.shape[:-1], num_experts + 1).scatter_add_(-1, number_XP, width_XP)
    order_XP = torch.argsort(number_XP, dim=-1, stable=True)
    in_order_XP, first_XE = width_XP.gather(-1, order_XP), planned_XE.cumsum(-1) - planned_XE
    before_XP = in_order_XP.cumsum(-1) - in_order_XP - first_XE.gather(-1, number_XP.gather(-1, order_XP))
    return _Line(number_XP, width_XP, torch.empty_like(before_XP).scatter_(-1, order_XP, before_XP), planned_XE)


class DenseIntervals(NamedTuple):
    """For each slot, the interval of its expert's numbered pairs that it takes from one source."""

    expert_XP: torch.Tensor  # int64; arbitrary for empty slots, which take nothing
    begin_XP: torch.Tensor  # int32
    end_XP: torch.Tensor  # int32
    beyond_XP: torch.Tensor  # int32, number from which a slot takes all pairs: the planned pairs at home, elsewhere the maximum
    planned_XE: torch.Tensor  # int64, planned pairs of an expert

    @classmethod
    def of(cls, split_XP: torch.Tensor, expert_XP: torch.Tensor, home_slot_XE: torch.Tensor) -> Self:
        """Returns the intervals of every row. Takes the same arguments as `remap`, for all rows and with any integer dtypes."""
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
        """Returns the intervals of one row."""
        return type(self)(*(values[index] for values in self))


def remap_dense(
    routing_TE: torch.Tensor, split_P: torch.Tensor, expert_P: torch.Tensor, home_slot_E: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variant of `remap` for routers that, like Megatron-Core's, return a mask over tokens and experts.

    ``routing_TE[t, e]`` is True if token t goes to expert e. Returns the same kind of mask over physical slots, in which each
    token has as many entries as before, and the number of drift pairs. All shapes are known in advance, so the host never waits
    for an accelerator.
    """
    return remap_dense_planned(routing_TE, DenseIntervals.of(split_P, expert_P, home_slot_E))


def remap_dense_planned(routing_TE: torch.Tensor, planned: DenseIntervals) -> tuple[torch.Tensor, torch.Tensor]:
    """Does the work of `remap_dense` for one row whose intervals are given."""
    expert_P, begin_P, end_P, beyond_P, planned_E = planned
    # On a GPU, a scan along the outer axis uses one thread per column, and a scan along the inner axis uses all threads.
    routing_ET = routing_TE.t().contiguous()
    occurrence_PT = (routing_ET.cumsum(1, dtype=torch.int32) - 1).index_select(0, expert_P)
    mine_PT = (occurrence_PT >= begin_P[:, None]) & (occurrence_PT < end_P[:, None])
    mine_PT |= occurrence_PT >= beyond_P[:, None]
    mine_PT &= routing_ET.index_select(0, expert_P)
    excess_E = routing_ET.sum(1) - planned_E
    return mine_PT.t().contiguous(), excess_E.clamp(min=0).sum()
