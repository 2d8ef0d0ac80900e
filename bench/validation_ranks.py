"""The part of `bench.validation` that runs on ranks, with its configurations and the measurements of every rank."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from examples.grpo.arms import ARMS, Arms
from examples.grpo.experts import ClockedSwiGLU
from examples.grpo.given import given_samples
from examples.grpo.grpo import Batch, log_probs, policy_loss
from examples.grpo.planning import plan_stages, trace_of
from examples.grpo.policy import Block, Policy, WholeSequences
from examples.grpo.settings import SIZES, Settings
from examples.grpo.step import batches_of
from examples.grpo.task import MAX_ANSWER
from foremoe.calibrate import Case
from foremoe.calibrate.measure import measure
from foremoe.calibrate.stopwatch import Lap, Stopwatch
from foremoe.distributed.group import Group
from foremoe.levels import PathSolver
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.links import choose_links
from foremoe.plan.transfers import Link, TransferList
from foremoe.planner.planner import Planner
from foremoe.problem.problem import Problem
from foremoe.runtime.bank import ExpertBank
from foremoe.runtime.runtime import Runtime
from foremoe.transfer.pinned_host import PinnedHost
from foremoe.workload.workload import STAGES

# Letters: M micro-steps, G ranks, T tokens, H hidden size, Q sequences, N positions.

LENGTHS = (14, 16, 18, 20)  # what the demo's sequences have, in tokens that are fed
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class FromHost(PathSolver):
    """All copies from host stores."""

    def solve(self, problem: Problem, transfers: TransferList) -> TransferList:
        """See `PathSolver.solve`."""
        return choose_links(transfers, problem.home_LE, problem.cluster, problem.model.expert_bytes, [Link.HOST])


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One stage pair that is predicted and run.

    Attributes:
        hidden: hidden size; experts are three times as wide.   tokens: of a micro-step, over all ranks.
        skew: static, mean over rows.
        redundant: R.
        slot_depth: buffers per slot.
        held_out: nothing was fitted near it.
        host_nodes: every weight copy comes from a host store, on this many nodes; 0: as the path level decides, on one node.
        reforward: the update runs forwards again in backward.
    """

    hidden: int
    tokens: int
    skew: float
    redundant: int
    slot_depth: int
    held_out: bool
    num_ranks: int = 2
    host_nodes: int = 0
    reforward: bool = False

    @property
    def planner(self) -> Planner:
        """The default one, or with all copies from host stores."""
        return Planner(path=FromHost()) if self.host_nodes else Planner()

    def cluster(self, fitted: Cluster) -> Cluster:
        """The constants for its ranks and nodes; all links are gloo's, so those between nodes are as those inside."""
        G, nodes = self.num_ranks, max(1, self.host_nodes)
        found = fitted if nodes == 1 and fitted.num_ranks == G else fitted.with_ranks(G, G // nodes)
        return dataclasses.replace(found, rdma_bytes_per_s=found.peer_bytes_per_s, rdma_latency_s=found.peer_latency_s)

    @property
    def settings(self) -> Settings:
        """Of the demo; two micro-steps."""
        # A few sequences fewer than there is room for: those left over would be a micro-step of their own.
        num = int(1.97 * self.tokens / np.mean(LENGTHS) / 8)
        return dataclasses.replace(
            SIZES["default"], num_layers=3, hidden_size=self.hidden, ffn_size=3 * self.hidden, num_heads=self.hidden // 32,
            num_prompts=num, group_size=8, recompute_tokens=self.tokens, update_tokens=self.tokens, reforward=self.reforward,
        )  # fmt: skip

    @property
    def name(self) -> str:
        """Its sizes in one word each."""
        text = f"H{self.hidden} {self.tokens} tokens, skew {self.skew:g}, R {self.redundant}, depth {self.slot_depth}"
        if self.host_nodes:
            text += f", by host on {self.host_nodes} node{'s'[: self.host_nodes - 1]}"
        return text + (", re-forward" if self.reforward else "")


FITTED_SIZES = (96, 160)


def configurations() -> list[Configuration]:
    """All of them: those whose sizes were calibrated and those that were kept out."""

    def make(h: int, t: int, s: float, r: int, depth: int, out: bool, **more: Any) -> Configuration:
        return Configuration(hidden=h, tokens=t, skew=s, redundant=r, slot_depth=depth, held_out=out, **more)

    return [
        make(96, 3072, 1.2, 2, 3, False),
        make(96, 6144, 1.4, 2, 3, False),
        make(96, 6144, 1.6, 4, 3, False),
        make(160, 3072, 1.2, 2, 3, False),
        make(160, 3072, 1.6, 4, 3, False),
        make(160, 6144, 1.4, 2, 3, False),
        make(128, 4608, 1.3, 3, 3, True),
        make(128, 2304, 1.7, 6, 2, True),
        make(128, 7680, 1.4, 1, 1, True),
        make(160, 4608, 1.7, 6, 2, True),
        make(128, 4608, 1.4, 3, 3, True, host_nodes=1),
        make(128, 4608, 1.4, 3, 3, True, host_nodes=2),
        make(128, 4608, 1.4, 2, 3, True, reforward=True),
        make(160, 6144, 1.5, 2, 3, True, host_nodes=2, reforward=True),
    ]


class DemoLayer(nn.Module):
    """The demo's block as `foremoe.calibrate` times a layer."""

    def __init__(self, model: Model, num_experts: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        settings = dataclasses.replace(
            SIZES["default"], hidden_size=model.hidden_size, num_heads=model.num_heads, num_experts=num_experts
        )
        self.block, self.num_heads = Block(settings, dense=False), model.num_heads

    def forward(self, x_TH: torch.Tensor, sequence_length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self.block
        attend = WholeSequences(_valid(len(x_TH)), self.num_heads)
        x_TH = x_TH + block.out(attend(0, block.qkv(block.attention_norm(x_TH))))
        inner_TH = block.ffn_norm(x_TH)
        assert block.router is not None
        return x_TH, inner_TH, block.router(inner_TH)


def _valid(tokens: int) -> torch.Tensor:
    """bool [Q, N]: sequences as the demo has them, the last one cut."""
    length_Q = np.resize(LENGTHS, -(-tokens // min(LENGTHS)))
    length_Q = length_Q[: int(np.searchsorted(np.cumsum(length_Q), tokens)) + 1]
    length_Q[-1] -= length_Q.sum() - tokens
    return torch.from_numpy(np.arange(max(LENGTHS)) < length_Q[:, None])


# What ranks run.


class Pace:
    """Seconds that this machine takes for the same work on all ranks at once, a few hundredths; others may use its cores too."""

    def __init__(self, group: Group) -> None:
        torch.manual_seed(0)
        self.group, self.x_TH, self.weight_HF = group, torch.randn(1024, 128), torch.randn(128, 384)

    def seconds(self) -> float:
        """Wall seconds, of the slowest rank."""
        self.group.barrier()
        begin_s = time.perf_counter()
        for _ in range(24):
            hidden_TF = torch.nn.functional.silu(self.x_TH @ self.weight_HF)
            torch.softmax(hidden_TF @ self.weight_HF.T, dim=1)
        return max(self.group.gather(time.perf_counter() - begin_s))


def pace_rank(group: Group, times: int) -> list[float]:
    """Seconds of the same work, some times."""
    pace = Pace(group)
    return [pace.seconds() for _ in range(times + 2)][2:]


def calibrate_rank(group: Group, case: Case) -> Any:
    """The points of `foremoe calibrate`."""
    return measure(group, case, torch.device("cpu"), lambda *_: None)


class Rank:
    """One rank with the policy, the bank and the runtime of a configuration."""

    def __init__(self, group: Group, config: Configuration, cluster: Cluster) -> None:
        s = self.settings = config.settings
        torch.manual_seed(s.seed)
        self.group, self.policy, self.clock = group, Policy(s), ClockedSwiGLU()
        self.samples = given_samples(s, config.skew, group.size)
        trace = trace_of(self.samples, s)
        self.plans = plan_stages(trace, s, cluster, config.redundant, group.rank, config.slot_depth, config.planner)
        self.batches = {stage: batches_of(self.samples, planned, group.rank) for stage, planned in self.plans.items()}
        self.bank = ExpertBank(
            num_layers=s.num_layers, num_experts=s.num_experts, hidden_size=s.hidden_size, ffn_size=s.ffn_size, rank=group.rank,
            num_ranks=group.size, seed=s.seed, math=self.clock,
            num_buffers=config.redundant * config.slot_depth,
        )  # fmt: skip
        store = PinnedHost(tuple(cluster.node_of_rank_G.tolist()))
        self.runtime = Runtime(self.bank, group=group, backends=("collective", store), timeout_s=TIMEOUT_S)

    def drop_gradients(self) -> None:
        """As the demo does after an arm."""
        for p in (*self.policy.parameters(), *self.bank.parameters()):
            p.grad = None


def outside_rank(group: Group, config: Configuration, cluster: Cluster, budget_s: float) -> dict[str, Any]:
    """Seconds outside the MoE layers: of a policy without any, by tokens; and of a stage's begin and end."""
    # A stage without micro-steps still fills host stores, which the simulator has; so there are none.
    rank = Rank(group, config, dataclasses.replace(cluster, host_bytes_per_s=0.0))
    watch = Stopwatch(group, torch.device("cpu"))
    s = dataclasses.replace(rank.settings, num_layers=0)
    policy = Policy(s)
    found: dict[str, Any] = {"points": []}
    with rank.runtime:
        for share in (0.25, 1.0):
            num = int(len(rank.samples.length_Q) * share / 2 / group.size)
            batch = Batch.of(rank.samples, np.arange(num))
            old_A = torch.zeros(len(batch.place_A))

            def run(lap: Lap, batch: Batch = batch, old_A: torch.Tensor = old_A) -> None:
                with torch.no_grad():
                    float(-log_probs(policy, batch, _no_experts, batch.topk_TLK).sum())
                lap()
                new_A = log_probs(policy, batch, _no_experts, batch.topk_TLK)
                policy_loss(new_A, old_A, old_A + 1.0, s.clip).sum().backward()
                lap()

            laps = watch.laps(run, budget_s / 3)
            found["points"].append((len(batch.token_T), *(seconds for seconds, _ in laps)))

        def stage(lap: Lap) -> None:
            rank.drop_gradients()
            group.barrier()
            lap()
            rank.runtime.begin_home()
            rank.runtime.end()
            lap()
            for i, name in enumerate(STAGES):
                planned = rank.plans[name]
                rank.drop_gradients()
                rank.runtime.begin(planned.plan, planned.split_MLP, same_weights=bool(i))
                # A stage that ends before its first use has copies under way, as one that goes on.
                rank.runtime.end(partial=True)
                lap()

        laps = watch.laps(stage, budget_s / 3)
        found["home_s"], found["recompute_s"], found["update_s"] = (seconds for seconds, _ in laps[1:])
    return found


def _no_experts(layer: int, x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
    raise AssertionError("there are no MoE layers")


def stages_rank(
    group: Group, config: Configuration, cluster: Cluster, repeats: int
) -> tuple[list[dict[tuple[str, str], float]], list[float]]:
    """Wall seconds by (stage, arm), repeat by repeat, where the order of arms turns; and of the same work before every arm."""
    rank, pace = Rank(group, config, cluster), Pace(group)
    out, pace_s = [], []
    with rank.runtime:
        for i in range(repeats + 1):
            arms = Arms(rank.policy, rank.runtime, rank.clock, rank.plans)
            turn = i % len(ARMS)
            seconds = {}
            for arm in (*ARMS[turn:], *ARMS[:turn]):
                pace_s.append(pace.seconds())
                run, old = arms.recompute(arm, rank.batches["recompute"])
                seconds["recompute", arm] = run.wall_s
                # Both stages have the same micro-steps here, so log-probabilities need no sorting.
                advantage = [torch.ones_like(old_A) for old_A in old]
                num_tokens = len(rank.samples.length_Q) * MAX_ANSWER
                if config.host_nodes:
                    arms = Arms(rank.policy, rank.runtime, rank.clock, rank.plans)  # as after other weights: stores are filled
                run = arms.update(arm, rank.batches["update"], old, advantage, num_tokens)
                seconds["update", arm] = run.wall_s
                assert run.report["drift"] == run.report["fell_back"] == 0
                rank.drop_gradients()
            if i:  # the first one warms up
                out.append(seconds)
    return out, pace_s[len(ARMS) :]
