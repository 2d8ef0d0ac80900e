"""Expert compute of a rank, slot by slot, against products of the same size without slots."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from bench.gpu.measure import DEVICE, DRY, counts, median_s, table
from foremoe.runtime.experts import SwiGLU

# Letters: Y pairs of a rank, N pairs of a slot, H hidden size, F ffn size.

SHAPES = (
    {"tiny": (64, 64, 32, 4)} if DRY else {"qwen3-30b-a3b, 9 slots": (65536, 2048, 768, 9), "64 slots": (65536, 2048, 768, 64)}
)


class Rank:
    """The slots of a rank, with weights and float32 gradients in bf16 training."""

    def __init__(self, hidden_size: int, ffn_size: int, num_slots: int) -> None:
        shapes = list(SwiGLU().shapes(hidden_size, ffn_size).values())
        make = partial(torch.randn, device=DEVICE)
        self.weights_S = [[(make(*shape) / shape[0] ** 0.5).bfloat16() for shape in shapes] for _ in range(num_slots)]
        self.grads_S = [[torch.zeros(*shape, device=DEVICE) for shape in shapes] for _ in range(num_slots)]

    def forward(self, x_YH: torch.Tensor, num_S: list[int]) -> list[Any]:
        """What backward needs of every slot with pairs; weight copies of other slots may be under way."""
        found = []
        for s, x_NH in enumerate(x_YH.split(num_S)):
            if len(x_NH):
                found.append((s, x_NH, *SwiGLU().forward(x_NH, self.weights_S[s])))
        return found

    def step(self, x_YH: torch.Tensor, num_S: list[int]) -> None:
        """Forward and backward; the output is its own gradient."""
        for s, x_NH, y_NH, saved in self.forward(x_YH, num_S):
            SwiGLU().backward(x_NH, saved, y_NH, self.weights_S[s], self.grads_S[s])


def main() -> int:
    """Prints seconds of both, and operations."""
    rows = []
    for name, (num_pairs, hidden, ffn, num_slots) in SHAPES.items():
        x_YH = torch.randn(num_pairs, hidden, device=DEVICE).bfloat16()
        rank, one = Rank(hidden, ffn, num_slots), Rank(hidden, ffn, 1)
        num_S = [num_pairs // num_slots] * num_slots
        num_S[0] += num_pairs - sum(num_S)
        arms = {"slots": partial(rank.step, x_YH, num_S), "one": partial(one.step, x_YH, [num_pairs])}
        seconds, (num, _) = median_s(arms), counts(arms["slots"])
        ratio, flops = seconds["slots"] / seconds["one"], 18 * num_pairs * hidden * ffn
        times = f"{seconds['slots'] * 1e3:.2f} | {seconds['one'] * 1e3:.2f} | {ratio:.2f} | {flops / seconds['slots'] / 1e12:.0f}"
        rows.append(f"{name} | {num_pairs} | {times} | {num}")
    print("Forward and backward in bf16, weight gradients in float32.\n")
    table("rank | pairs | slots ms | one product ms | ratio | TFLOP/s | operations", *rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
