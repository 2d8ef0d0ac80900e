"""Runs a layer with known routing in a CUDA graph, with dispatch, experts and combine, forward and backward."""

from __future__ import annotations

import sys
from functools import partial

import torch

from bench.gpu.layer import Layer, Sizes
from bench.gpu.measure import DRY, HostReads, Operations, median_s, table

SIZES = Sizes(64, 4, 16, 64, 32) if DRY else Sizes(8192, 8, 16, 2048, 768)


def main() -> int:
    """Asserts what a graph needs; on a GPU captures one, and compares it with the layer as it runs otherwise."""
    layer = Layer(SIZES)
    routes = [layer.route(m) for m in range(2)]
    x_TH, weight_TK = layer.tokens()
    layer.step(x_TH, weight_TK, routes[0])  # torch is asked once what it can do
    found = []
    for route in routes:
        with HostReads() as reads, Operations() as operations:
            layer.step(x_TH, weight_TK, route)
        found.append((reads.num, operations.shapes))
    (reads_one, shapes_one), (reads_other, shapes_other) = found
    assert reads_one == reads_other == 0, "the host waits for the device in a layer whose routing is known"
    assert shapes_one == shapes_other, "a layer whose routing is known allocates by what routing holds, not by sizes alone"
    print(f"{SIZES.tokens} tokens, top-{SIZES.topk}, {SIZES.experts} + 1 slots, hidden size {SIZES.hidden}; bf16. "
          f"{len(shapes_one)} operations forward and backward,")  # fmt: skip
    print("of the same shapes for two routings of the same sizes; the host waits for none of them.\n")
    run = partial(layer.step, x_TH, weight_TK, routes[0])
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
    print(
        f"\nReplayed with other tokens than it was captured with, the graph gives {'the same bits' if same else 'OTHER RESULTS'}."
    )
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
