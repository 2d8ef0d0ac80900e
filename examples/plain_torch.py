"""Trains one toy MoE layer by a plan and without one, and shows that nothing changes but the balance::

torchrun --nproc-per-node 2 examples/plain_torch.py
"""

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from foremoe.distributed import TorchGroup
from foremoe.runtime import ExpertBank, Runtime

EXPERTS, TOPK, HIDDEN, FFN, TOKENS, MICRO_STEPS = 8, 2, 16, 32, 256, 4

# Letters: M micro-steps, G ranks, E experts, T tokens of a rank, K top-k, H hidden size.


def train(rank, size, topk_MGTK, plan=None, split_MLP=None):
    """A stage of forward and backward; returns the summed loss, the gradients, and pairs served here by micro-step."""
    num_buffers = 0 if plan is None else plan.header.num_buffers
    bank = ExpertBank(
        num_layers=1, num_experts=EXPERTS, hidden_size=HIDDEN, ffn_size=FFN, rank=rank, num_ranks=size, num_buffers=num_buffers
    )
    total = 0.0
    with Runtime(bank, backends=("pinned_host", "collective")) as runtime:
        if plan is None:
            runtime.begin_home()
        else:
            routing = {(m, 0): topk_MGTK[m, rank] for m in range(MICRO_STEPS)}  # replayed as recorded: no counts travel
            runtime.begin(plan, split_MLP, routing=routing)
        for m in range(MICRO_STEPS):
            x_TH = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(100 * m + rank))
            weight_TK = torch.full((TOKENS, TOPK), 1 / TOPK)
            y_TH = runtime.moe(0, x_TH, torch.from_numpy(topk_MGTK[m, rank]), weight_TK)
            loss = (y_TH - x_TH).square().mean()
            loss.backward()
            total += loss.item()
        report = runtime.end()
    served_M = report.served_MLS.sum(axis=(1, 2))
    return total, [p.grad.clone() for p in bank.parameters()], served_M


def main():
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    # What rollout recorded: here the first experts are popular, so that the first rank has most of the work.
    rng = np.random.default_rng(0)
    popular_E = np.linspace(1.0, 0.1, EXPERTS) / np.linspace(1.0, 0.1, EXPERTS).sum()
    draw = lambda: rng.choice(EXPERTS, TOPK, replace=False, p=popular_E)  # noqa: E731
    topk_MGTK = np.array([[[draw() for _ in range(TOKENS)] for _ in range(size)] for _ in range(MICRO_STEPS)])

    one_hot = topk_MGTK[..., None] == np.arange(EXPERTS)
    work = foremoe.Workload.from_counts(one_hot.sum(axis=(2, 3))[:, None], num_topk=TOPK)
    model = foremoe.Model(
        name="toy", num_layers=1, first_moe_layer=0, num_experts=EXPERTS, num_topk=TOPK, hidden_size=HIDDEN, ffn_size=FFN,
        attention_params=1, num_heads=1, qk_head_dim=1, v_head_dim=1, source="made up",
    )  # fmt: skip
    problem = foremoe.Problem.of(
        work,
        foremoe.Cluster.preset("8xh100", num_ranks=size),
        model=model,
        redundant=1,
        cost=foremoe.CostModel(objective="balance"),
    )
    plan, _ = foremoe.Planner().plan(problem)  # the same on every rank; a large job plans on one and shares it

    loss, grads, served_M = train(rank, size, topk_MGTK)
    planned_loss, planned_grads, planned_served_M = train(rank, size, topk_MGTK, plan, plan.rows_for(work, rank))
    assert np.isclose(loss, planned_loss, rtol=1e-5)
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(grads, planned_grads, strict=True))

    group = TorchGroup()
    served = group.gather((served_M, planned_served_M))
    group.close()
    if rank == 0:
        for name, part in (("at home", 0), ("by plan", 1)):
            load_MG = np.stack([pair[part] for pair in served], axis=1)
            print(
                f"{name}: loss {(loss, planned_loss)[part]:.4f}, skew {(load_MG.max(axis=1) / load_MG.mean(axis=1)).mean():.3f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
