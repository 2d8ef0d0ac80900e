"""MoE layers over a pretended NCCL whose exchanges of tokens complete as late as they may, on a GPU as late as that."""

import late_nccl
import pretend_gpu
import pytest
import torch
from late_nccl import OverNccl
from late_tensor import LateTensor
from pretend_gpu import raw

from foremoe.runtime import ExpertBank, Runtime
from foremoe.testing.ranks import run_threads

# Letters: T tokens, K top-k, H hidden size.

RANKS, LAYERS, EXPERTS, MICRO_STEPS, H = 3, 2, 6, 2, 8


def stage(group, on_device):
    """Outputs and gradients of layers that feed each other; another number of tokens on every rank."""
    bank = ExpertBank(
        num_layers=LAYERS, num_experts=EXPERTS, hidden_size=H, ffn_size=4, rank=group.rank, num_ranks=RANKS, dtype=torch.float64
    )
    found, generator, T = [], torch.Generator().manual_seed(group.rank), 5 + 3 * group.rank
    with Runtime(bank, group=group) as runtime:
        runtime.begin_home()
        for _ in range(MICRO_STEPS):
            x_TH, *weights = leaves = [
                on_device(torch.randn(T, size, dtype=torch.float64, generator=generator)).requires_grad_() for size in (H, 2, 2)
            ]
            y_TH = x_TH
            for layer, weight_TK in enumerate(weights):
                topk_TK = on_device(torch.rand(T, EXPERTS, generator=generator).topk(2).indices)
                y_TH = runtime.moe(layer, y_TH, topk_TK, weight_TK)
            (y_TH * on_device(torch.randn(T, H, dtype=torch.float64, generator=generator))).sum().backward()
            found += [y_TH.detach(), *(leaf.grad for leaf in leaves)]
        if on_device is LateTensor:
            torch.cuda.synchronize()
        runtime.end()
    return [raw(tensor) for tensor in found] + [param.grad for param in bank.parameters()]


@pytest.mark.parametrize("order", ["late", "early"])
def test_outputs_and_gradients_are_those_of_threads_on_a_cpu(order, monkeypatch):
    wanted = run_threads(stage, RANKS, torch.Tensor.clone)
    pretend_gpu.install(monkeypatch, order)
    late_nccl.install(monkeypatch)
    found = run_threads(lambda group: stage(OverNccl(group), LateTensor), RANKS)
    for rank, (mine, same) in enumerate(zip(found, wanted, strict=True)):
        for i, (tensor, want) in enumerate(zip(mine, same, strict=True)):
            assert torch.equal(tensor, want), f"rank {rank}, tensor {i}"
