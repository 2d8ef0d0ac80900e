"""A stage of toy MoE layers from counts: run by a plan on many ranks, and dense on one.

With FOREMOE_TEST_DEVICE=cuda the ranks that are processes run on the first GPU, all of them; tokens still travel over gloo.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from runtime_util import dense_moe, relative
from torch.utils.checkpoint import checkpoint

from foremoe.base.arrays import Array
from foremoe.distributed.group import Group, ThreadGroup
from foremoe.machine.cluster import Cluster
from foremoe.machine.model import Model
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.problem.schedule import Phase, Schedule
from foremoe.runtime import ExpertBank, Runtime, StageSummary
from foremoe.testing.samples import plan_of
from foremoe.workload.workload import Workload

# Letters: M micro-steps, L layers, G ranks, E experts, S slots of a rank, T tokens, K top-k, H hidden size, C chunks of layers.

H, F = 8, 4  # rows of 16 bytes in float32, so that it takes grouped products; float64 takes none
DEVICE = torch.device(os.environ.get("FOREMOE_TEST_DEVICE", "cpu"))
MODES = {"kept": None, "reentrant": True, "non-reentrant": False}


@dataclass(frozen=True, repr=False)
class Case:
    """A plan, and tokens whose routing has the counts that were planned, or nearly.

    Layers of a chunk feed each other. A layer sees the first T tokens of its chunk, as many as its routing has rows.

    Attributes:
        load_MLGE: what was planned.
        x, coefficient: (m, chunk, g) -> [T, H], input, and gradient of the loss by the output; with `square` its target.
        topk, weight: (m, layer, g) -> [T, K].
        mode: how layers are checkpointed.
    """

    plan: Plan
    load_MLGE: Array
    x: dict[tuple[int, int, int], torch.Tensor]
    coefficient: dict[tuple[int, int, int], torch.Tensor]
    topk: dict[tuple[int, int, int], torch.Tensor]
    weight: dict[tuple[int, int, int], torch.Tensor]
    mode: str = "kept"
    dtype: torch.dtype = torch.float64
    seed: int = 0
    square: bool = False

    def __repr__(self) -> str:
        return f"Case(transfers={len(self.plan.transfers)}, replicas={self.plan.num_replicas}, mode={self.mode!r})"

    def split(self, rank: int) -> Array:
        work = Workload.from_counts(self.load_MLGE, num_topk=1, stage="update" if self.trains else "recompute")
        return self.plan.rows_for(work, rank)

    @property
    def trains(self) -> bool:
        return self.plan.header.schedule.trains

    def layers(self, chunk: int) -> list[int]:
        return np.flatnonzero(self.plan.header.schedule.chunks(self.plan.L) == chunk).tolist()

    def blocks(self, chunk: int) -> list[list[int]]:
        """The layers of a chunk, those together that are re-forwarded together."""
        block_L = self.plan.header.schedule.block_L
        key = lambda layer: layer if block_L is None else block_L[layer]  # noqa: E731
        return [list(layers) for _, layers in itertools.groupby(self.layers(chunk), key)]

    def passes(self) -> Iterator[tuple[int, Phase, int]]:
        """(micro-step, phase, chunk) in the order of the plan's schedule."""
        schedule = self.plan.header.schedule
        for position, phase, chunk in zip(schedule.micro_step_X, schedule.phase_X, schedule.chunk_X, strict=True):
            yield int(position), Phase(int(phase)), int(chunk)


