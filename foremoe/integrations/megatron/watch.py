"""Observation of a stage that runs without foremoe, to estimate how much replicas would gain with its routing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from foremoe.base.errors import InputError
from foremoe.distributed.planning import Planned, plan_together
from foremoe.integrations.megatron.planning import Planning
from foremoe.plan.plan import Plan
from foremoe.workload.skew import mean_skew

# Letters: M micro-steps, L MoE layers of this rank, E experts, G ranks of the EP group.

TRIED = (1, 2)  # redundant slots per rank


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Watched:
    """A stage, as seen by one rank, in which all experts were computed at home.

    Attributes:
        planned: Plans with one and with two redundant slots per rank. They did not run.
        unknown: Share of this rank's pairs whose routing is unknown in `work`.
    """

    planned: tuple[Planned, ...]
    unknown: float

    @property
    def plan(self) -> Plan:
        """Plan for the EP group's counts."""
        return self.planned[0].plan

    def metrics(self) -> dict[str, float]:
        """Returns means over rows and totals, such as skews and the load of the hottest expert divided by the mean load."""
        load_MLE = self.plan.load_MLE
        home_MLG = load_MLE.reshape(*load_MLE.shape[:2], self.plan.G, -1).sum(axis=3)
        out = {"skew_before": mean_skew(home_MLG), "hottest": mean_skew(load_MLE), "unknown": self.unknown}
        out |= {f"skew_at_{num}": of.plan.skew_mean for num, of in zip(TRIED, self.planned, strict=True)}
        return out | {"plan_s": sum(of.plan_s for of in self.planned), "share_s": sum(of.share_s for of in self.planned)}


def watch(planning: Planning, work: Any, stage: str) -> Watched:
    """Plans a stage for one and for two redundant slots per rank but does not run the plans. Collective over the EP group.

    Raises:
        InputError: `work` is already a plan, or does not match the model. Raised on all ranks.
    """
    if isinstance(work, Plan | Planned):
        raise InputError("a plan cannot be run with redundant=0, which only watches; give work, or attach with redundant=1.")
    ((task, load_MLE, tokens_M),) = planning.agree([(work, stage)], planning.home_LE)
    settings = planning.settings
    planned = tuple(
        plan_together(
            planning.group, settings.planner, dataclasses.replace(task, redundant=num), load_MLE, tokens_M,
            device=planning.device, plan_limit_s=settings.plan_limit_s,
        )
        for num in TRIED
    )  # fmt: skip
    num_pairs = int(np.sum(tokens_M)) * load_MLE.shape[1] * int(planning.config.moe_router_topk)
    return Watched(planned=planned, unknown=1.0 - float(load_MLE.sum()) / max(num_pairs, 1))
