"""Compilation of planning's kernels before the ranks start, with a sign of life; a second run finds them on disk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core import event

from examples.grpo.planning import cluster_of, plan_stages, smallest_redundant, workloads_of
from examples.grpo.settings import Settings
from foremoe.routing.trace import RoutingTrace

_EVERY_S = 5.0
_LENGTH, _NUM_SEQUENCES = 16, 64


def compile_kernels(settings: Settings, num_ranks: int, say: Callable[[str], None]) -> None:
    """Plans stages of a few drawn tokens, so that ranks find what they need compiled.

    Args:
        settings: Settings of the demo.
        num_ranks: Ranks of the demo.
        say: Called with a line when the first kernel is compiled, then every few seconds, and at the end.
    """
    tokens = _LENGTH * _NUM_SEQUENCES
    small = dataclasses.replace(settings, recompute_tokens=tokens // 2, update_tokens=tokens // 4)
    rng = np.random.default_rng(0)
    popularity_E = rng.standard_normal(small.num_experts)
    noisy_TLE = popularity_E + rng.gumbel(size=(tokens, small.num_layers, small.num_experts))
    trace = RoutingTrace(
        topk_TLK=np.argsort(-noisy_TLE, axis=2)[..., : small.num_topk].astype(np.uint8), num_experts=small.num_experts,
        seq_len_Q=np.full(_NUM_SEQUENCES, _LENGTH), moe_layer_L=np.arange(1, 1 + small.num_layers, dtype=np.int32),
        source="drawn",
    )  # fmt: skip
    with event.install_listener("numba:compile", Listener(say)) as listener:
        smallest_redundant(workloads_of(trace, small, num_ranks), small)
        plan_stages(trace, small, cluster_of(num_ranks), 1, 0)
    if listener.num_done:
        say(f"compiled {listener.num_done} kernels in {time.perf_counter() - listener.begin_s:.0f} s")


class Listener(event.Listener):  # type: ignore[misc]
    """Counts compiled kernels; silent where all of them come from disk."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.num_done = say, 0
        self.begin_s = self.said_s = 0.0

    def on_start(self, event: Any) -> None:
        now_s = time.perf_counter()
        if not self.begin_s:
            self.begin_s = self.said_s = now_s
            self.say("compiling kernels, on the first run only; this takes a minute or two")
        elif now_s - self.said_s >= _EVERY_S:
            self.said_s = now_s
            self.say(f"compiling kernels: {self.num_done} done, {now_s - self.begin_s:.0f} s")

    def on_end(self, event: Any) -> None:
        self.num_done += 1
