"""Tools that all parts share: places to run, time measurements, launch counts, and a description of the machine."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.output import hardware
from foremoe.calibrate.stopwatch import AHEAD_CYCLES

DRY = "--dry-run" in sys.argv
DEVICE = torch.device("cpu" if DRY else "cuda")
REPEATS, WARM_UP = (3, 1) if DRY else (30, 5)


def table(head: str, *rows: str) -> None:
    """Prints the head of a markdown table, and rows."""
    print(f"| {head} |\n|{' --- |' * (head.count('|') + 1)}", *(f"| {row} |" for row in rows), sep="\n", flush=True)


def median_s(arms: Mapping[str, Callable[[], Any]], repeats: int = REPEATS, ahead: bool = False) -> dict[str, float]:
    """Seconds on the current stream, by arm: medians over repeats in which the arms take turns.

    Args:
        ahead: Keep the device busy before each, so that the host launches ahead, as in a step that waits for the device.
    """
    times: dict[str, list[float]] = {name: [] for name in arms}
    for repeat in range(WARM_UP + repeats):
        for name, run in arms.items():
            seconds = _seconds(run, ahead)
            if repeat >= WARM_UP:
                times[name].append(seconds)
    return {name: statistics.median(of) for name, of in times.items()}


def _seconds(run: Callable[[], Any], ahead: bool) -> float:
    if DRY:
        begin_s = time.perf_counter()
        run()
        return time.perf_counter() - begin_s
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead:
        torch.cuda._sleep(AHEAD_CYCLES)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


class Operations(TorchDispatchMode):
    """Notes operations that work on elements, and the shapes of what they give; views cost nothing on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, list[torch.Size]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.shapes.append((str(func), [x.shape for x in tree_leaves(found) if isinstance(x, torch.Tensor)]))
        return found


class HostReads(TorchFunctionMode):
    """Counts what makes the host wait for the device."""

    names = frozenset({"cpu", "item", "tolist", "__bool__", "__int__", "__index__", "nonzero"})

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        on_device = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == DEVICE.type
        self.num += on_device and getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


def counts(run: Callable[[], Any]) -> tuple[int, int]:
    """Operations and host reads of a call."""
    with HostReads() as reads, Operations() as operations:
        run()
    return len(operations.shapes), reads.num


def environment() -> str:
    """One line on hardware and software, with date and commit."""
    if not torch.cuda.is_available():
        return hardware()
    try:
        import cupy

        cupy_version = cupy.__version__
    except ImportError:
        cupy_version = "not installed"
    query = ["nvidia-smi", "--query-gpu=driver_version,pcie.link.gen.max,pcie.link.width.max", "--format=csv,noheader"]
    driver, generation, width = (_output(query).splitlines()[0] + ", ?, ?").split(", ")[:3]
    commit = os.environ.get("FOREMOE_COMMIT") or _output(["git", "describe", "--always", "--exclude=*", "--dirty=+"])
    return (
        f"{torch.cuda.get_device_name()}, driver {driver}, PCIe generation {generation} x{width}; Python "
        f"{platform.python_version()}, torch {torch.__version__} (CUDA {torch.version.cuda}), cupy {cupy_version}; "
        f"{datetime.date.today().isoformat()}, commit {commit}"
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
