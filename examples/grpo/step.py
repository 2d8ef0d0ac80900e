"""One GRPO step: rollout, planning beside the rewards, both stages in every arm, one optimizer step."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from examples.grpo.arms import ARMS, Arms, StageRun
from examples.grpo.experts import ClockedSwiGLU
from examples.grpo.grpo import Batch, advantages
from examples.grpo.planning import Planning, StagePlan, static_skew
from examples.grpo.policy import Policy
from examples.grpo.rollout import LocalExperts, Samples, rollout
from examples.grpo.task import MAX_ANSWER, Question, questions, reward, task_of
from examples.grpo.train import clip_gradients, sum_over_ranks
from foremoe.base.arrays import Array
from foremoe.distributed.group import Group
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.runtime import Runtime
from foremoe.transfer.timeline import Timeline

# Letters: Q sequences, A answer tokens of a micro-step on this rank.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one rank knows of one step.

    Attributes:
        reward: Mean over all samples.
        rollout_s: Seconds of rollout.
        plan_s: Seconds of planning.
        plan_hidden_fraction: As `Planning.hidden_fraction`.
        runs: (stage, arm) -> what it took.
        skew: Stage -> mean over its rows of (static, planned).
        num_replicas: Replicas of both stages' plans.
    """

    reward: float
    rollout_s: float
    plan_s: float
    plan_hidden_fraction: float
    runs: dict[tuple[str, str], StageRun]
    skew: dict[str, tuple[float, float]]
    num_replicas: int

    def to_message(self) -> dict[str, Any]:
        """Plain values and arrays, which ranks can gather."""
        runs = [(*at, _fields(run)) for at, run in self.runs.items()]
        return _fields(self) | {"runs": runs}

    @staticmethod
    def from_message(values: dict[str, Any]) -> StepRecord:
        """The record that another rank has sent."""
        runs = {(stage, arm): StageRun(**run) for stage, arm, run in values["runs"]}
        return StepRecord(**values | {"runs": runs})


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def collect(policy: Policy, bank: ExpertBank, group: Group, step: int) -> tuple[Samples, list[Question], Samples]:
    """All ranks' samples of a step, and this rank's own questions and samples; collective."""
    s = policy.settings
    asked = questions(s.num_prompts, np.random.default_rng([s.seed, 2, step]))[group.rank :: group.size]
    experts = LocalExperts(bank.gather(group), bank.math)
    generator = torch.Generator().manual_seed((s.seed * 1009 + step) * 64 + group.rank)
    own = rollout(policy, experts, asked, s.group_size, generator)
    everyone = [Samples(*arrays) for arrays in group.gather((own.token_QN, own.prompt_Q, own.length_Q, own.topk_QNLK))]
    return Samples.dealt(everyone, s.group_size), asked, own


