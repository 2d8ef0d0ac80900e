"""What the runtime's tests compare with: MoE layers computed expert by expert with plain autograd, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

# Letters: T tokens, K top-k, H hidden size, E experts, F ffn size, D = 2F.

Experts = Mapping[str, torch.Tensor]  # name -> [E, *shape], as `ExpertBank.gather` gives for a layer


def swiglu(x_NH: torch.Tensor, gate_up_HD: torch.Tensor, down_FH: torch.Tensor) -> torch.Tensor:
    gate_NF, up_NF = (x_NH @ gate_up_HD).chunk(2, dim=1)
    return (functional.silu(gate_NF) * up_NF) @ down_FH


def dense_moe(
    x_TH: torch.Tensor,
    topk_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    experts: Experts,
    expert: Callable[..., torch.Tensor] = swiglu,
) -> torch.Tensor:
    """One MoE layer without ranks, slots or sorting."""
    y_TH = torch.zeros_like(x_TH)
    for e in range(len(next(iter(experts.values())))):
        t_N, k_N = (topk_TK == e).nonzero(as_tuple=True)
        out_NH = expert(x_TH[t_N], *(tensor_E[e] for tensor_E in experts.values()))
        y_TH = y_TH.index_add(0, t_N, weight_TK[t_N, k_N, None] * out_NH)
    return y_TH


def relative(actual: torch.Tensor, expected: torch.Tensor, floor: float = 1e-30) -> float:
    """Largest difference relative to the largest value expected, or to `floor` if that is more; infinity where a NaN is."""
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    actual, expected = actual.detach(), expected.detach()
    difference = float((actual - expected).abs().max()) / max(float(expected.abs().max()), floor)
    return difference if difference == difference else float("inf")


def draw_topk(num_tokens: int, num_topk: int, num_experts: int, generator: torch.Generator) -> torch.Tensor:
    """Distinct experts for every token, some of them more popular than others."""
    score_TE = torch.rand(num_tokens, num_experts, generator=generator) + torch.linspace(0, 1, num_experts)
    return score_TE.topk(num_topk).indices
