"""Runs parts that check results and measure times on one GPU.

    python -m bench.gpu right [--dry-run] [--parts layer,ranks] [--out bench/results/gpu-right_GPU_DATE.md]
    python -m bench.gpu fast [--dry-run] [--parts copies,rows] [--out bench/results/gpu-fast_GPU_DATE.md]

The command `right` checks whether results are right, and `fast` measures times. Every part is a separate process with a time
limit. The result file is rewritten whenever a part ends. Parts of `right` run at the same time, because they do not measure
times. Parts of `fast` run one after the other. Each command takes at most eight minutes.

A result names the commit that git reports. In a copy without `.git`, set the environment variable `FOREMOE_COMMIT` to it.

`--dry-run` runs the parts on a CPU with small sizes. Its figures have no meaning. The exit code is 2 without a GPU and 1 if a
part failed. On one GPU, a peer copy stays in the memory of that GPU. Its bandwidth says nothing about a link between GPUs, so
that it is not shown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu.measure import environment
from bench.output import command_line


class Part(NamedTuple):
    """A part: its heading, the module that prints it, and the seconds that it may take."""

    title: str
    module: str
    limit_s: float


ROOT = Path(__file__).resolve().parents[2]
# Without a GPU it is the CPU that is slow, and that other programs may keep busy.
DRY_LIMIT_S = 600.0

RIGHT = {
    "layer": Part("A layer in bf16 against float64", "bench.gpu.layer_right", 300),
    "ranks": Part("Two ranks on one GPU: weights by NCCL, copy engines and the host store", "bench.gpu.two_ranks", 300),
    "transfer": Part("Conformance of pinned_host and cupy_peer", "bench.gpu.suites transfer", 300),
    "runtime": Part("The runtime's equality tests, all ranks on the GPU", "bench.gpu.suites runtime", 300),
    "megatron": Part("Megatron-Core with two ranks on one GPU", "bench.gpu.megatron", 300),
    "graph": Part("A layer of known routing in a CUDA graph", "bench.gpu.graph", 100),
    "sanitizer": Part("The layer under compute-sanitizer", "bench.gpu.sanitizer", 300),
}
FAST = {
    "rows": Part("Operations and host synchronisations of a layer", "bench.gpu.rows", 60),
    "profile": Part("Where the time of a layer goes", "bench.gpu.profile", 60),
    "experts": Part("Expert compute against one product of the same size", "bench.gpu.experts", 60),
    "copies": Part("Copies from the host: bandwidth, page lock, overlap", "bench.gpu.copies", 90),
    "calibrate": Part("`foremoe calibrate` with one rank", "bench.gpu.calibrate", 100),
    "replay": Part("Rank replay: the slowest of 64 ranks, measured one by one", "bench.gpu.replay", 100),
}
COMMANDS = {"right": RIGHT, "fast": FAST}
SIDE_BY_SIDE = {"right": 8, "fast": 1}


def run_part(part: Part, dry_run: bool) -> tuple[str, bool]:
    """Runs a part until its time is over: its output, and whether it ended well."""
    command, begin = [sys.executable, "-u", "-m", *part.module.split(), *(["--dry-run"] if dry_run else [])], time.monotonic()
    limit_s = max(part.limit_s, DRY_LIMIT_S) if dry_run else part.limit_s
    with tempfile.TemporaryFile() as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False).returncode
            end = "" if code == 0 else f"\n\nFAILED: exit code {code}."
        except subprocess.TimeoutExpired:
            end = f"\n\nFAILED: stopped after {limit_s:.0f} s."
        out.seek(0)
        text = out.read().decode(errors="replace").strip()
    for folder in (ROOT, Path(sys.prefix)):  # where they lie is no part of a result
        text = text.replace(f"{folder}/", "")
    return f"{text}{end}\n\n({time.monotonic() - begin:.0f} s)", not end


def run_parts(parts: Mapping[str, Part], head: str, out: Path | None, dry_run: bool, side_by_side: int = 1) -> bool:
    """Runs parts, prints each and writes all that have ended to `out`, in their order; True if all ended well."""
    found: dict[str, tuple[str, bool]] = {}
    print(head, flush=True)

    def run(name: str) -> None:
        text, passed = run_part(parts[name], dry_run)
        section = f"\n## {parts[name].title}\n\n{text}\n"
        with lock:
            found[name] = section, passed
            print(section, flush=True)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(head + "".join(found[name][0] for name in parts if name in found))

    lock = threading.Lock()
    with ThreadPoolExecutor(side_by_side) as pool:
        list(pool.map(run, parts))
    return all(passed for _, passed in found.values())


def main() -> int:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("command", choices=list(COMMANDS))
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--parts", help="some of them; default: all")
    args = parser.parse_args()
    parts = COMMANDS[args.command]
    names = args.parts.split(",") if args.parts else list(parts)
    if unknown := [name for name in names if name not in parts]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(parts)}.")
    # Ranks of one machine: whatever other networks it has, or lacks.
    os.environ |= {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if not (args.dry_run or torch.cuda.is_available()):
        print("bench.gpu needs a CUDA GPU and a torch that sees it, and there is none; --dry-run needs none.", file=sys.stderr)
        return 2
    kind = "Dry run on a CPU: figures say nothing" if args.dry_run else f"foremoe on one GPU: {args.command}"
    command = f"python -m bench.gpu {args.command}" + (f" --parts {args.parts}" if args.parts else "")
    head = f"# {kind}\n\nMeasured on: {environment()}. Command: `{command}`.\n"
    side_by_side = 1 if args.dry_run else SIDE_BY_SIDE[args.command]
    return int(not run_parts({name: parts[name] for name in names}, head, args.out, args.dry_run, side_by_side))


if __name__ == "__main__":
    sys.exit(main())
