"""Given routing: the demo's stages on correct answers to its questions, with drawn experts of a chosen skew and no rollout."""

from __future__ import annotations

import numpy as np

from examples.grpo.planning import static_skew, trace_of, workloads_of
from examples.grpo.rollout import Samples
from examples.grpo.settings import Settings
from examples.grpo.task import TASKS, questions
from foremoe.base.errors import InputError

# Letters: Q sequences, N positions, L MoE layers, K top-k, E experts, D kinds of questions, G ranks.

_SPREAD = 0.5  # of the log popularity of experts
_LARGEST = 12.0  # of the log factor by which experts of a hot rank are more popular


def given_samples(settings: Settings, skew: float, num_ranks: int) -> Samples:
    """Samples whose static skew, mean over update rows, is `skew` to a hundredth.

    Each half of the kinds of questions has a hot rank in every layer, whose experts its tokens prefer. Kinds come one after the
    other, so that the hot rank changes from micro-step to micro-step.

    Raises:
        InputError: The skew cannot be reached, or not to a hundredth.
    """
    rng = np.random.default_rng([settings.seed, 3])
    asked = questions(settings.num_prompts * settings.group_size, rng)
    length_Q = np.array([len(q.prompt) + len(q.answer) for q in asked])
    token_QN = np.zeros((len(asked), int(length_Q.max())), np.int64)
    for q, one in enumerate(asked):
        token_QN[q, : length_Q[q]] = [*one.prompt, *one.answer]
    s, D = settings, len(TASKS)
    hot_DL = rng.integers(num_ranks, size=(2, s.num_layers)).repeat(-(-D // 2), axis=0)[:D]
    on_hot_DLE = (np.arange(s.num_experts) * num_ranks // s.num_experts) == hot_DL[..., None]
    plain_DLE = _SPREAD * rng.standard_normal((D, s.num_layers, s.num_experts))
    noise_QNLE = rng.gumbel(size=(*token_QN.shape, s.num_layers, s.num_experts)).astype(np.float32)
    task_Q = np.array([q.task for q in asked])
    prompt_Q = np.array([len(q.prompt) for q in asked])

    def drawn(factor: float) -> tuple[Samples, float]:
        popularity_QLE = (plain_DLE + factor * on_hot_DLE).astype(np.float32)[task_Q]
        score_QNLE = noise_QNLE + popularity_QLE[:, None]
        topk_QNLK = np.argpartition(-score_QNLE, s.num_topk - 1, axis=3)[..., : s.num_topk].astype(np.uint8)
        samples = Samples(token_QN, prompt_Q, length_Q, topk_QNLK)
        work = workloads_of(trace_of(samples, s), s, num_ranks)["update"]
        return samples, float(static_skew(work).mean())

    low, high = 0.0, _LARGEST
    if not drawn(low)[1] - 0.01 <= skew <= drawn(high)[1] + 0.01:
        raise InputError(
            f"a skew of {skew:g} is out of reach of these sizes; choose one from {drawn(low)[1]:.2f} to {drawn(high)[1]:.2f}."
        )
    while high - low >= 1e-4:
        factor = (low + high) / 2.0
        samples, found = drawn(factor)
        if abs(found - skew) <= 0.01:
            return samples
        low, high = (factor, high) if found < skew else (low, factor)
    raise InputError(f"no draw of these sizes has a skew of {skew:g}, {found:.3f} is near; take more sequences or that skew.")
