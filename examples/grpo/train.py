"""What pre-training and GRPO share: gradients over ranks, and supervised steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from examples.grpo.grpo import Batch
from examples.grpo.policy import Policy, WholeSequences
from examples.grpo.rollout import Samples
from examples.grpo.settings import Settings
from examples.grpo.task import TASKS, question, task_of, with_mistakes
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.runtime import Runtime

# Letters: Q sequences.

_MAX_NORM = 1.0
_WARM_UP = 30


def sum_over_ranks(shared: Iterable[nn.Parameter]) -> None:
    """Gradients of parameters that every rank holds become their sum over ranks. Experts' gradients are whole already."""
    grads = [p.grad for p in shared if p.grad is not None]
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def clip_gradients(shared: Iterable[nn.Parameter], experts: Iterable[nn.Parameter]) -> float:
    """Scales all gradients to a norm of at most 1 over the whole model; returns the norm before."""
    own, both = [p.grad for p in experts if p.grad is not None], [p.grad for p in shared if p.grad is not None]
    square = torch.stack(torch._foreach_norm(own)).square().sum()
    dist.all_reduce(square)
    norm = float((square + torch.stack(torch._foreach_norm(both)).square().sum()).sqrt())
    if norm > _MAX_NORM:
        torch._foreach_mul_([*own, *both], _MAX_NORM / norm)
    return norm


def optimizer_of(policy: Policy, bank: ExpertBank) -> torch.optim.Optimizer:
    """AdamW over the policy and this rank's experts."""
    params = [*policy.parameters(), *bank.parameters()]
    return torch.optim.AdamW(params, betas=(0.9, 0.98), weight_decay=0.01, fused=True)


def demonstrations(num: int, random: np.random.Generator, settings: Settings) -> Samples:
    """Answers to random questions as a careless teacher gives them; without routing."""
    asked = [question(int(random.integers(len(TASKS))), random) for _ in range(num)]
    longest = max(len(q.prompt) + len(q.answer) for q in asked)
    token_QN = np.zeros((num, longest), np.int64)
    for q, tokens in enumerate(asked):
        answer = with_mistakes(tokens.answer, settings.mistakes, random)
        token_QN[q, : len(tokens.prompt) + len(answer)] = [*tokens.prompt, *answer]
    prompt_Q = np.array([len(q.prompt) for q in asked])
    length_Q = prompt_Q + [len(q.answer) for q in asked]
    return Samples(token_QN, prompt_Q, length_Q, np.zeros((num, longest, settings.num_layers, settings.num_topk), np.uint8))


def pretrain(
    policy: Policy,
    bank: ExpertBank,
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    progress: Callable[[int, int, float], None],
) -> None:
    """A few supervised steps, at home placement and without any balancing loss.

    Args:
        progress: Called with steps done, steps in all, and the mean loss of an answer token.
    """
    settings, group = policy.settings, runtime.group
    random = np.random.default_rng([settings.seed, 1, group.rank])
    for step in range(settings.pretrain_steps):
        warm_up, left = min(1.0, (step + 1) / _WARM_UP), max(0.1, 1 - step / settings.pretrain_steps)
        for param_group in optimizer.param_groups:
            param_group["lr"] = settings.pretrain_lr * warm_up * left
        num = math.ceil(settings.pretrain_batch / group.size)
        samples = demonstrations(num, random, settings)
        batch = Batch.of(samples, np.arange(num))
        runtime.begin_home()
        attend = WholeSequences(batch.valid_QN, settings.num_heads)
        logits_TV, topk_TLK = policy(batch.token_T, batch.instruction_T, batch.position_T, attend, runtime.moe)
        loss = functional.cross_entropy(logits_TV[batch.answer_T], batch.target_T[batch.answer_T]) / group.size
        loss.backward()
        runtime.end()
        counts_2LD = policy.favourites.counts(topk_TLK, task_of(batch.instruction_T))
        dist.all_reduce(counts_2LD)
        policy.favourites.regulate(counts_2LD, gain=left)
        sum_over_ranks(policy.parameters())
        clip_gradients(policy.parameters(), bank.parameters())
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, settings.pretrain_steps, float(loss.detach()) * group.size)
