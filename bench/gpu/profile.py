"""Kernels of one layer with known and one with counted routing, forward and backward, by kind and time, from torch's profiler."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.layer import Layer, Sizes
from bench.gpu.measure import DEVICE, DRY, median_s, table

SIZES = (Sizes(64, 4, 16, 64, 32),) if DRY else (Sizes(8192, 8, 16, 2048, 768), Sizes(1024, 8, 16, 2048, 768))
# What a kernel's name gives away, in the order in which it is asked.
KINDS = {
    "products": ("gemm", "cutlass", "xmma", "nvjet", "wgmma", "cublas", "grouped", "splitk", "mm"),
    "activation": ("forward", "backward", "silu"),
    "gathers": ("index", "gather", "scatter"),
    "sums": ("reduce", "sum"),
    "sorting and counting": ("sort", "scan", "radix", "cumsum", "repeat_interleave"),
    "copies and fills": ("memcpy", "memset", "copy", "fill"),
}


def kernels(run: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel that a call launches."""
    run()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
    events = [event for event in seen.events() if event.device_type.name == ("CPU" if DRY else "CUDA")]
    return [(event.name, event.cpu_time if DRY else event.device_time) for event in events]


def kind_of(name: str) -> str:
    """The first kind of which a word is in the name."""
    return next((kind for kind, words in KINDS.items() if any(word in name.lower() for word in words)), "other")


def host_s(run: Callable[[], Any]) -> float:
    """Seconds until a call has launched all its work: the least of ten."""
    found = []
    for _ in range(10):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        begin_s = time.perf_counter()
        run()
        found.append(time.perf_counter() - begin_s)
    return min(found)


def host_operations(run: Callable[[], Any]) -> list[str]:
    """The operations on which the host spends most of a call: name, calls, microseconds of its own; profiling slows all down."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        run()
    longest = sorted(seen.key_averages(), key=lambda event: -event.self_cpu_time_total)[:12]
    return [f"`{event.key[:60]}` | {event.count} | {event.self_cpu_time_total:.0f}" for event in longest]


def measure(sizes: Sizes) -> None:
    """Prints kernels by kind and the longest ones, and where the host's time goes."""
    layer = Layer(sizes)
    x_TH, weight_TK = layer.tokens()
    topk = layer.topk[0].to(DEVICE)
    runs = {"known": lambda: layer.step(x_TH, weight_TK, layer.route(0)),
            "counted": lambda: layer.step(x_TH, weight_TK, layer.counted_route(topk))}  # fmt: skip
    forward = {"known": lambda: layer.forward(x_TH, weight_TK, layer.route(0)),
               "counted": lambda: layer.forward(x_TH, weight_TK, layer.counted_route(topk))}  # fmt: skip
    seconds, seconds_forward, alone = median_s(runs, ahead=True), median_s(forward, ahead=True), median_s(runs)
    print(f"{sizes.tokens} tokens, top-{sizes.topk}, {sizes.experts} + 1 slots, hidden {sizes.hidden}, ffn {sizes.ffn}; bf16.\n")
    rows, longest = [], []
    for name, run in runs.items():
        found = kernels(run)
        num, us = Counter(kind_of(kernel) for kernel, _ in found), Counter[str]()
        for kernel, time_us in found:
            us[kind_of(kernel)] += time_us  # type: ignore[assignment]
        parts = " | ".join(f"{us[kind]:.0f} ({num[kind]})" for kind in (*KINDS, "other"))
        total = f"{len(found)} | {len(kernels(forward[name]))} | {seconds[name] * 1e3:.3f} | {seconds_forward[name] * 1e3:.3f}"
        rows.append(f"{name} | {total} | {alone[name] * 1e3:.3f} | {host_s(run) * 1e3:.3f} | {parts}")
        by_name = Counter[str]()
        for kernel, time_us in found:
            by_name[kernel] += time_us  # type: ignore[assignment]
        times = Counter(kernel for kernel, _ in found)
        longest += [
            f"{name} | `{kernel[:90]}` | {times[kernel]} | {total_us:.0f}" for kernel, total_us in by_name.most_common(12)
        ]
    head = "routing | kernels | of them forward | both ms | forward ms | both, host not ahead, ms | host ms"
    table(f"{head} | {' | '.join(f'{kind}, us (kernels)' for kind in (*KINDS, 'other'))}", *rows)
    print()
    table("routing | kernel | times | us", *longest)
    print()
    table("operation of the host, known routing | calls | us of its own", *host_operations(runs["known"]))
    print()


def main() -> int:
    """Measures a large and a small micro-step."""
    for sizes in SIZES:
        measure(sizes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
