"""Checks that examples/megatron_gpt.py has the same losses with and without foremoe, on two or four ranks of one GPU."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

from bench.gpu.measure import DRY, table

STEPS, LIMIT_S = 3, 240.0
# What a printed loss may differ by: its last digit, and in bf16 what a step of Adam makes of gradients rounded in other sums.
FLOAT32, BF16 = 2e-6, 1e-3


class Layout(NamedTuple):
    """A run: ranks, options of example and `bench.gpu.megatron_program`, and the largest difference of a loss that passes."""

    ranks: int
    arguments: tuple[str, ...]
    options: Mapping[str, Any]
    bound: float = FLOAT32


LAYOUTS = {
    "EP2": Layout(2, ("--ep", "2"), {}),
    "EP2 PP2, reductions beside backward, all layers forward again": Layout(
        4, ("--ep", "2", "--pp", "2"), {"overlap": 1, "recompute": True}
    ),
    "EP2 EDP2, reductions and gathers beside compute, 8 unknown tokens in every row": Layout(
        4, ("--ep", "2"), {"overlap": 2, "unknown": 8}
    ),
    "EP2 in bf16": Layout(2, ("--ep", "2"), {"overlap": 1, "bf16": True}, BF16),
}


def run(layout: Layout, *more: str) -> tuple[list[float], str]:
    """Loss of each step, as printed, and the last that foremoe says beside it.

    Raises:
        RuntimeError: A rank failed; with what the ranks printed last.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = {"MASTER_ADDR": "127.0.0.1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
             "CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # fmt: skip
    ranks = list[subprocess.Popen[str]]()
    for rank in range(layout.ranks):
        # NCCL refuses two ranks of one host on one GPU, so each says that it is a host of its own.
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": layout.ranks, "MASTER_PORT": port, "NCCL_HOSTID": f"rank-{rank}"}
        environment = os.environ | fixed | {name: str(value) for name, value in own.items()}
        program = ["-m", "bench.gpu.megatron_program", json.dumps(dict(layout.options)), *layout.arguments]
        command = [sys.executable, "-W", "ignore", *program, "--steps", str(STEPS), *more]
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment))
    try:
        with ThreadPoolExecutor(layout.ranks) as pool:
            outputs = list(pool.map(_output, ranks))
    finally:
        for process in ranks:
            process.kill()
    if any(process.returncode for process in ranks):
        raise RuntimeError("\n".join(text[-3000:] for text in outputs))
    said = [line for text in outputs for line in re.findall(r"step \d+: loss ([\d.]+), [\d.]+ s ?(.*)", text)]
    known = next(iter(re.findall(r"known rows \d+", "\n".join(outputs))), "")
    return [float(loss) for loss, _ in said], ", ".join(filter(None, [said[-1][1], known]))


def _output(process: subprocess.Popen[str]) -> str:
    """Returns what a rank printed, and ends it after `LIMIT_S`, so that it hides no other rank's error."""
    try:
        return process.communicate(timeout=LIMIT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return f"{process.communicate()[0]}\nstopped after {LIMIT_S:g} s"


def compare(item: tuple[str, Layout]) -> tuple[str, bool]:
    """A row of the table, and whether losses are as near as they must be."""
    name, layout = item
    (without, _), (planned, figures) = run(layout, "--without-foremoe"), run(layout)
    apart = max(abs(a - b) for a, b in zip(without, planned, strict=True))
    good = len(without) == STEPS and apart <= layout.bound
    losses = " | ".join(", ".join(f"{loss:.6f}" for loss in found) for found in (without, planned))
    return f"{name} | {losses} | {apart:.1e} | {layout.bound:g} | {figures}", good


def main() -> int:
    """Prints the losses of both side by side; those that are too far apart end in code 1."""
    if find_spec("megatron") is None:
        print("megatron-core is not installed.")
        return int(not DRY)
    rows, good = list[str](), True
    with ThreadPoolExecutor(1 if DRY else len(LAYOUTS)) as pool:
        for found in [pool.submit(compare, item) for item in LAYOUTS.items()]:
            try:
                row, near = found.result()
                rows.append(row)
                good &= near
            except (RuntimeError, IndexError, ValueError) as error:
                print(f"```\n{type(error).__name__}: {error}\n```\n", flush=True)
                good = False
    table("layout | losses without foremoe | with it | apart | bound | figures of the last step", *rows)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
