"""Compilation of planning's kernels before the ranks start, with a sign of life; a second run finds them on disk."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from examples.grpo.planning import cluster_of, model_of, plan_stages, smallest_redundant, workloads_of
from examples.grpo.settings import Settings
from foremoe.base.compiled import watch_compilation
from foremoe.synthetic.tokens import synthetic_trace

_EVERY_S = 5.0


def compile_kernels(settings: Settings, num_ranks: int, say: Callable[[str], None]) -> None:
    """Plans stages of a few drawn tokens, so that ranks find what they need compiled.

    Args:
        settings: Settings of the demo.
        num_ranks: Ranks of the demo.
        say: Called with a line when the first kernel is compiled, then every few seconds, and at the end.
    """
    progress = Progress(say)
    with watch_compilation(progress):
        trace = synthetic_trace(model_of(settings), num_sequences=64, mean_length=16.0, regime="mid")
        small = dataclasses.replace(settings, recompute_tokens=trace.T // 2, update_tokens=trace.T // 4)
        smallest_redundant(workloads_of(trace, small, num_ranks), small)
        plan_stages(trace, small, cluster_of(num_ranks), 1, 0)
    if progress.num_done:
        say(f"compiled {progress.num_done} kernels in {time.perf_counter() - progress.begin_s:.0f} s")


class Progress:
    """Counts compiled kernels; silent where all of them come from disk."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say, self.num_done = say, 0
        self.begin_s = self.said_s = time.perf_counter()

    def __call__(self, name: str) -> None:
        self.num_done += 1
        now_s = time.perf_counter()
        if self.num_done == 1:
            self.say("compiling kernels, on the first run only; this takes one to three minutes")
        elif now_s - self.said_s >= _EVERY_S:
            self.say(f"compiling kernels: {self.num_done} done, {now_s - self.begin_s:.0f} s")
        else:
            return
        self.said_s = now_s
