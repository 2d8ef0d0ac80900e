"""The arms: one stage of the same recorded rollouts, run at home, by foremoe's plan, or with routing forced to be even."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from examples.grpo.experts import ClockedExperts, ClockedSwiGLU
from examples.grpo.grpo import Batch, balanced_topk, log_probs, policy_loss
from examples.grpo.planning import StagePlan
from examples.grpo.policy import Policy
from foremoe.base.arrays import Array
from foremoe.runtime.runtime import Runtime
from foremoe.transfer.timeline import Timeline

# Letters: M micro-steps, L layers, A answer tokens of a micro-step on this rank; 2: forward, backward.

ARMS = ("static", "foremoe", "balanced")
SHOWN = {"static": "static", "foremoe": "foremoe", "balanced": "force-balanced"}  # what tables and docs call them


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One stage of one arm on one rank.

    Attributes:
        wall_s: From barrier to barrier.
        cpu_s_ML2: CPU seconds of expert compute, [M, L, 2].
        loss_M: Loss of this rank's tokens, a list with one number for each micro-step (recompute: negative log-likelihood).
        scale_M: Sum of the absolute values that `loss_M` sums up.
        report: Figures of the runtime.
        grad_square: Sum of the squared gradients of this rank's experts; 0 in recompute.
    """

    wall_s: float
    cpu_s_ML2: Array
    loss_M: list[float]
    scale_M: list[float]
    report: dict[str, Any]
    grad_square: float


class Arms:
    """Runs stages of one step; parameters are the same for every arm, gradients are left in place by `update`."""

    def __init__(self, policy: Policy, runtime: Runtime, clock: ClockedSwiGLU, plans: dict[str, StagePlan]) -> None:
        self.policy, self.runtime, self.clock, self.plans = policy, runtime, clock, plans
        self._planned_before = False
        self.timelines: dict[str, Timeline] = {}  # by stage, of the foremoe arm

    def recompute(self, arm: str, batches: Sequence[Batch]) -> tuple[StageRun, list[torch.Tensor]]:
        """Forward only; also the old log-probabilities of the rank's answer tokens by micro-step."""
        old: list[torch.Tensor] = []

        def micro_step(m: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                log_prob_A = self._log_probs(arm, m, batch)
            old.append(log_prob_A)
            return -log_prob_A.sum(), log_prob_A.abs().sum()

        return self._run("recompute", arm, batches, micro_step), old

    def update(
        self, arm: str, batches: Sequence[Batch], old: Sequence[torch.Tensor], advantage: Sequence[torch.Tensor], num_tokens: int
    ) -> StageRun:
        """Forward and backward of every micro-step.

        Args:
            old: Old log-probabilities by micro-step, [A].
            advantage: Advantages by micro-step, [A].
            num_tokens: Answer tokens of the step on all ranks; the loss is their mean.
        """

        def micro_step(m: int, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
            part_A = policy_loss(self._log_probs(arm, m, batch), old[m], advantage[m], self.policy.settings.clip) / num_tokens
            loss = part_A.sum()
            loss.backward()
            return loss.detach(), part_A.detach().abs().sum()

        return self._run("update", arm, batches, micro_step)

    def _log_probs(self, arm: str, m: int, batch: Batch) -> torch.Tensor:
        topk_TLK = batch.topk_TLK
        if arm == "balanced":
            topk_TLK = balanced_topk(topk_TLK, self.policy.settings.num_experts)
        return log_probs(self.policy, batch, ClockedExperts(self.runtime, self.clock, m), topk_TLK)

    def _run(self, stage: str, arm: str, batches: Sequence[Batch], micro_step: Any) -> StageRun:
        planned = self.plans[stage]
        self.clock.start()
        self.runtime.group.barrier()
        begin_s = time.perf_counter()
        if arm == "foremoe":
            layers, micro_steps = range(planned.plan.L), range(planned.plan.M)
            routing = {(m, layer): batches[m].topk_TLK[:, layer] for m in micro_steps for layer in layers}
            self.runtime.begin(planned.plan, planned.split_MLP, routing=routing, same_weights=self._planned_before)
            self._planned_before = True
        else:
            self.runtime.begin_home()
        losses = [micro_step(m, batches[m]) for m in range(planned.plan.M)]
        report = self.runtime.end()
        self.runtime.group.barrier()
        wall_s = time.perf_counter() - begin_s
        if arm == "foremoe" and report.timeline is not None:
            self.timelines[stage] = report.timeline
        return StageRun(
            wall_s=wall_s,
            cpu_s_ML2=self.clock.seconds_ML2(planned.workload.M, planned.workload.L),
            loss_M=[float(loss) for loss, _ in losses],
            scale_M=[float(scale) for _, scale in losses],
            report=report.to_dict(),
            grad_square=sum(float(p.grad.square().sum()) for p in self.runtime.bank.parameters() if p.grad is not None),
        )
