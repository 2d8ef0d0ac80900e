"""Two processes on one GPU, over NCCL (on a CPU: gloo): copies by `Collective`, and a stage by a plan against one at home."""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from bench.gpu.measure import DEVICE
from foremoe.base.arrays import Array
from foremoe.distributed.group import Group, TorchGroup
from foremoe.problem.cost import CostModel
from foremoe.runtime import ExpertBank, Runtime
from foremoe.testing.ranks import RankPool
from foremoe.testing.transfer_cases import DTYPES, run_case
from foremoe.testing.transfer_drills import DRILL
from foremoe.transfer.collective import Collective

# Letters: M micro-steps, L layers, G ranks, E experts, T tokens of a rank, K top-k, H hidden size, F ffn size.

M, L, G, E, T, K, H, F = 3, 2, 2, 8, 64, 2, 64, 32


def copies(group: Group, device: str) -> list[str]:
    """Faults in copies of every dtype."""
    _as_hosts_of_their_own(group.rank)
    return [
        f"{dtype}: {text}"
        for dtype in DTYPES
        for text in run_case(group, Collective(), dataclasses.replace(DRILL, dtype=dtype, rounds=DRILL.rounds * 2), device, 60.0)
    ]


def stages(group: Group, device: str) -> list[float]:
    """Largest difference of losses and of weight gradients, relative to the largest, between a plan and home placement."""
    _as_hosts_of_their_own(group.rank)
    made = dist.new_group(backend="gloo" if device == "cpu" else "nccl")
    tokens = TorchGroup(made)
    topk_MLGTK = _routing()
    load_MLGE = np.stack([np.bincount(ids.ravel(), minlength=E) for ids in topk_MLGTK.reshape(-1, T, K)]).reshape(M, L, G, E)
    plan, split_MLP = _plan(load_MLGE, group.rank)
    num_buffers = plan.header.slots.num_buffers(plan.header.redundant, plan.L)
    bank = ExpertBank(
        num_layers=L, num_experts=E, hidden_size=H, ffn_size=F, rank=group.rank, num_ranks=G, num_buffers=num_buffers,
        device=device,
    )  # fmt: skip
    found = []
    with Runtime(bank, group=tokens, backends=("collective",), timeout_s=60.0) as runtime:
        for planned in (False, True):
            if planned:
                runtime.begin(plan, split_MLP)
            else:
                runtime.begin_home()
            losses = [_train(runtime, int(m), topk_MLGTK[m, :, group.rank], device) for m in plan.order_M]
            runtime.end()
            found.append((torch.tensor(losses), *bank.gather(tokens, gradients=True).values()))
            bank.zero_grad()
    tokens.close()
    return [float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True)]


def _train(runtime: Runtime, m: int, topk_LTK: Array, device: str) -> float:
    generator = torch.Generator().manual_seed(m)
    y_TH = torch.randn(T, H, generator=generator).to(device)
    for layer in range(L):
        weight_TK = torch.full((T, K), 1.0 / K, device=device)
        y_TH = y_TH + runtime.moe(layer, y_TH, torch.from_numpy(topk_LTK[layer]).to(device), weight_TK)
    loss = y_TH.square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item()


def _routing() -> Array:
    """Top-k experts, int64 [M, L, G, T, K]: half of all tokens go to one expert first, another one in every row."""
    rng = np.random.default_rng(0)
    score = rng.random((M, L, G, T, E))
    for m, layer in np.ndindex(M, L):
        score[m, layer, :, ::2, (m * L + layer) % E] = 2.0
    return np.argsort(-score, axis=-1)[..., :K]


def _plan(load_MLGE: Array, rank: int) -> tuple[foremoe.Plan, Array]:
    model = foremoe.Model(
        name="two-ranks", num_layers=L, num_experts=E, num_topk=K, hidden_size=H, ffn_size=F, first_moe_layer=0,
        attention_params=64, num_heads=1, qk_head_dim=4, v_head_dim=4, source="made up for bench.gpu",
    )  # fmt: skip
    work = foremoe.Workload.from_counts(load_MLGE, num_topk=K, stage="update")
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=G)
    problem = foremoe.Problem.of(work, cluster, model=model, redundant=1, cost=CostModel(objective="balance"))
    plan, _ = foremoe.Planner().plan(problem)
    return plan, plan.rows_for(work, rank)


def _as_hosts_of_their_own(rank: int) -> None:
    """NCCL refuses two ranks of one host on one GPU."""
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_NET": "Socket"}


def main() -> int:
    """Prints what is wrong, and how far losses and gradients are apart."""
    with RankPool(G) as pool:
        wrong: list[Any] = [text for texts in pool.run(copies, DEVICE.type, timeout_s=60.0) for text in texts]
        print(f"* copies of {len(DTYPES)} dtypes there and back: {wrong or 'every byte right'}", flush=True)
        apart = pool.run(stages, DEVICE.type, timeout_s=60.0)
    print(f"* {M} micro-steps by a plan and at home, largest relative difference of losses: {max(a[0] for a in apart):.1e}")
    print(f"* the same of weight gradients: {max(max(a[1:]) for a in apart):.1e}", flush=True)
    return int(bool(wrong) or max(max(a) for a in apart) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
