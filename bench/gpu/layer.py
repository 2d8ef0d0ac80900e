"""One MoE layer of the runtime on one rank, with a replica in one of its slots. Other parts check and time this layer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from bench.gpu.experts import Rank
from bench.gpu.measure import DEVICE
from foremoe.distributed.group import ThreadGroup
from foremoe.problem.schedule import Phase
from foremoe.runtime.dispatch import Combine, Dispatch, Route, exchange_counts
from foremoe.runtime.experts import ExpertMath, GroupedExperts, SwiGLU
from foremoe.runtime.remap import Intervals, remap_planned
from foremoe.runtime.replay import ReplayedRows

# Letters: M micro-steps, T tokens, K top-k, Z = T*K pairs, E experts, P = E + 1 slots, H hidden size, F ffn size.


class Sizes(NamedTuple):
    """Of a layer."""

    tokens: int
    topk: int
    experts: int
    hidden: int
    ffn: int
    empty: bool = False  # the last base expert gets no pair


class Layer:
    """The slots of one rank, the last of which is a replica of expert 0, and the routing of two micro-steps with equal counts.

    A group of one rank: messages are no part of it. `step` is what `Runtime.moe` does.
    """

    def __init__(self, sizes: Sizes, math: ExpertMath | None = None) -> None:
        T, K, E = sizes.tokens, sizes.topk, sizes.experts
        self.sizes, generator = sizes, torch.Generator().manual_seed(0)
        topk_TK = torch.rand(T, E - sizes.empty, generator=generator).topk(K).indices
        self.topk = [topk_TK, topk_TK[torch.randperm(T, generator=generator)]]
        self.rank = Rank(sizes.hidden, sizes.ffn, E + 1)
        for replica, home in zip(self.rank.weights_S[E], self.rank.weights_S[0], strict=True):
            replica.copy_(home)
        self.anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        self.expert_P = torch.arange(E + 1) % E
        split_P = torch.cat([torch.bincount(topk_TK.reshape(-1), minlength=E), torch.zeros(1, dtype=torch.int64)])
        split_P[E] = split_P[0] // 2
        split_P[0] -= split_P[E]
        self.split_P = split_P
        self.intervals = Intervals.of(*(table.to(DEVICE) for table in (split_P, self.expert_P, torch.arange(E))))
        split_MLP, (self.group,) = split_P.numpy()[None, None].repeat(2, axis=0), ThreadGroup.of(1)
        self.rows = ReplayedRows(
            {(m, 0): topk for m, topk in enumerate(self.topk)}, self.expert_P.numpy()[None, None, None].repeat(2, axis=0),
            split_MLP, split_MLP[None], num_experts=E, group=self.group, device=DEVICE,
        )  # fmt: skip
        self.row = self.rank.row(self.route(0).num_S, SwiGLU() if math is None else math)

    def route(self, m: int) -> Route:
        """Made before the layer runs; a copy from pinned memory, which no graph need hold."""
        found = self.rows.route(m, 0, self.topk[m].shape)
        assert found is not None
        return found[1]

    def counted_route(self, topk_TK: torch.Tensor) -> Route:
        """The route of routing that nobody knew before: remapped, counted and sorted."""
        slot_TK, _ = remap_planned(topk_TK, self.intervals)
        return Route.of(slot_TK, exchange_counts(slot_TK.reshape(-1), len(self.split_P), self.group, True))

    def tokens(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """x_TH in bf16 and weight_TK in float32, which want gradients."""
        generator = torch.Generator().manual_seed(seed)
        x_TH = torch.randn(self.sizes.tokens, self.sizes.hidden, generator=generator).bfloat16()
        weight_TK = torch.rand(self.sizes.tokens, self.sizes.topk, generator=generator)
        return x_TH.to(DEVICE).requires_grad_(), weight_TK.to(DEVICE).requires_grad_()

    def forward(self, x_TH: torch.Tensor, weight_TK: torch.Tensor, route: Route) -> torch.Tensor:
        """y_TH, with its graph."""
        x_YH = Dispatch.apply(x_TH, self.anchor, route.by_token_Z, route.by_arrival_Y, route, self.rank.launch)
        y_YH = GroupedExperts.apply(x_YH, self.row, Phase.FORWARD)
        y_TH: torch.Tensor = Combine.apply(y_YH, weight_TK, route.by_slot_Z, route.by_slot_Y, route)
        return y_TH

    def step(self, x_TH: torch.Tensor, weight_TK: torch.Tensor, route: Route) -> tuple[torch.Tensor, ...]:
        """Output, and gradients of tokens and probabilities; the output is its own gradient."""
        y_TH = self.forward(x_TH, weight_TK, route)
        return y_TH.detach(), *torch.autograd.grad(y_TH, [x_TH, weight_TK], y_TH.detach())


class Dense:
    """The same layer expert by expert, in float64, with plain autograd: no slots, no sorting, no code of the runtime."""

    def __init__(self, layer: Layer, device: torch.device) -> None:
        self.device, E, shapes = device, layer.sizes.experts, layer.rank.shapes
        self.weights_E = [
            [
                w.view(shape).to(device, torch.float64).requires_grad_()
                for w, shape in zip(layer.rank.weights_S[e], shapes, strict=True)
            ]
            for e in range(E)
        ]

    def step(
        self, x_TH: torch.Tensor, weight_TK: torch.Tensor, topk_TK: torch.Tensor, grad_TH: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Output, and gradients of tokens and probabilities; those of weights add up."""
        x, weight, grad = (t.detach().to(self.device, torch.float64) for t in (x_TH, weight_TK, grad_TH))
        x.requires_grad_(), weight.requires_grad_()
        y = torch.zeros_like(x)
        for e, (gate_up, down) in enumerate(self.weights_E):
            t_N, k_N = (topk_TK.to(self.device) == e).nonzero(as_tuple=True)
            gate, up = (x[t_N] @ gate_up).chunk(2, dim=1)
            y = y.index_add(0, t_N, weight[t_N, k_N, None] * ((functional.silu(gate) * up) @ down))
        y.backward(grad)  # type: ignore[no-untyped-call]
        assert x.grad is not None and weight.grad is not None
        return y.detach(), x.grad, weight.grad
