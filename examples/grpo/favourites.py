"""Experts that specialise by task: every task has a favourite group of experts, which gets a given share of its tokens."""

from __future__ import annotations

import torch
from torch import nn

from examples.grpo.settings import Settings
from examples.grpo.task import TASKS

# Letters: T tokens, L MoE layers, K top-k, B groups of experts, D tasks.


class Favourites(nn.Module):
    """A bonus on the score of a task's favourite group, regulated so that the group gets its share of the task's tokens.

    This is the bias of loss-free balancing (Wang et al., "Auxiliary-loss-free load balancing strategy for mixture-of-experts",
    2024) with another target: it decides on the choice of experts and never on their weights. So the static skew follows
    from `Settings.favourite_share`, and not from the rounding of a processor. In every layer the first half of the tasks has
    another favourite than the second, so that the hot rank changes between micro-steps.
    """

    favourite_LD: torch.Tensor
    bonus_LD: torch.Tensor

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.share, self.num_groups = settings.favourite_share, settings.num_groups
        self.group_size = settings.num_experts // settings.num_groups
        second_half_D = torch.arange(len(TASKS)) * 2 // len(TASKS)
        favourite_LD = (torch.arange(settings.num_layers)[:, None] + second_half_D) % settings.num_groups
        self.register_buffer("favourite_LD", favourite_LD)
        self.register_buffer("bonus_LD", torch.zeros(favourite_LD.shape))

    def bonus(self, layer: int, task_T: torch.Tensor) -> torch.Tensor:
        """Bonus of every group for tokens of some tasks, float32 [T, B]."""
        out_TB = torch.zeros(len(task_T), self.num_groups)
        return out_TB.scatter_(1, self.favourite_LD[layer, task_T][:, None], self.bonus_LD[layer, task_T][:, None])

    def counts(self, topk_TLK: torch.Tensor, task_T: torch.Tensor) -> torch.Tensor:
        """Tokens by layer and task, and those of them that got the favourite group: float32 [2, L, D]."""
        favourite_TL = self.favourite_LD.t()[task_T]
        got_TL = topk_TLK[:, :, 0].long() // self.group_size == favourite_TL
        num_DL = torch.zeros(self.bonus_LD.shape[::-1])
        all_DL, got_DL = (num_DL.index_add(0, task_T, of_TL) for of_TL in (torch.ones(got_TL.shape), got_TL.float()))
        return torch.stack([all_DL.t(), got_DL.t()])

    def regulate(self, counts_2LD: torch.Tensor, gain: float) -> None:
        """Moves every bonus towards the share that is wanted.

        Args:
            counts_2LD: What `counts` returned, summed over all ranks.
            gain: Change of a bonus for a share that is off by one.
        """
        num_LD, got_LD = counts_2LD
        self.bonus_LD += gain * (self.share * num_LD - got_LD) / num_LD.clamp(min=1)
