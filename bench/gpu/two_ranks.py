"""Runs two processes on one GPU: copies by NCCL, and stages with a plan, compared with stages at home and in float64.

Weights are copied in three ways: by NCCL, by copy engines inside a node, and through a pinned host store between two simulated
nodes. Each way is tested in float32 and in bf16, with counted and with known routing. NCCL (gloo on a CPU) exchanges tokens and
returns gradients to their homes.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from bench.gpu.measure import DEVICE, table
from foremoe.base.arrays import Array
from foremoe.distributed.group import Group, ThreadGroup, TorchGroup
from foremoe.plan.plan import Plan
from foremoe.plan.transfers import Link
from foremoe.problem.cost import CostModel
from foremoe.problem.problem import Problem
from foremoe.runtime import ExpertBank, Runtime
from foremoe.testing.ranks import RankPool
from foremoe.testing.samples import plan_of, random_placement
from foremoe.testing.transfer_cases import DTYPES, run_case
from foremoe.testing.transfer_drills import DRILL
from foremoe.transfer.base import TransferBackend
from foremoe.transfer.collective import Collective
from foremoe.transfer.pinned_host import PinnedHost

# Letters: M micro-steps, L layers, G ranks, E experts, T tokens of a rank, K top-k, H hidden size, F ffn size.

M, L, G, E, T, K, H, F = 3, 2, 2, 8, 64, 2, 64, 32
# Differences over the largest value: sums in another order, and in bf16 what an element may be rounded by.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
WAYS = ("collective", "cupy_peer", "pinned_host")


def copies(group: Group, device: str) -> list[str]:
    """Faults in copies of every dtype."""
    _as_hosts_of_their_own(group.rank)
    return [
        f"{dtype}: {text}"
        for dtype in DTYPES
        for text in run_case(group, Collective(), dataclasses.replace(DRILL, dtype=dtype, rounds=DRILL.rounds * 2), device, 60.0)
    ]


def stages(group: Group, device: str, way: str, dtype: torch.dtype, known: bool) -> tuple[list[float], dict[str, Any]]:
    """Largest differences of losses and of each weight gradient: plan and float64, home and float64; copies that were made."""
    _as_hosts_of_their_own(group.rank)
    made = dist.new_group(backend="gloo" if device == "cpu" else "nccl")
    tokens = TorchGroup(made)
    topk_MLGTK = _routing()
    load_MLGE = np.stack([np.bincount(ids.ravel(), minlength=E) for ids in topk_MLGTK.reshape(-1, T, K)]).reshape(M, L, G, E)
    plan, split_MLP = _plan(load_MLGE, group.rank, way)
    bank = _bank(plan, group.rank, G, dtype, device)
    found = []
    with Runtime(bank, group=tokens, backends=_backends(way), timeout_s=60.0) as runtime:
        for planned in (False, True):
            if planned:
                routing = {(m, layer): topk_MLGTK[m, layer, group.rank] for m, layer in np.ndindex(M, L)}
                runtime.begin(plan, split_MLP, routing=routing if known else None)
            else:
                runtime.begin_home()
            losses = [_train(runtime, m, topk_MLGTK[m, :, group.rank], dtype, device) for m in range(M)]
            summary = runtime.end()
            found.append((torch.tensor(losses), *(g.cpu() for g in bank.gather(tokens, gradients=True).values())))
            bank.zero_grad()
    tokens.close()
    exact = _exact(plan, group.rank, topk_MLGTK, dtype)
    apart = [max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(one, exact, strict=True)) for one in found]
    return apart, {"copies": len(plan.transfers), "fell back": len(summary.fell_back), "drift": int(summary.drift_ML.sum())}


def _bank(plan: Plan, rank: int, num_ranks: int, dtype: torch.dtype, device: str) -> ExpertBank:
    return ExpertBank(
        num_layers=L, num_experts=E, hidden_size=H, ffn_size=F, rank=rank, num_ranks=num_ranks,
        num_buffers=plan.header.num_buffers, device=device, dtype=dtype,
    )  # fmt: skip


def _exact(plan: Plan, rank: int, topk_MLGTK: Array, dtype: torch.dtype) -> list[torch.Tensor]:
    """Losses of this rank and weight gradients of all, in float64 with plain autograd on the host, from the same weights."""
    (alone,) = ThreadGroup.of(1)
    weights = {name: w.double().requires_grad_() for name, w in _bank(plan, 0, 1, dtype, "cpu").gather(alone).items()}
    gate_up, down = weights.values()
    mine = []
    for g in range(G):
        for m in range(M):
            y_TH = _input(m, dtype).double()
            for layer in range(L):
                out_TH = torch.zeros_like(y_TH)
                for e in range(E):
                    t_N, _ = np.nonzero(topk_MLGTK[m, layer, g] == e)
                    gate, up = (y_TH[t_N] @ gate_up[layer, e]).chunk(2, dim=1)
                    pairs_NH = (torch.nn.functional.silu(gate) * up) @ down[layer, e] / K
                    out_TH = out_TH.index_add(0, torch.from_numpy(t_N), pairs_NH)
                y_TH = y_TH + out_TH
            loss = y_TH.square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            mine += [loss.detach()] if g == rank else []
    return [torch.stack(mine), *(w.grad for w in weights.values() if w.grad is not None)]


def _input(m: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(T, H, generator=torch.Generator().manual_seed(m)).to(dtype)


def _train(runtime: Runtime, m: int, topk_LTK: Array, dtype: torch.dtype, device: str) -> float:
    y_TH = _input(m, dtype).to(device)
    for layer in range(L):
        weight_TK = torch.full((T, K), 1.0 / K, device=device)
        y_TH = y_TH + runtime.moe(layer, y_TH, torch.from_numpy(topk_LTK[layer]).to(device), weight_TK)
    loss = y_TH.float().square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _routing() -> Array:
    """Top-k experts, int64 [M, L, G, T, K]: half of all tokens go to one expert first, another one in every row."""
    rng = np.random.default_rng(0)
    score = rng.random((M, L, G, T, E))
    for m, layer in np.ndindex(M, L):
        score[m, layer, :, ::2, (m * L + layer) % E] = 2.0
    return np.argsort(-score, axis=-1)[..., :K]


def _plan(load_MLGE: Array, rank: int, way: str) -> tuple[Plan, Array]:
    """A plan with a replica in every slot, weights of which come from peers or, between nodes, from the host store."""
    model = foremoe.Model(
        name="two-ranks", num_layers=L, num_experts=E, num_topk=K, hidden_size=H, ffn_size=F, first_moe_layer=0,
        attention_params=64, num_heads=1, qk_head_dim=4, v_head_dim=4, source="made up for bench.gpu",
    )  # fmt: skip
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=K, stage="update")
    by_host = way == "pinned_host"
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G, ranks_per_node=1 if by_host else G, host_store=by_host)
    problem = Problem.of(work, cluster, model=model, redundant=1, cost=CostModel(objective="balance"))
    plan = plan_of(problem, random_placement(problem, np.random.default_rng(0), density=1.0, evenness=20.0))
    if by_host:
        t = plan.transfers
        plan = dataclasses.replace(plan, transfers=t.replace(link_C=np.full(len(t), Link.HOST), src_C=np.full(len(t), -1)))
    return plan, plan.rows_for(work, rank)


def _backends(way: str) -> tuple[str | TransferBackend, ...]:
    first = {"cupy_peer": "collective" if DEVICE.type == "cpu" else "cupy_peer", "pinned_host": PinnedHost((0, 1))}.get(way)
    return ("collective",) if first is None else (first, "collective")


def _as_hosts_of_their_own(rank: int) -> None:
    """NCCL refuses two ranks of one host on one GPU."""
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_NET": "Socket"}


def main() -> int:
    """Prints what is wrong, and how far losses and gradients are apart."""
    rows, good = list[str](), True
    with RankPool(G) as pool:
        wrong = [text for texts in pool.run(copies, DEVICE.type, timeout_s=60.0) for text in texts]
        print(f"* copies of {len(DTYPES)} dtypes there and back by collective: {wrong or 'every byte right'}\n", flush=True)
        print(f"{M} micro-steps of {L} layers by a plan and at home: largest difference of a loss or a weight gradient from\n"
              "float64 on the host, over the largest value.\n")  # fmt: skip
        for way in WAYS:
            for dtype, bound in BOUNDS.items():
                for known in (False, True):
                    ranks = pool.run(stages, DEVICE.type, way, dtype, known, timeout_s=60.0)
                    home, planned = (max(apart[i] for apart, _ in ranks) for i in range(2))
                    figures = ranks[0][1]
                    right = planned < bound and not figures["fell back"] and not figures["drift"]
                    good &= right
                    name, counts = str(dtype).removeprefix("torch."), " | ".join(map(str, figures.values()))
                    row = (
                        f"{way} | {name} | {'known' if known else 'counted'} | {counts} | {home:.1e} | {planned:.1e} | {bound:g}"
                    )
                    rows.append(f"{row} | {'right' if right else 'WRONG'}")
    table("weights by | dtype | routing | copies | fell back | drift | at home | by the plan | bound |", *rows)
    return int(bool(wrong) or not good)


if __name__ == "__main__":
    sys.exit(main())
