"""Planning of both stages in the background, and how many redundant slots are enough."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import numpy as np

from examples.grpo.rollout import Samples
from examples.grpo.settings import Settings
from foremoe.base.arrays import Array
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.planner.planner import Planner
from foremoe.problem.bounds import load_bound
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.routing.trace import RoutingTrace
from foremoe.workload.skew import skew
from foremoe.workload.workload import STAGES, Workload

# Letters: Q sequences, T tokens, L layers, K top-k, M micro-steps, G ranks, E experts, P physical slots.

RECOVERY = 0.95  # share of (static skew - 1) that the smallest R must be able to take away
SLOT_DEPTH = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagePlan:
    """One stage as one rank runs it: who computes what, and the rank's own split."""

    workload: Workload
    problem: Problem
    plan: Plan
    split_MLP: Array


def model_of(settings: Settings) -> Model:
    """The demo's model as planning sees it."""
    hidden = settings.hidden_size
    return Model(
        name="foremoe-demo", num_layers=settings.num_layers, first_moe_layer=1, num_experts=settings.num_experts,
        num_topk=settings.num_topk, hidden_size=hidden, ffn_size=settings.ffn_size, bytes_per_weight=4.0,
        bytes_per_gradient=4.0, bytes_per_activation=4.0, attention_params=4 * hidden * hidden, num_heads=settings.num_heads,
        qk_head_dim=hidden // settings.num_heads, v_head_dim=hidden // settings.num_heads,
        num_expert_groups=settings.num_groups, source="foremoe demo",
    )  # fmt: skip


def cluster_of(num_ranks: int) -> Cluster:
    """Processes of one machine. Plans balance load, so only the ratio of peer to host bandwidth matters: it picks the path."""
    return Cluster(
        name="this machine", num_ranks=num_ranks, node_of_rank_G=np.zeros(num_ranks, np.int32), flops_per_s=1e11,
        compute_efficiency=0.5, slot_overhead_s=1e-5, peer_bytes_per_s=1e9, rdma_bytes_per_s=1e9, host_bytes_per_s=4e9,
        peer_latency_s=3e-4, rdma_latency_s=3e-4, host_latency_s=2e-5, copy_contention=1.0, memory_bytes=8 << 30,
        source="orders of magnitude of gloo and memcpy on a CPU, not measured",
    )  # fmt: skip


def trace_of(samples: Samples, settings: Settings) -> RoutingTrace:
    """What rollout recorded: all tokens that were fed to the model."""
    fed_Q = samples.length_Q - 1
    recorded_QN = np.arange(samples.topk_QNLK.shape[1]) < fed_Q[:, None]
    return RoutingTrace(
        topk_TLK=samples.topk_QNLK[recorded_QN], num_experts=settings.num_experts, seq_len_Q=fed_Q,
        moe_layer_L=np.arange(1, 1 + settings.num_layers, dtype=np.int32), source="foremoe demo",
    )  # fmt: skip


def workloads_of(trace: RoutingTrace, settings: Settings, num_ranks: int) -> dict[str, Workload]:
    """Stage -> its micro-steps; the two stages have different ones."""
    budget = {"recompute": settings.recompute_tokens, "update": settings.update_tokens}
    return {
        stage: Workload.from_trace(trace, num_ranks=num_ranks, tokens_per_rank=max(1, budget[stage] // num_ranks), stage=stage)
        for stage in STAGES
    }


def problem_of(
    workload: Workload, settings: Settings, redundant: int, cluster: Cluster | None = None, slot_depth: int = SLOT_DEPTH
) -> Problem:
    """The problem of one stage: level the rank loads."""
    return Problem.of(
        workload, cluster or cluster_of(workload.G), model=model_of(settings), redundant=redundant, slot_depth=slot_depth,
        cost=CostModel(objective="balance"), schedule=Schedule.plain(workload.stage, workload.M, settings.reforward),
    )  # fmt: skip


def plan_stages(
    trace: RoutingTrace, settings: Settings, cluster: Cluster, redundant: int, rank: int,
    slot_depth: int = SLOT_DEPTH, planner: Planner | None = None,
) -> dict[str, StagePlan]:  # fmt: skip
    """Stage -> its plan, as one rank runs it; the same on all ranks."""
    out = {}
    for stage, workload in workloads_of(trace, settings, cluster.num_ranks).items():
        problem = problem_of(workload, settings, redundant, cluster, slot_depth)
        plan, _ = (planner or Planner()).plan(problem, num_threads=1)
        out[stage] = StagePlan(workload=workload, problem=problem, plan=plan, split_MLP=plan.rows_for(workload, rank))
    return out


def static_skew(workload: Workload) -> Array:
    """float64 [M, L]: largest over mean rank load with experts at home in order."""
    load_MLG = workload.load_MLE.reshape(workload.M, workload.L, workload.G, -1).sum(axis=3)
    out: Array = skew(load_MLG)
    return out


def smallest_redundant(workloads: dict[str, Workload], settings: Settings) -> int:
    """The fewest redundant slots whose load bound allows to take away `RECOVERY` of (static skew - 1) in every stage."""
    for redundant in range(1, settings.num_experts + 1):
        if all(_allowed(work, settings, redundant) >= RECOVERY for work in workloads.values()):
            return redundant
    return settings.num_experts


def _allowed(workload: Workload, settings: Settings, redundant: int) -> float:
    problem = problem_of(workload, settings, redundant)
    bound_N = load_bound(problem)
    mean_N = problem.load_NE.sum(axis=1) / problem.G
    before = float(static_skew(workload).mean())
    after = float((bound_N / np.maximum(mean_N, 1.0)).mean())
    return (before - after) / (before - 1.0) if before > 1.0 else 1.0


class Planning:
    """Plans of both stages, made in a thread of its own from the moment it is constructed."""

    def __init__(self, samples: Samples, settings: Settings, redundant: int, rank: int, num_ranks: int) -> None:
        self._plans: dict[str, StagePlan] = {}
        self._error: BaseException | None = None
        self.plan_s = self.waited_s = 0.0

        def work() -> None:
            begin_s = time.perf_counter()
            try:
                self._plans = plan_stages(trace_of(samples, settings), settings, cluster_of(num_ranks), redundant, rank)
            except BaseException as error:
                self._error = error
            self.plan_s = time.perf_counter() - begin_s

        self._thread = threading.Thread(target=work, name="planning", daemon=True)
        self._thread.start()

    def result(self) -> dict[str, StagePlan]:
        """The plans by stage; waits for them."""
        begin_s = time.perf_counter()
        self._thread.join()
        self.waited_s = time.perf_counter() - begin_s
        if self._error is not None:
            raise self._error
        return self._plans

    @property
    def hidden_fraction(self) -> float:
        """Share of the planning time in which the rank did something else."""
        return 1.0 - min(1.0, self.waited_s / max(self.plan_s, 1e-9))
