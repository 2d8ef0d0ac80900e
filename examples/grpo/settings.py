"""Sizes of the demo: the model, the pre-training, the GRPO steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One size of the demo; all token counts are over all ranks.

    Attributes:
        num_layers: MoE layers, behind one dense layer.
        num_experts: Experts of a layer.
        num_topk: Experts that serve a token.
        num_groups: A token's experts come from its best group of neighbouring experts (routing with limited groups, as
            DeepSeek-V2 and V3 have it).
        favourite_share: Share of a task's tokens that every layer sends to the task's favourite group. On two ranks this sets the
            static skew, whatever pre-training makes of the router: twice the share, less where tasks of both halves share a row.
        hidden_size: Width of the residual stream.
        ffn_size: Width of an expert.
        num_heads: Attention heads.
        instruction_std: Standard deviation of the initial embedding of a sequence's task; experts specialise by it.
        pretrain_steps: Supervised steps.
        pretrain_batch: Sequences of a supervised step.
        pretrain_lr: Peak of the supervised learning rate.
        mistakes: Share of wrong symbols in the answers of pre-training, which GRPO has to unlearn.
        num_prompts: Prompts of a GRPO step.
        group_size: Answers sampled for each prompt.
        learning_rate: Learning rate of GRPO.
        clip: Largest change of the probability ratio.
        recompute_tokens: Tokens of a micro-step of recompute.
        update_tokens: Tokens of a micro-step of the update.
        reforward: The update keeps no activations of MoE layers and runs their forward again in backward.
        seed: Seed of everything that is drawn.
    """

    num_layers: int = 4
    num_experts: int = 32
    num_topk: int = 4
    num_groups: int = 2
    favourite_share: float = 0.68
    hidden_size: int = 128
    ffn_size: int = 384
    num_heads: int = 4
    instruction_std: float = 0.3
    pretrain_steps: int = 130
    pretrain_batch: int = 96
    pretrain_lr: float = 3e-3
    mistakes: float = 0.06
    num_prompts: int = 128
    group_size: int = 8
    learning_rate: float = 1e-3
    clip: float = 0.2
    recompute_tokens: int = 9216
    update_tokens: int = 9216
    reforward: bool = False
    seed: int = 8


SIZES = {
    "default": Settings(),
    # For tests: everything runs, nothing is learned or measured well.
    "tiny": Settings(
        num_layers=2,
        num_experts=8,
        num_topk=2,
        hidden_size=32,
        ffn_size=32,
        num_heads=2,
        pretrain_steps=4,
        pretrain_batch=16,
        num_prompts=16,
        group_size=2,
        recompute_tokens=256,
        update_tokens=160,
    ),
}
