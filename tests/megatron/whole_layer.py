"""One layer, forward and backward, of the runtime and of Megatron-Core: its launches, their bytes, waits, and the host's time.

Without the arithmetic: the runtime's kernels return at once (`operations.kernels_at_once`), Megatron's experts give back what
they get, and messages are no part of the time. ``python -c "import whole_layer; whole_layer.main()"`` prints JSON: layer -> pass
-> figures.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import numpy as np
import slot_path
import torch

from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Schedule
from foremoe.runtime import ExpertBank, Runtime
from foremoe.runtime.products import SlotProducts
from foremoe.testing.ranks import RankPool
from foremoe.testing.samples import plan_of
from foremoe.workload.workload import Workload

sys.path.append(str(Path(__file__).parents[1] / "runtime"))
from operations import Work, kernels_at_once
from stage_util import topk_of

# Letters: M micro-steps, T tokens of a rank, K top-k, E experts, B base slots, G ranks, H hidden size, F ffn size.

B, K = 16, 8
SMALL, LARGE = (64, 64, 32), (1024, 2048, 768)  # T, H, F: for seconds, and for bytes
MANY = 8192  # tokens, for which bytes of the runtime's forward pass are counted too
FORWARD, BACKWARD = "forward", "backward"
MESSAGES = [(torch.distributed, "all_to_all_single"), (torch.distributed, "all_gather_into_tensor")]


class OfRuntime:
    """A layer of `Runtime` on a rank: 16 experts in bf16, and a replica on rank 1 that half the pairs of expert 0 go to."""

    def __init__(self, group, known, M, sizes):
        (T, H, F), G = sizes, group.size
        E, load_MLGE = B * G, np.full((M, 1, G, B * G), T * K // (B * G), np.int32)
        load_MLGE[..., 0] += E - 1
        load_MLGE[..., 1:] -= 1
        problem = Problem(
            model=dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=E, num_topk=K),
            cluster=Cluster.preset("8xh100", num_ranks=G, ranks_per_node=G), cost=CostModel(objective="balance"),
            stage="update", schedule=Schedule.accumulate(M), redundant=1, home_LE=np.arange(E)[None],
            load_MLE=load_MLGE.sum(axis=2), moe_layer_L=np.arange(1),
        )  # fmt: skip
        static = problem.static()
        expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
        half = int(quota_NGS[0, 0, 0]) // 2
        expert_NGS[:, 1, B], quota_NGS[:, 1, B], quota_NGS[:, 0, 0] = 0, half, quota_NGS[0, 0, 0] - half
        self.plan = plan_of(problem, dataclasses.replace(static, expert_NGS=expert_NGS, quota_NGS=quota_NGS))
        self.split = self.plan.rows_for(Workload.from_counts(load_MLGE, num_topk=1, stage="update"), group.rank)
        rng = np.random.default_rng(group.rank)
        self.topk = [torch.from_numpy(np.ascontiguousarray(topk_of(load_E, K, rng))) for load_E in load_MLGE[:, 0, group.rank]]
        self.routing = {(m, 0): topk_TK for m, topk_TK in enumerate(self.topk)} if known else None
        bank = ExpertBank(
            num_layers=1, num_experts=E, hidden_size=H, ffn_size=F, rank=group.rank, num_ranks=G,
            num_buffers=self.plan.header.num_buffers, dtype=torch.bfloat16,
        )  # fmt: skip
        self.runtime = Runtime(bank, group=group, backends=("collective",))
        self.x, self.weight = torch.randn(len(self.topk[0]), H).bfloat16(), torch.rand(self.topk[0].shape)

    def stage(self, around):
        """All micro-steps; `around` is a context for a pass."""
        # A GPU does not look at experts either: the host would wait for it.
        with kernels_at_once(), patch.object(Runtime, "_check_experts", lambda *_: None):
            self.runtime.begin(self.plan, self.split, routing=self.routing)
            for topk_TK in self.topk:
                x_TH, weight_TK = self.x.clone().requires_grad_(), self.weight.clone().requires_grad_()
                with around(FORWARD):
                    y_TH = self.runtime.moe(0, x_TH, topk_TK, weight_TK)
                with around(BACKWARD):
                    y_TH.backward(self.x)
            self.runtime.end()

    def close(self):
        self.runtime.close()


class OfMegatron:
    """An all-to-all layer of Megatron-Core on a rank, with foremoe attached, in float32."""

    def __init__(self, group, path, M, sizes):
        from foremoe.integrations.megatron import attach

        T, H, _ = sizes
        self.path = path
        self.moe, model = slot_path.make_layer(group.size, B * group.size, K, H)
        for param in model.parameters():
            param.main_grad = torch.zeros_like(param, dtype=torch.float32)
        self.rows = slot_path.Rows(group.rank, M, T, K, B * group.size, H)
        self.attached = attach(model, cost=CostModel(objective="balance"))

    def stage(self, around):
        forward = lambda experts, x, num_S, probs: (x * probs[:, None], None)  # noqa: E731
        with patch.object(type(self.moe.experts), "forward", forward):
            if self.path == slot_path.ALONE:
                self._passes(around)
                return
            if hasattr(self.attached, "_trust"):
                self.attached._trust._holds = {True: self.path == slot_path.KNOWN}
            with self.attached.stage(self.rows.work, "update"):
                self._passes(around)

    def _passes(self, around):
        moe = self.moe
        for routing_TE in self.rows.routing:
            hidden, probs = self.rows.x.clone().requires_grad_(), self.rows.probs.clone().requires_grad_()
            with around(FORWARD):
                x, p = moe.preprocess(hidden, probs, routing_TE)
                x, p = moe.dispatch(x, p)
                x, num_S, p = moe.token_dispatcher.dispatch_postprocess(x, p)
                y, _ = moe.experts(x, num_S, p)
                y = moe.postprocess(moe.combine(moe.token_dispatcher.combine_preprocess(y)), None)
            with around(BACKWARD):
                y.backward(self.rows.x)

    def close(self):
        self.attached.detach()


class Clock:
    """A context for a pass: CPU seconds of the calling thread besides those of `messages`."""

    def __init__(self, messages):
        self.seconds, self.messages = defaultdict(list), messages

    def __call__(self, name):
        self.name = name
        return self

    def __enter__(self):
        self.begin_s = time.thread_time() - self.messages.seconds

    def __exit__(self, *error):
        self.seconds[self.name].append(time.thread_time() - self.messages.seconds - self.begin_s)


class Counter:
    """A context for a pass: its launches, their bytes, and host waits."""

    def __init__(self):
        self.counts = defaultdict(list)

    def __call__(self, name):
        self.name = name
        return self

    def __enter__(self):
        self.work = Work()
        self.work.__enter__(), self.work.reads.__enter__()

    def __exit__(self, *error):
        self.work.reads.__exit__(*error), self.work.__exit__(*error)
        self.counts[self.name].append((self.work.num_launches, self.work.num_bytes, self.work.num_waits + self.work.reads.num))


def figures(group, of, arm, repeats, micro_steps):
    """Pass -> launches, bytes at the large sizes, waits, and seconds at the small ones, of the fastest tenth."""
    torch.set_num_threads(1)
    messages = slot_path.Stopwatch(*(MESSAGES if of is OfMegatron else [(type(group), "all_to_all")]))
    counter, clock = Counter(), Clock(messages)
    layer = of(group, arm, 2, LARGE)
    layer.stage(counter)
    layer.close()
    layer = of(group, arm, micro_steps, SMALL)
    layer.stage(clock)  # which compiles
    clock.seconds.clear()
    with messages.running():
        for _ in range(repeats):
            layer.stage(clock)
    layer.close()
    # The first row finds what later ones keep.
    return {name: (*counts[-1], statistics.quantiles(clock.seconds[name], n=10)[0]) for name, counts in counter.counts.items()}


def forward_bytes(group, known):
    """Bytes of the launches of the runtime's forward pass with many tokens."""
    torch.set_num_threads(1)
    counter, layer = Counter(), OfRuntime(group, known, 1, (MANY, *LARGE[1:]))
    with patch.object(SlotProducts, "add", lambda *_: None):  # gradients of weights would take a CPU minutes
        layer.stage(counter)
    layer.close()
    return counter.counts[FORWARD][-1][1]


ARMS = {
    "runtime, known": (OfRuntime, True), "runtime, counted": (OfRuntime, False),
    "Megatron, known": (OfMegatron, slot_path.KNOWN), "Megatron, counted": (OfMegatron, slot_path.COUNTED),
    "Megatron-Core alone": (OfMegatron, slot_path.ALONE),
}  # fmt: skip


def main(repeats=8, micro_steps=12):
    """Prints what the rank finds that has most to do: one has a replica."""
    with RankPool(2) as pool:
        found = {}
        for name, (of, arm) in ARMS.items():
            ranks = pool.run(figures, of, arm, repeats, micro_steps, timeout_s=300.0)
            found[name] = {
                of_pass: [max(x) for x in zip(*(rank[of_pass] for rank in ranks), strict=True)] for of_pass in ranks[0]
            }
    print(json.dumps(found))
