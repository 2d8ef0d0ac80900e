"""A layer of the runtime whose routing is known, in a CUDA graph: dispatch, experts and combine, forward and backward."""

from __future__ import annotations

import sys
from functools import partial

import torch

from bench.gpu.experts import FFN, HIDDEN, Rank
from bench.gpu.measure import DEVICE, DRY, HostReads, Operations, median_s, table
from foremoe.distributed.group import ThreadGroup
from foremoe.problem.schedule import Phase
from foremoe.runtime.dispatch import Combine, Dispatch, Route
from foremoe.runtime.experts import GroupedExperts, Row, SwiGLU
from foremoe.runtime.replay import ReplayedRows

# Letters: T tokens, K top-k, E experts, S slots, P physical slots, H hidden size.

T, K, E = (64, 4, 16) if DRY else (8192, 8, 16)


class Layer:
    """The slots of one rank, a replica among them, and routes of two rows that differ in everything but their sizes.

    A group of one rank: messages are no part of the graph.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        topk_TK = torch.rand(T, E, generator=generator).topk(K).indices
        self.topk = [topk_TK, topk_TK[torch.randperm(T, generator=generator)]]
        self.rank = Rank(HIDDEN, FFN, E + 1)
        self.anchor = torch.zeros((), device=DEVICE, requires_grad=True)
        expert_P = torch.arange(E + 1) % E
        split_P = torch.cat([torch.bincount(topk_TK.reshape(-1), minlength=E), torch.zeros(1, dtype=torch.int64)])
        split_P[E] = split_P[0] // 2
        split_P[0] -= split_P[E]
        split_MLP, (group,) = split_P.numpy()[None, None].repeat(2, axis=0), ThreadGroup.of(1)
        self.rows = ReplayedRows(
            {(m, 0): topk for m, topk in enumerate(self.topk)}, expert_P.numpy()[None, None, None].repeat(2, axis=0), split_MLP,
            split_MLP[None], num_experts=E, group=group, device=DEVICE,
        )  # fmt: skip

    def route(self, m: int) -> Route:
        """Made before the layer runs; a copy from pinned memory, which no graph need hold."""
        found = self.rows.route(m, 0, self.topk[m].shape)
        assert found is not None
        return found[1]

    def step(self, x_TH: torch.Tensor, weight_TK: torch.Tensor, route: Route, row: Row) -> tuple[torch.Tensor, ...]:
        """Output, and gradients of tokens and probabilities; the output is its own gradient."""
        x_YH = Dispatch.apply(x_TH, self.anchor, route.by_token_Z, route.by_arrival_Y, route, self.rank.launch)
        y_YH = GroupedExperts.apply(x_YH, row, Phase.FORWARD)
        y_TKH = Combine.apply(y_YH, route.by_slot_Z, route.by_slot_Y, route)
        y_TH = (y_TKH * weight_TK.unsqueeze(2)).sum(1).to(x_TH.dtype)
        return y_TH.detach(), *torch.autograd.grad(y_TH, [x_TH, weight_TK], y_TH.detach())


def main() -> int:
    """Asserts what a graph needs; on a GPU captures one, and compares it with the layer as it runs otherwise."""
    layer = Layer()
    routes = [layer.route(m) for m in range(2)]
    row = layer.rank.row(routes[0].num_S, SwiGLU())
    x_TH = torch.randn(T, HIDDEN, device=DEVICE).bfloat16().requires_grad_()
    weight_TK = torch.rand(T, K, device=DEVICE).requires_grad_()
    layer.step(x_TH, weight_TK, routes[0], row)  # torch is asked once what it can do
    found = []
    for route in routes:
        with HostReads() as reads, Operations() as operations:
            layer.step(x_TH, weight_TK, route, row)
        found.append((reads.num, operations.shapes))
    (reads_one, shapes_one), (reads_other, shapes_other) = found
    assert reads_one == reads_other == 0, "the host waits for the device in a layer whose routing is known"
    assert shapes_one == shapes_other, "a layer whose routing is known allocates by what routing holds, not by sizes alone"
    print(f"{T} tokens, top-{K}, {E} + 1 slots, hidden size {HIDDEN}; bf16. {len(shapes_one)} operations forward and backward,")
    print("of the same shapes for two routings of the same sizes; the host waits for none of them.\n")
    run = partial(layer.step, x_TH, weight_TK, routes[0], row)
    if DRY:
        print("There is no graph without a GPU.")
        return 0
    graph, outputs = _captured(run)
    with torch.no_grad():
        x_TH.copy_(torch.randn_like(x_TH))
    graph.replay()
    expected = run()
    same = all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    seconds = median_s({"launched one by one": run, "replayed as a graph": graph.replay})
    table("layer, forward and backward | ms", *(f"{name} | {s * 1e3:.3f}" for name, s in seconds.items()))
    print(f"\nOn other tokens than it was captured with, the graph gives {'the same bits' if same else 'OTHER RESULTS'}.")
    return int(not same)


def _captured(run: partial[tuple[torch.Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
    """A graph of a function that has run before on another stream, as capturing wants it, and its outputs."""
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run()
    return graph, outputs


if __name__ == "__main__":
    sys.exit(main())
