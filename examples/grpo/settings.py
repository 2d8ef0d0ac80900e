"""Sizes of the demo: the model, the pre-training, the GRPO steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One size of the demo; all token counts are over all ranks.

    Attributes:
        num_layers: MoE layers, behind one dense layer.
        num_experts, num_topk: experts of a layer, and how many serve a token.
        num_groups, num_topk_groups: a token's experts come from its best groups of neighbouring experts (routing with limited
            groups, as DeepSeek-V2 and V3 have it).
        hidden_size, ffn_size, num_heads: widths.
        instruction_std: of the initial embedding that tells every token of a sequence what its task is; experts specialise by it.
        pretrain_steps, pretrain_batch, pretrain_lr: supervised steps, sequences in each, peak of the learning rate.
        mistakes: share of wrong symbols in the answers of pre-training, which GRPO has to unlearn.
        num_prompts, group_size: prompts of a GRPO step, and answers sampled for each.
        learning_rate: of GRPO.   clip: of the probability ratio.
        recompute_tokens, update_tokens: budget of a micro-step of each stage.
        seed: of everything that is drawn.
    """

    num_layers: int = 4
    num_experts: int = 32
    num_topk: int = 4
    num_groups: int = 2
    num_topk_groups: int = 1
    hidden_size: int = 128
    ffn_size: int = 384
    num_heads: int = 4
    instruction_std: float = 0.3
    pretrain_steps: int = 170
    pretrain_batch: int = 96
    pretrain_lr: float = 3e-3
    mistakes: float = 0.06
    num_prompts: int = 128
    group_size: int = 8
    learning_rate: float = 1e-3
    clip: float = 0.2
    recompute_tokens: int = 9216
    update_tokens: int = 9216
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
