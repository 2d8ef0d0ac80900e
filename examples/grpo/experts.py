"""The demo's expert math: SwiGLU in blocks of rows, with its CPU seconds measured row by row of the plan."""

from __future__ import annotations

import time

import numpy as np
import torch

from foremoe.base.arrays import Array
from foremoe.runtime.experts import SwiGLU
from foremoe.runtime.runtime import Runtime
from foremoe.transfer.base import Tensors

# Letters: T tokens, K top-k, H hidden size, N pairs of one slot, M micro-steps, L layers; 2: forward, backward.

# What backward makes of so many pairs stays in a core's cache, so that a pair costs the same in a busy slot as in a calm one.
_BLOCK = 512


class ClockedSwiGLU:
    """SwiGLU that keeps thread CPU seconds by (micro-step, layer, direction); an `ExpertMath`.

    A layer waits for its slowest rank in every row; sums over a stage would hide a skew whose hot rank changes.
    """

    def __init__(self) -> None:
        self.math = SwiGLU()
        self.seconds: dict[tuple[int, int, int], float] = {}
        self._row = (0, 0, 0)

    def shapes(self, hidden_size: int, ffn_size: int) -> dict[str, tuple[int, ...]]:
        return self.math.shapes(hidden_size, ffn_size)

    def forward(self, x_NH: torch.Tensor, weights: Tensors) -> tuple[torch.Tensor, Tensors]:
        begin_s = time.thread_time()
        found = self.math.forward(x_NH, weights)
        self._add(time.thread_time() - begin_s)
        return found

    def backward(
        self, x_NH: torch.Tensor, saved: Tensors, grad_y_NH: torch.Tensor, weights: Tensors, grads: Tensors
    ) -> torch.Tensor:
        begin_s = time.thread_time()
        rows = (x_NH.split(_BLOCK), saved[0].split(_BLOCK), grad_y_NH.split(_BLOCK))
        parts = [self.math.backward(x, (pre,), y, weights, grads) for x, pre, y in zip(*rows, strict=True)]
        grad_x_NH = torch.cat(parts)
        self._add(time.thread_time() - begin_s)
        return grad_x_NH

    def _add(self, seconds: float) -> None:
        self.seconds[self._row] = self.seconds.get(self._row, 0.0) + seconds

    def start(self) -> None:
        """Forgets what was measured."""
        self.seconds = {}

    def enter(self, micro_step: int, layer: int, direction: int) -> None:
        """What comes now belongs to this row."""
        self._row = (micro_step, layer, direction)

    def seconds_ML2(self, num_micro_steps: int, num_layers: int) -> Array:
        """float64 [M, L, 2]."""
        out = np.zeros((num_micro_steps, num_layers, 2))
        for row, seconds in self.seconds.items():
            out[row] = seconds
        return out


class ClockedExperts:
    """`Runtime.moe` of one micro-step, with the clock told which row runs."""

    def __init__(self, runtime: Runtime, clock: ClockedSwiGLU, micro_step: int) -> None:
        self.runtime, self.clock, self.micro_step = runtime, clock, micro_step

    def __call__(self, layer: int, x_TH: torch.Tensor, topk_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        self.clock.enter(self.micro_step, layer, 0)
        y_TH = self.runtime.moe(layer, x_TH, topk_TK, weight_TK)
        if y_TH.requires_grad:
            # The gradient of the output arrives just before the experts of the row run backward.
            y_TH.register_hook(lambda _: self.clock.enter(self.micro_step, layer, 1))
        return y_TH