def case_of(
    plan: Plan,
    load_MLGE: Array,
    rng: np.random.Generator,
    *,
    unplanned: float = 0.0,
    dropped: float = 0.0,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> Case:
    """Tokens for a plan.

    Args:
        unplanned: share of the rows of every layer whose experts differ from the plan.   dropped: share that never came.
    """
    topk = {}
    for (m, layer, g), _ in np.ndenumerate(load_MLGE[..., 0]):
        topk_TK = topk_of(load_MLGE[m, layer, g], int(rng.integers(1, 3)), rng)
        T, K = topk_TK.shape
        for t in rng.permutation(T)[: int(np.ceil(unplanned * T))]:
            topk_TK[t] = rng.permutation(plan.E)[:K]
        topk[m, layer, g] = torch.from_numpy(topk_TK[rng.random(T) >= dropped])
    draw = lambda *shape: torch.from_numpy(rng.standard_normal(shape)).to(dtype)  # noqa: E731
    case = Case(plan, load_MLGE, {}, {}, topk, {}, dtype=dtype, **options)
    for m in range(plan.M):
        for g in range(plan.G):
            for chunk in range(plan.header.schedule.num_chunks):
                T = max((len(topk[m, layer, g]) for layer in case.layers(chunk)), default=2)
                case.x[m, chunk, g], case.coefficient[m, chunk, g] = draw(T, H), draw(T, H)
            for layer in range(plan.L):
                case.weight[m, layer, g] = draw(*topk[m, layer, g].shape).abs()
    return case


def a_case(stage: str = "update", host: bool = False, schedule: Schedule | None = None, base: int = 2, **options: Any) -> Case:
    """Two ranks, two layers, two micro-steps; in each row a replica of expert 0 takes over a part of its pairs on rank 1."""
    load_MLGE = np.full((2, 2, 2, 2 * base), 3, np.int32)
    load_MLGE[..., 0] = 8
    problem = Problem(
        model=dataclasses.replace(Model.preset("qwen3-30b-a3b"), num_experts=2 * base, num_topk=2),
        cluster=Cluster.preset("8xh100", num_ranks=2, ranks_per_node=2, host_store=True),
        cost=CostModel(objective="balance"),
        stage=stage,
        schedule=schedule or (Schedule.accumulate(2) if stage == "update" else Schedule.forward_only(2)),
        redundant=1,
        home_LE=np.tile(np.arange(2 * base), (2, 1)),
        load_MLE=load_MLGE.sum(axis=2),
        moe_layer_L=np.arange(2),
    )
    static = problem.static()
    expert_NGS, quota_NGS = static.expert_NGS.copy(), static.quotas_NGS.copy()
    expert_NGS[:, 1, base], quota_NGS[:, 1, base], quota_NGS[:, 0, 0] = 0, 7, 9
    plan = plan_of(problem, dataclasses.replace(static, expert_NGS=expert_NGS, quota_NGS=quota_NGS))
    plan.check(problem)
    if host:
        t = plan.transfers
        t = t.replace(link_C=np.full(len(t), Link.HOST), src_C=np.full(len(t), -1))
        plan = dataclasses.replace(plan, transfers=t)
    return case_of(plan, load_MLGE, np.random.default_rng(0), **options)


def topk_of(load_E: Array, num_topk: int, rng: np.random.Generator) -> Array:
    """int64 [T, K]: rows of distinct experts with exactly these counts; K = 1 where `num_topk` cannot do it."""
    pairs, most = int(load_E.sum()), int(load_E.max(initial=0))
    num_topk = num_topk if pairs % num_topk == 0 and most * num_topk <= pairs else 1
    # Pairs sorted by expert, dealt to columns one after the other: an expert comes to a row twice only if it has over T pairs.
    topk_TK = np.repeat(np.arange(len(load_E)), load_E).reshape(num_topk, pairs // num_topk).T
    return rng.permuted(rng.permutation(topk_TK), axis=1)


def make_bank(case: Case, rank: int, num_ranks: int, math: Any = None) -> ExpertBank:
    plan = case.plan
    return ExpertBank(
        num_layers=plan.L,
        num_experts=plan.E,
        hidden_size=H,
        ffn_size=F,
        rank=rank,
        num_ranks=num_ranks,
        num_buffers=plan.header.num_buffers,
        home_LE=plan.home_LE,
        dtype=case.dtype,
        seed=case.seed,
        math=math,
        device=DEVICE,
    )


def prepare_device(group: Group) -> None:
    """Where ranks share a GPU: lets NCCL take each for a host of its own, and gloo carry tokens, which it cannot on a GPU."""
    if DEVICE.type == "cpu" or hasattr(group, "by_host"):
        return
    os.environ |= {"NCCL_HOSTID": f"rank-{group.rank}", "NCCL_NET": "Socket"}
    group.by_host = group.all_to_all  # type: ignore[attr-defined]

    def all_to_all(received: torch.Tensor, sent: torch.Tensor, num_received_G: list[int], num_sent_G: list[int]) -> None:
        host = torch.empty_like(received, device="cpu")
        group.by_host(host, sent.cpu(), num_received_G, num_sent_G)  # type: ignore[attr-defined]
        received.copy_(host)

    group.all_to_all = all_to_all  # type: ignore[method-assign]


Hook = Callable[[int, Phase, int], None]
Results = dict[str, dict[tuple[int, int, int], torch.Tensor]]


def run_passes(
    case: Case,
    rank: int,
    moe: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    hook: Hook | None = None,
    device: torch.device = DEVICE,
) -> Results:
    """Runs the passes of one source rank in the schedule's order.

    Returns:
        "output", "loss", "x" (gradient): by (m, chunk, rank); "weight" (gradient): by (m, layer, rank).
    """
    found: Results = {"output": {}, "loss": {}, "x": {}, "weight": {}}
    losses, leaves = {}, {}
    for m, phase, chunk in case.passes():
        if hook is not None:
            hook(m, phase, chunk)
        key = (m, chunk, rank)
        if phase == Phase.FORWARD:
            x_TH = leaves[key] = case.x[key].to(device, copy=True).requires_grad_(case.trains)
            weights = {
                layer: case.weight[m, layer, rank].to(device, copy=True).requires_grad_(case.trains)
                for layer in case.layers(chunk)
            }
            y_TH = x_TH
            for layers in case.blocks(chunk):
                block = partial(_block, moe, {layer: case.topk[m, layer, rank].to(device) for layer in layers})
                mine, again = [weights[layer] for layer in layers], MODES[case.mode]
                y_TH = block(y_TH, *mine) if again is None else checkpoint(block, y_TH, *mine, use_reentrant=again)
            coefficient_TH = case.coefficient[key].to(device)
            losses[key] = (y_TH - coefficient_TH).square().sum() / 2 if case.square else (y_TH * coefficient_TH).sum()
            found["output"][key], found["loss"][key] = y_TH.detach(), losses[key].detach()
            leaves[key, "weight"] = weights
        else:
            losses.pop(key).backward()
            found["x"][key] = leaves[key].grad
            found["weight"] |= {(m, layer, rank): w.grad for layer, w in leaves[key, "weight"].items()}
    return {kind: on_host(part) for kind, part in found.items()}


def on_host(tensors: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {key: tensor.cpu() for key, tensor in tensors.items()}


def _block(moe: Any, topk: dict[int, torch.Tensor], x_TH: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    for (layer, topk_TK), weight_TK in zip(topk.items(), weights, strict=True):
        T = len(topk_TK)
        x_TH = torch.cat([x_TH[:T] + moe(layer, x_TH[:T], topk_TK, weight_TK), x_TH[T:]])
    return x_TH


def run_case(
    group: Group,
    case: Case,
    backends: Any = ("local",),
    debug: bool = True,
    hook: Any = None,
    prefetch: int = 2,
    home: bool = False,
) -> tuple[Results, dict[str, torch.Tensor], StageSummary]:
    """The stage by its plan, on one rank: results, all main gradients, and the report.

    Args:
        backends: names, or a function of the rank that gives instances.
        hook: called before every pass with (runtime, m, phase, chunk).
        home: without the plan, every pair at its expert's home.
    """
    prepare_device(group)
    bank = make_bank(case, group.rank, group.size)
    found = backends(group.rank) if callable(backends) else backends
    with Runtime(bank, group=group, backends=found, prefetch=prefetch, timeout_s=20.0, debug=debug) as runtime:
        if home:
            runtime.begin_home()
        else:
            runtime.begin(case.plan, case.split(group.rank))
        results = run_passes(case, group.rank, runtime.moe, None if hook is None else partial(hook, runtime))
        report = runtime.end()
        return results, on_host(bank.gather(group, gradients=True)), report


def run_dense(case: Case, weights: Mapping[str, torch.Tensor] | None = None) -> tuple[Results, dict[str, torch.Tensor]]:
    """The same for all sources, without ranks, slots or a plan; `weights` [L, E, *shape] by default as `make_bank` draws them."""
    if weights is None:
        weights = make_bank(case, 0, 1).gather(ThreadGroup.of(1)[0])
    leaves = {name: w.detach().to("cpu", copy=True).requires_grad_(case.trains) for name, w in weights.items()}

    def moe(layer: int, x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        return dense_moe(x_TH, topk_TK, weight_TK, {name: w[layer] for name, w in leaves.items()})

    results: Results = {}
    for g in range(case.plan.G):
        for kind, part in run_passes(dataclasses.replace(case, mode="kept"), g, moe, device=torch.device("cpu")).items():
            results.setdefault(kind, {}).update(part)
    return results, {name: torch.zeros_like(w) if w.grad is None else w.grad for name, w in leaves.items()}


def worst(ranks: list[Any], dense: tuple[Results, dict[str, torch.Tensor]]) -> float:
    """Largest relative difference of any output, loss or gradient of any rank from the dense ones."""
    found, seen = [0.0], 0
    for results, grads, _ in ranks:
        for kind, part in results.items():
            seen += len(part)
            for key, tensor in part.items():
                # A loss is a sum whose terms, of size 1, may cancel.
                found.append(relative(tensor, dense[0][kind][key], floor=1.0 if kind == "loss" else 1e-30))
        found += [relative(grads[name], dense[1][name]) for name in dense[1]]
    assert seen == sum(len(part) for part in dense[0].values())
    return max(found)


def expected_counts(case: Case) -> tuple[Array, Array]:
    """int64 served_MLGS and drift_MLG by the law: every slot gets min(its split, what occurs), the rest goes home."""
    plan = case.plan
    served_MLGS, drift_MLG = np.zeros(plan.expert_MLGS.shape, np.int64), np.zeros((plan.M, plan.L, plan.G), np.int64)
    for source in range(plan.G):
        split_MLP = case.split(source)
        for m, layer in np.ndindex(plan.M, plan.L):
            occurs_E = np.bincount(case.topk[m, layer, source].numpy().ravel(), minlength=plan.E)
            expert_P, served_P = plan.expert_MLGS[m, layer].ravel(), served_MLGS[m, layer].reshape(-1)
            for p, e in enumerate(expert_P):
                taken = min(split_MLP[m, layer, p], occurs_E[e]) if e >= 0 else 0
                served_P[p] += taken
                occurs_E[e] -= taken
            rank_E, slot_E = np.divmod(plan.home_LE[layer], plan.B)
            np.add.at(served_MLGS[m, layer], (rank_E, slot_E), occurs_E)
            drift_MLG[m, layer, source] = occurs_E.sum()
    return served_MLGS, drift_MLG
