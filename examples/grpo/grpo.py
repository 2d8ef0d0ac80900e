"""GRPO: advantages within a group of answers, micro-batches of samples, and the clipped policy-gradient loss."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from examples.grpo.policy import Experts, Policy, WholeSequences, positions
from examples.grpo.rollout import Samples
from examples.grpo.task import MAX_ANSWER
from foremoe.base.arrays import Array

# Letters: Q sequences, N positions, T tokens that are fed to the model, L MoE layers, K top-k, V vocabulary; A answer tokens.

_SMALLEST_SPREAD = 1e-6


def advantages(reward_Q: Array, group_size: int) -> Array:
    """float64 [Q]: rewards less the mean of their group, over its standard deviation; 0 where a group's rewards are all equal.

    Args:
        reward_Q: Groups of `group_size` answers to one prompt, one after the other.
    """
    reward_PG = np.asarray(reward_Q, np.float64).reshape(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(axis=1, keepdims=True)
    spread_P1 = reward_PG.std(axis=1, keepdims=True)
    out: Array = np.where(spread_P1 > _SMALLEST_SPREAD, centred_PG / np.maximum(spread_P1, _SMALLEST_SPREAD), 0.0).ravel()
    return out


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Whole sequences of one micro-step on one rank, each without its last token, which is never fed.

    Attributes:
        valid_QN: True where a sequence has a token.
        token_T: Tokens that are fed.
        instruction_T: First token of each token's sequence.
        position_T: Positions of the tokens.
        topk_TLK: Recorded experts to replay.
        target_T: The tokens that follow.
        answer_T: True where the target belongs to an answer.
        place_A: Sample * MAX_ANSWER + place in the answer, of every answer token: where it is found again in other batches.
    """

    valid_QN: torch.Tensor
    token_T: torch.Tensor
    instruction_T: torch.Tensor
    position_T: torch.Tensor
    topk_TLK: torch.Tensor
    target_T: torch.Tensor
    answer_T: torch.Tensor
    place_A: torch.Tensor

    @staticmethod
    def of(samples: Samples, sequences: Array) -> Batch:
        """The batch of some samples."""
        fed_Q = samples.length_Q[sequences] - 1
        num_positions = int(fed_Q.max(initial=0))
        at_N = np.arange(num_positions)
        valid_QN = at_N < fed_Q[:, None]
        tokens_QN = samples.token_QN[sequences]
        # The last token of the prompt predicts the first of the answer.
        in_answer_QN = at_N - (samples.prompt_Q[sequences][:, None] - 1)
        answer_QN = valid_QN & (in_answer_QN >= 0)
        place_QN = sequences[:, None] * MAX_ANSWER + in_answer_QN
        valid, answer_T = torch.from_numpy(valid_QN), torch.from_numpy(answer_QN[valid_QN])
        return Batch(
            valid_QN=valid,
            token_T=torch.from_numpy(tokens_QN[:, :num_positions][valid_QN]),
            instruction_T=torch.from_numpy(np.repeat(tokens_QN[:, 0], fed_Q)),
            position_T=positions(valid),
            topk_TLK=torch.from_numpy(samples.topk_QNLK[sequences][:, :num_positions][valid_QN].astype(np.int64)),
            target_T=torch.from_numpy(tokens_QN[:, 1 : num_positions + 1][valid_QN]),
            answer_T=answer_T,
            place_A=torch.from_numpy(place_QN[answer_QN]),
        )


def log_probs(policy: Policy, batch: Batch, experts: Experts, topk_TLK: torch.Tensor | None) -> torch.Tensor:
    """float32 [A]: log-probabilities of the batch's answer tokens, in order.

    Args:
        topk_TLK: The experts to use; None lets the router choose.
    """
    attend = WholeSequences(batch.valid_QN, policy.settings.num_heads)
    logits_TV, _ = policy(batch.token_T, batch.instruction_T, batch.position_T, attend, experts, topk_TLK)
    return -functional.cross_entropy(logits_TV[batch.answer_T], batch.target_T[batch.answer_T], reduction="none")


def policy_loss(new_A: torch.Tensor, old_A: torch.Tensor, advantage_A: torch.Tensor, clip: float) -> torch.Tensor:
    """[A]: what every answer token adds to the loss: the clipped surrogate, negated."""
    ratio_A = (new_A - old_A).exp()
    return -torch.minimum(ratio_A * advantage_A, ratio_A.clamp(1 - clip, 1 + clip) * advantage_A)


def balanced_topk(topk_TLK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The same shape with experts in turn, so that all get equally many pairs; a token's experts are distinct."""
    T, L, K = topk_TLK.shape
    return (torch.arange(T * K).view(T, 1, K) % num_experts).expand(T, L, K)
