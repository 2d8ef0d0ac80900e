"""GRPO: advantages, the clipped loss, and rollouts that agree with the model that is trained on them."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from examples.grpo.compiling import Progress
from examples.grpo.grpo import Batch, advantages, balanced_topk, log_probs, policy_loss
from examples.grpo.planning import RECOVERY, problem_of, smallest_redundant, static_skew, trace_of, workloads_of
from examples.grpo.policy import Policy, WholeSequences, positions
from examples.grpo.rollout import LocalExperts, Samples, rollout
from examples.grpo.settings import SIZES
from examples.grpo.task import END, MAX_ANSWER, TASKS, questions
from foremoe.base.compiled import watch_compilation
from foremoe.problem.bounds import load_bound
from foremoe.runtime import ExpertBank
from foremoe.workload.workload import STAGES

SETTINGS = dataclasses.replace(SIZES["tiny"], num_layers=3)


@given(
    group_size=st.integers(1, 6),
    groups=st.lists(st.lists(st.floats(-5, 5), min_size=6, max_size=6), min_size=1, max_size=4),
    scale=st.floats(0.5, 4),
    shift=st.floats(-3, 3),
)
def test_advantages_have_mean_0_and_deviation_1_in_every_group(group_size, groups, scale, shift):
    reward_PG = np.round(np.array(groups)[:, :group_size], 2)
    found_PG = advantages(reward_PG.ravel(), group_size).reshape(-1, group_size)
    assert np.abs(found_PG.mean(axis=1)).max() < 1e-9
    spread_P = reward_PG.std(axis=1)
    assert np.allclose(found_PG.std(axis=1), spread_P > 0)
    assert (np.sign(found_PG.round(9)) == np.sign((reward_PG - reward_PG.mean(axis=1, keepdims=True)).round(9))).all()
    assert np.allclose(found_PG.ravel(), advantages(scale * reward_PG.ravel() + shift, group_size), atol=1e-6)


def test_the_loss_pushes_by_the_advantage_until_it_is_clipped():
    old, advantage = torch.zeros(4), torch.tensor([1.0, -2.0, 1.0, -1.0])
    new = torch.tensor([0.0, 0.0, 0.5, -0.5], requires_grad=True)  # the last two have gone too far already
    loss = policy_loss(new, old, advantage, clip=0.2)
    loss.sum().backward()
    assert torch.allclose(loss, torch.tensor([-1.0, 2.0, -1.2, 0.8]))
    assert torch.allclose(new.grad, torch.tensor([-1.0, 2.0, 0.0, 0.0]))


@pytest.mark.parametrize(("num_tokens", "num_topk", "num_experts"), [(8, 4, 32), (40, 2, 8), (16, 3, 8)])
def test_balanced_routing_gives_all_experts_the_same_load(num_tokens, num_topk, num_experts):
    topk_TLK = balanced_topk(torch.zeros(num_tokens, 2, num_topk, dtype=torch.long), num_experts)
    for layer in range(2):
        assert len(set(np.bincount(topk_TLK[:, layer].flatten(), minlength=num_experts))) == 1
    assert all(len(set(experts)) == num_topk for experts in topk_TLK[:, 0].tolist())


@pytest.fixture(scope="module")
def rolled_out():
    torch.manual_seed(0)
    policy = Policy(SETTINGS)
    bank = ExpertBank(
        num_layers=SETTINGS.num_layers,
        num_experts=SETTINGS.num_experts,
        hidden_size=SETTINGS.hidden_size,
        ffn_size=SETTINGS.ffn_size,
    )
    names = list(bank.shapes)
    weights = {
        name: torch.stack([bank.get_parameter(f"{name}_{x}").detach() for x in range(SETTINGS.num_layers)]) for name in names
    }
    experts = LocalExperts(weights, bank.math)
    asked = questions(16, np.random.default_rng(0))
    return policy, experts, asked, rollout(policy, experts, asked, 3, torch.Generator().manual_seed(0))


def test_rollout_records_what_the_model_does_with_whole_sequences(rolled_out):
    policy, experts, _, samples = rolled_out
    fed_Q = torch.from_numpy(samples.length_Q) - 1
    valid_QN = torch.arange(samples.token_QN.shape[1]) < fed_Q[:, None]
    token_QN = torch.from_numpy(samples.token_QN)
    instruction_T = token_QN[:, 0].repeat_interleave(fed_Q)
    with torch.no_grad():
        attend = WholeSequences(valid_QN, SETTINGS.num_heads)
        _, topk_TLK = policy(token_QN[valid_QN], instruction_T, positions(valid_QN), attend, experts)
    recorded_TLK = torch.from_numpy(samples.topk_QNLK)[valid_QN].long()
    # Scores that tie within rounding may fall the other way.
    assert (topk_TLK.sort(dim=2).values == recorded_TLK.sort(dim=2).values).float().mean() > 0.999


def test_answers_end_at_their_end_or_at_the_limit(rolled_out):
    _, _, asked, samples = rolled_out
    answers = samples.answers()
    assert len(answers) == 3 * len(asked)
    for q, answer in enumerate(answers):
        assert samples.token_QN[q, : samples.prompt_Q[q]].tolist() == list(asked[q // 3].prompt)
        assert END not in answer[:-1] and (answer[-1] == END or len(answer) == MAX_ANSWER)


def test_batches_hold_every_answer_token_once_and_replay_what_was_recorded(rolled_out):
    policy, experts, _, samples = rolled_out
    halves = [Batch.of(samples, at_Q) for at_Q in np.array_split(np.arange(len(samples.length_Q)), 2)]
    place_A = np.concatenate([batch.place_A for batch in halves])
    sequence_A, at_A = np.divmod(place_A, MAX_ANSWER)
    assert len(set(place_A)) == len(place_A) == (samples.length_Q - samples.prompt_Q).sum()
    target_A = np.concatenate([batch.target_T[batch.answer_T] for batch in halves])
    assert (target_A == samples.token_QN[sequence_A, samples.prompt_Q[sequence_A] + at_A]).all()
    with torch.no_grad():
        parts = [log_probs(policy, batch, experts, batch.topk_TLK) for batch in halves]
        whole = Batch.of(samples, np.arange(len(samples.length_Q)))
        assert torch.allclose(torch.cat(parts), log_probs(policy, whole, experts, whole.topk_TLK), atol=1e-5)


def test_an_empty_batch_still_takes_part_in_backward():
    torch.manual_seed(0)
    policy = Policy(SETTINGS)
    samples = Samples(*(np.zeros((0, *shape), np.int64) for shape in ((4,), (), (), (4, SETTINGS.num_layers, SETTINGS.num_topk))))
    found = log_probs(policy, Batch.of(samples, np.arange(0)), lambda layer, x, topk, weight: x, None)
    assert found.shape == (0,) and found.requires_grad
    found.sum().backward()


def test_samples_of_several_ranks_come_in_the_order_of_their_prompts(rolled_out):
    policy, experts, asked, _ = rolled_out
    parts = [rollout(policy, experts, asked[g::2], 2, torch.Generator().manual_seed(g)) for g in range(2)]
    joined = Samples.dealt(parts, 2)
    for q, (tokens, length) in enumerate(zip(joined.token_QN, joined.prompt_Q, strict=True)):
        assert tokens[:length].tolist() == list(asked[q // 2].prompt)


def test_the_default_number_of_redundant_slots_is_the_smallest_that_allows_the_recovery(rolled_out):
    samples = rolled_out[3]
    workloads = workloads_of(trace_of(samples, SETTINGS), SETTINGS, 2)
    assert set(workloads) == set(STAGES)
    assert all(work.load_MLE.sum() == (samples.length_Q - 1).sum() * work.L * work.num_topk for work in workloads.values())

    def reached(redundant):
        shares = []
        for work in workloads.values():
            problem = problem_of(work, SETTINGS, redundant)
            mean_N = problem.load_NE.sum(axis=1) / 2
            before, after = static_skew(work).mean(), (load_bound(problem) / mean_N).mean()
            shares.append((before - after) / (before - 1))
        return min(shares)

    chosen = smallest_redundant(workloads, SETTINGS)
    assert reached(chosen) >= RECOVERY
    assert chosen == 1 or reached(chosen - 1) < RECOVERY


def test_every_task_sends_its_share_to_its_favourite_group_whatever_the_router_likes():
    settings = SIZES["default"]
    policy, random = Policy(settings), torch.Generator().manual_seed(0)
    favourites, num_tasks = policy.favourites, len(TASKS)
    task_T = torch.arange(num_tasks).repeat_interleave(1000)
    liked_LDE = 2.0 * torch.randn(settings.num_layers, num_tasks, settings.num_experts, generator=random)
    for _ in range(150):
        noise_LTE = torch.randn(settings.num_layers, len(task_T), settings.num_experts, generator=random)
        topk_LTK = [
            policy.choose(liked_LDE[layer, task_T] + noise_LTE[layer], favourites.bonus(layer, task_T))
            for layer in range(settings.num_layers)
        ]
        num_LD, got_LD = counts = favourites.counts(torch.stack(topk_LTK, dim=1), task_T)
        favourites.regulate(counts, gain=0.5)
    assert (num_LD == 1000).all()
    assert ((got_LD / num_LD - settings.favourite_share).abs() < 0.1).all()
    # On two ranks a rank holds a group, and a row's load comes from one half of the tasks.
    for half in (slice(0, num_tasks // 2), slice(num_tasks // 2, None)):
        assert ((2 * got_LD[:, half].sum(1) / num_LD[:, half].sum(1) - 2 * settings.favourite_share).abs() < 0.08).all()


def test_compilation_is_announced_and_counted():
    lines = []
    progress = Progress(lines.append)
    with watch_compilation(progress):
        njit(lambda x: x + 1)(1)
    assert progress.num_done >= 1 and lines[0].startswith("compiling kernels")
