"""Rollout: answers sampled with a key-value cache, and the experts that every token chose on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from examples.grpo.policy import Policy, WholeSequences, positions
from examples.grpo.task import END, MAX_ANSWER, MAX_PROMPT, Question
from foremoe.base.arrays import Array
from foremoe.runtime.experts import ExpertMath

# Letters: Q sequences, N positions, T tokens, L MoE layers, E experts, K top-k, H hidden size, A heads, C columns of a head;
# P prompts, Z = T*K pairs.


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Answers with their routing; sample q answers prompt q // group_size.

    Attributes:
        token_QN: int64, prompt and answer, zeros behind.
        prompt_Q: Tokens of the prompt, int64.
        length_Q: Tokens of prompt and answer, int64.
        topk_QNLK: uint8, experts of every token that was fed to the model: all but the last of a sequence.
    """

    token_QN: Array
    prompt_Q: Array
    length_Q: Array
    topk_QNLK: Array

    def answers(self) -> list[tuple[int, ...]]:
        """The answer of every sample."""
        cuts = zip(self.token_QN.tolist(), self.prompt_Q.tolist(), self.length_Q.tolist(), strict=True)
        return [tuple(tokens[low:high]) for tokens, low, high in cuts]

    @staticmethod
    def dealt(parts: Sequence[Samples], group_size: int) -> Samples:
        """The samples of several ranks in the order of their prompts, which were dealt to the ranks in turn."""
        num_prompts = sum(len(part.length_Q) for part in parts) // group_size
        prompt_Q = np.concatenate([np.arange(g, num_prompts, len(parts)) for g in range(len(parts))]).repeat(group_size)
        order_Q = np.argsort(prompt_Q, kind="stable")
        names = ("token_QN", "prompt_Q", "length_Q", "topk_QNLK")
        return Samples(*(np.concatenate([getattr(part, name) for part in parts])[order_Q] for name in names))


class LocalExperts:
    """All experts in this process, forward only; rollout has no reason to exchange tokens.

    Args:
        weights: Name -> [L, E, *shape], as `ExpertBank.gather` returns them.
    """

    def __init__(self, weights: Mapping[str, torch.Tensor], math: ExpertMath) -> None:
        self.weights, self.math = list(weights.values()), math

    def __call__(self, layer: int, x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        expert_Z = topk_TK.reshape(-1)
        order_Z = torch.argsort(expert_Z, stable=True)
        num_E = torch.bincount(expert_Z, minlength=self.weights[0].shape[1]).tolist()
        x_ZH = x_TH[order_Z // topk_TK.shape[1]]
        parts = x_ZH.split(num_E)
        y_ZH = torch.cat([self.math.forward(x, [w[layer, e] for w in self.weights])[0] for e, x in enumerate(parts) if len(x)])
        y_ZH *= weight_TK.reshape(-1)[order_Z, None]
        return torch.zeros_like(x_TH).index_add_(0, order_Z // topk_TK.shape[1], y_ZH)


class _Cache:
    """Keys and values of all sequences; attention of one new token of each."""

    def __init__(self, policy: Policy, num_sequences: int, group_size: int, num_positions: int) -> None:
        s = policy.settings
        self.group_size, self.num_heads = group_size, s.num_heads
        shape = (len(policy.blocks), num_sequences, num_positions, s.num_heads, s.hidden_size // s.num_heads)
        self.key, self.value = torch.zeros(shape), torch.zeros(shape)
        self.sequence_Q = torch.arange(num_sequences)
        self.position_Q = torch.zeros(num_sequences, dtype=torch.long)

    def keep(self, block: int, key_PNAC: torch.Tensor, value_PNAC: torch.Tensor) -> None:
        """Takes in the prompts, one for every group of answers."""
        for cache, new in ((self.key, key_PNAC), (self.value, value_PNAC)):
            cache[block, :, : new.shape[1]] = new.repeat_interleave(self.group_size, dim=0)

    def __call__(self, block: int, qkv_QD: torch.Tensor) -> torch.Tensor:
        query, key, value = qkv_QD.view(len(qkv_QD), 3, self.num_heads, -1).unbind(1)
        self.key[block, self.sequence_Q, self.position_Q] = key
        self.value[block, self.sequence_Q, self.position_Q] = value
        end = int(self.position_Q.max()) + 1
        seen_QN = torch.arange(end) <= self.position_Q[:, None]
        out = functional.scaled_dot_product_attention(
            query.unsqueeze(2),
            self.key[block, :, :end].transpose(1, 2),
            self.value[block, :, :end].transpose(1, 2),
            attn_mask=seen_QN[:, None, None],
        )
        return out.reshape(len(qkv_QD), -1)


@torch.no_grad()
def rollout(
    policy: Policy, experts: LocalExperts, asked: Sequence[Question], group_size: int, generator: torch.Generator
) -> Samples:
    """Samples `group_size` answers to every question, at temperature 1."""
    settings = policy.settings
    prompt_P = torch.tensor([len(q.prompt) for q in asked])
    longest = int(prompt_P.max())
    num_positions = MAX_PROMPT + MAX_ANSWER  # the same everywhere, so that samples of several ranks can be joined
    valid_PN = torch.arange(longest) < prompt_P[:, None]
    Q = len(asked) * group_size
    cache = _Cache(policy, Q, group_size, num_positions)
    token_T = torch.tensor([token for q in asked for token in q.prompt])
    instruction_P = torch.tensor([q.prompt[0] for q in asked])
    whole = WholeSequences(valid_PN, settings.num_heads, cache.keep)
    logits_TV, topk_TLK = policy(token_T, instruction_P.repeat_interleave(prompt_P), positions(valid_PN), whole, experts)

    topk = torch.zeros(Q, num_positions, settings.num_layers, settings.num_topk, dtype=torch.uint8)
    token_QN = torch.zeros(Q, num_positions, dtype=torch.long)
    routed = torch.zeros(len(asked), longest, settings.num_layers, settings.num_topk, dtype=torch.uint8)
    routed[valid_PN] = topk_TLK.to(torch.uint8)
    topk[:, :longest] = routed.repeat_interleave(group_size, dim=0)
    filled = torch.zeros(len(asked), longest, dtype=torch.long)
    filled[valid_PN] = token_T
    token_QN[:, :longest] = filled.repeat_interleave(group_size, dim=0)

    instruction_Q = instruction_P.repeat_interleave(group_size)
    prompt_Q = prompt_P.repeat_interleave(group_size)
    length_Q = prompt_Q.clone()
    going_Q = torch.ones(Q, dtype=torch.bool)
    last_T = prompt_P.cumsum(0) - 1
    logits_QV = logits_TV[last_T].repeat_interleave(group_size, dim=0)
    for step in range(MAX_ANSWER):
        new_Q = torch.multinomial(logits_QV.softmax(dim=1), 1, generator=generator)[:, 0]
        at_Q = length_Q[going_Q]
        token_QN[going_Q, at_Q] = new_Q[going_Q]
        length_Q[going_Q] += 1
        going_Q &= new_Q != END
        if not going_Q.any() or step == MAX_ANSWER - 1:
            break
        # Sequences that are over run along, at their last position: nobody reads what they write there.
        cache.position_Q = length_Q - 1
        logits_QV, topk_QLK = policy(new_Q, instruction_Q, cache.position_Q, cache, experts)
        topk[going_Q, cache.position_Q[going_Q]] = topk_QLK[going_Q].to(torch.uint8)
    return Samples(token_QN.numpy(), prompt_Q.numpy(), length_Q.numpy(), topk.numpy())