def own_rewards(asked: Sequence[Question], own: Samples, group_size: int) -> Array:
    """float64 [Q]: rewards of this rank's samples."""
    return np.array([reward(asked[q // group_size], answer) for q, answer in enumerate(own.answers())])


class Trainer:
    """GRPO on one rank.

    Args:
        optimizer: The one of pre-training.
        redundant: R of every plan.
    """

    def __init__(
        self,
        policy: Policy,
        bank: ExpertBank,
        runtime: Runtime,
        optimizer: torch.optim.Optimizer,
        clock: ClockedSwiGLU,
        redundant: int,
    ) -> None:
        self.policy, self.bank, self.runtime, self.optimizer = policy, bank, runtime, optimizer
        self.clock, self.redundant = clock, redundant
        self.last: tuple[StagePlan, Timeline] | None = None  # the last update by a plan
        for param_group in optimizer.param_groups:
            param_group["lr"] = policy.settings.learning_rate
        # Adam's scales are as good for GRPO as for pre-training; its momentum points where pre-training was going.
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    def step(self, step: int) -> StepRecord:
        """Collective."""
        group, s = self.runtime.group, self.policy.settings
        begin_s = time.perf_counter()
        samples, asked, own = collect(self.policy, self.bank, group, step)
        rollout_s = time.perf_counter() - begin_s
        planning = Planning(samples, s, self.redundant, group.rank, group.size)
        own_reward_Q = own_rewards(asked, own, s.group_size)
        by_rank = group.gather((own_reward_Q, advantages(own_reward_Q, s.group_size)))
        plans = planning.result()
        reward_Q, advantage_Q = (_dealt([part[i] for part in by_rank], s.group_size) for i in range(2))
        batches = {stage: batches_of(samples, planned, group.rank) for stage, planned in plans.items()}
        runs = self._run_arms(plans, batches, advantage_Q, int((samples.length_Q - samples.prompt_Q).sum()), step)
        self._regulate(samples)
        return StepRecord(
            reward=float(reward_Q.mean()),
            rollout_s=rollout_s,
            plan_s=planning.plan_s,
            plan_hidden_fraction=planning.hidden_fraction,
            runs=runs,
            skew={x: (float(static_skew(p.workload).mean()), float(p.plan.skew_ML.mean())) for x, p in plans.items()},
            num_replicas=sum(p.plan.num_replicas for p in plans.values()),
        )

    def reward_of(self, step: int) -> float:
        """Mean reward of the rollout that this step would begin with; collective."""
        group, group_size = self.runtime.group, self.policy.settings.group_size
        _, asked, own = collect(self.policy, self.bank, group, step)
        return float(np.mean(group.gather(float(own_rewards(asked, own, group_size).mean()))))

    def _regulate(self, samples: Samples) -> None:
        """Keeps the shares of favourite groups while the router learns; every rank has all samples."""
        favourites, whole = self.policy.favourites, Batch.of(samples, np.arange(len(samples.length_Q)))
        favourites.regulate(favourites.counts(whole.topk_TLK, task_of(whole.instruction_T)), gain=1.0)

    def _run_arms(
        self, plans: dict[str, StagePlan], batches: dict[str, list[Batch]], advantage_Q: Array, num_tokens: int, step: int
    ) -> dict[tuple[str, str], StageRun]:
        """Every arm from the same parameters; the optimizer takes the gradients of the foremoe arm."""
        arms = Arms(self.policy, self.runtime, self.clock, plans)
        params = [*self.policy.parameters(), *self.bank.parameters()]
        advantage = torch.from_numpy(advantage_Q).float()
        runs, kept = {}, []
        for arm in (*ARMS[step % len(ARMS) :], *ARMS[: step % len(ARMS)]):
            runs["recompute", arm], log_probs = arms.recompute(arm, batches["recompute"])
            old = torch.zeros(len(advantage) * MAX_ANSWER)
            for batch, log_prob_A in zip(batches["recompute"], log_probs, strict=True):
                old[batch.place_A] = log_prob_A
            dist.all_reduce(old)
            places = [batch.place_A for batch in batches["update"]]
            runs["update", arm] = arms.update(
                arm,
                batches["update"],
                [old[at_A] for at_A in places],
                [advantage[at_A // MAX_ANSWER] for at_A in places],
                num_tokens,
            )
            if arm == "foremoe":
                kept = [None if p.grad is None else p.grad.clone() for p in params]
            for p in params:
                p.grad = None
        for p, grad in zip(params, kept, strict=True):
            p.grad = grad
        self.last = plans["update"], arms.timelines["update"]
        sum_over_ranks(self.policy.parameters())
        clip_gradients(self.policy.parameters(), self.bank.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return runs


def _dealt(parts: Sequence[Array], group_size: int) -> Array:
    """Numbers of all ranks' samples in the order of `Samples.dealt`."""
    G, num_prompts = len(parts), sum(map(len, parts)) // group_size
    out_PG = np.empty((num_prompts, group_size))
    for g, part in enumerate(parts):
        out_PG[g::G] = part.reshape(-1, group_size)
    return out_PG.ravel()


def batches_of(samples: Samples, planned: StagePlan, rank: int) -> list[Batch]:
    """This rank's part of every micro-step of a stage."""
    work = planned.workload
    assert work.micro_step_Q is not None and work.rank_Q is not None
    return [Batch.of(samples, np.flatnonzero((work.micro_step_Q == m) & (work.rank_Q == rank))) for m in range(work.M)]
