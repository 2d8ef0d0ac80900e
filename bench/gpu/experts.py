"""Measures a rank's expert compute in the runtime, with grouped and with single slots, and one product of the same size."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.measure import DEVICE, DRY, counts, median_s, table
from foremoe.problem.schedule import Phase
from foremoe.runtime import products
from foremoe.runtime.experts import ComputeTime, ExpertMath, GroupedExperts, Row, SwiGLU
from foremoe.transfer.base import Tensors
from foremoe.transfer.residency import Residency

# Letters: Y pairs of a rank, S slots, H hidden size, F ffn size.

PAIRS, HIDDEN, FFN = ((260,), 64, 32) if DRY else ((65536, 8192), 2048, 768)  # a rank of qwen3-30b-a3b
SLOTS = (3, 5, 9, 17, 33, 65)
UNEVEN_SLOTS = 17  # these also with unequal loads
EVER = 10**9


class Rank:
    """A rank's slots, with weights in bf16 and gradients in float32; the last slot is redundant, so it lies by itself."""

    def __init__(self, hidden_size: int, ffn_size: int, num_slots: int) -> None:
        self.shapes = tuple(SwiGLU().shapes(hidden_size, ffn_size).values())
        self.spare = self._slots(1)[0]  # where copies may land meanwhile
        self.weights_S, self.grads_S = (
            self._slots(max(num_slots - 1, 1), dtype) + self._slots(int(num_slots > 1), dtype)
            for dtype in (torch.bfloat16, torch.float32)
        )
        for grads in self.grads_S:
            for grad in grads:
                grad.zero_()

    def _slots(self, num: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensors]:
        memory = (torch.randn(num, a * b, device=DEVICE).div_(a**0.5).to(dtype) for a, b in self.shapes)
        return list(zip(*(tensor.unbind() for tensor in memory), strict=True))

    def weights(self, micro_step: int, layer: int, phase: int) -> Residency:
        """The same in every use."""
        return Residency(tuple(range(len(self.weights_S))), tuple(self.weights_S), tuple(self.grads_S), True)

    def gradients(self, micro_step: int, layer: int) -> None:
        """They stay here."""

    def release(self, micro_step: int, layer: int, phase: int) -> None:
        """They stay here."""

    def launch(self) -> None:
        """Nothing leaves."""

    def row(self, num_S: list[int], math: ExpertMath) -> Row:
        """The row of a route, as the runtime makes it."""
        num_S = num_S + [0] * (len(self.weights_S) - len(num_S))
        end_S = torch.tensor(num_S, device=DEVICE).cumsum(0, dtype=torch.int32)
        return Row(0, 0, num_S, self.shapes, math, self, ComputeTime(), end_S)  # type: ignore[arg-type]

    def step(self, x_YH: torch.Tensor, row: Row) -> None:
        """Forward and backward; the output is its own gradient."""
        y_YH = self.forward(x_YH, row)
        y_YH.backward(y_YH.detach())

    def forward(self, x_YH: torch.Tensor, row: Row) -> torch.Tensor:
        """The output, with its graph."""
        return GroupedExperts.apply(x_YH.detach().requires_grad_(), row, Phase.FORWARD)


def loads(pairs: int, num_slots: int, even: bool) -> list[int]:
    """Pairs of each slot: equal numbers, or numbers in proportion to 1, 1/2, 1/3 and so on."""
    share_S = [1.0 if even else 1.0 / (s + 1) for s in range(num_slots)]
    num_S = [int(pairs * share / sum(share_S)) for share in share_S]
    num_S[0] += pairs - sum(num_S)
    return num_S


def main() -> int:
    """Prints seconds and operations of each way."""
    rows = []
    default = products.FEW_PAIRS, products.MANY_PAIRS
    # What FEW_PAIRS and MANY_PAIRS decide: gradients by one kernel or by slot, products by slot or grouped.
    ways = {
        "by default": default,
        "gradients by one kernel": (EVER, default[1]),
        "gradients by slot": (0, default[1]),
        "products grouped": (default[0], EVER),
        "products by slot": (default[0], 0),
    }
    cases = [*itertools.product(SLOTS, PAIRS, [True]), *itertools.product([UNEVEN_SLOTS], PAIRS, [False])]
    for num_slots, pairs, even in cases:
        x_YH = torch.randn(pairs, HIDDEN, device=DEVICE).bfloat16()
        num_S = loads(pairs, num_slots, even)
        rank, one = Rank(HIDDEN, FFN, num_slots), Rank(HIDDEN, FFN, 1)
        row = rank.row(num_S, SwiGLU())

        def run(do: Callable[[torch.Tensor, Row], Any], x_YH: torch.Tensor, row: Row, limits: tuple[int, int]) -> None:
            products.FEW_PAIRS, products.MANY_PAIRS = limits
            do(x_YH, row)

        arms = {name: partial(run, rank.step, x_YH, row, limits) for name, limits in ways.items()}
        arms["one"] = partial(one.step, x_YH, one.row([pairs], SwiGLU()))
        seconds, flops = median_s(arms, ahead=True), 18 * pairs * HIDDEN * FFN
        for name, limits in ways.items():
            forward, both = (counts(partial(run, do, x_YH, row, limits)) for do in (rank.forward, rank.step))
            s, reads = seconds[name], both[1]
            times = f"{s * 1e3:.2f} | {seconds['one'] * 1e3:.2f} | {s / seconds['one']:.2f} | {flops / s / 1e12:.2f}"
            slots = f"{num_slots - 1} + 1 | {min(num_S)} to {max(num_S)}"
            rows.append(f"{pairs} | {slots} | {name} | {forward[0]} | {both[0] - forward[0]} | {reads} | {times}")
    print(f"Hidden size {HIDDEN}, ffn size {FFN}; bf16, weight gradients in float32. Views and Triton's are not counted.\n")
    head = "pairs | slots | pairs of a slot | computed | operations forward | backward | host reads"
    table(f"{head} | both ms | one product ms | ratio | TFLOP/s", *rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
