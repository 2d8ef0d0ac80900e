"""Evidence from one GPU, part by part.

    python -m bench.gpu [--dry-run] [--parts copies,rows] [--out bench/results/GPU_DATE.md]

Every part is a process of its own with a time limit; what it has printed until then is in the result, which is written anew after
every part. All parts together take at most eight minutes. `--dry-run` runs them on a CPU with small sizes, where figures say
nothing. Exit code 2 without a GPU, 1 if a part failed. On one GPU a peer copy stays inside its memory, so its bandwidth says
nothing about a link between GPUs, and is not shown.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
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


# Without a GPU it is the CPU that is slow, and that other programs may keep busy.
DRY_LIMIT_S = 600.0

PARTS = {
    "suites": Part("Conformance of pinned_host and cupy_peer", "bench.gpu.suites", 120),
    "nccl": Part("NCCL with two ranks on one GPU: right or wrong, not fast", "bench.gpu.two_ranks", 80),
    "rows": Part("Operations and host synchronisations of a layer", "bench.gpu.rows", 40),
    "experts": Part("Expert compute against one product of the same size", "bench.gpu.experts", 50),
    "copies": Part("Copies from the host: bandwidth, page lock, overlap", "bench.gpu.copies", 70),
    "graph": Part("A layer of known routing in a CUDA graph", "bench.gpu.graph", 20),
    "replay": Part("Rank replay: the slowest of 64 ranks, measured one by one", "bench.gpu.replay", 100),
}


def run_part(part: Part, dry_run: bool) -> tuple[str, bool]:
    """Runs a part until its time is over: its output, and whether it ended well."""
    command, begin = [sys.executable, "-u", "-m", part.module, *(["--dry-run"] if dry_run else [])], time.monotonic()
    limit_s = max(part.limit_s, DRY_LIMIT_S) if dry_run else part.limit_s
    with tempfile.TemporaryFile() as out:
        try:
            code = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=limit_s, check=False).returncode
            end = "" if code == 0 else f"\n\nFAILED: exit code {code}."
        except subprocess.TimeoutExpired:
            end = f"\n\nFAILED: stopped after {limit_s:.0f} s."
        out.seek(0)
        text = out.read().decode(errors="replace").strip()
    return f"{text}{end}\n\n({time.monotonic() - begin:.0f} s)", not end


def run_parts(parts: Mapping[str, Part], head: str, out: Path | None, dry_run: bool) -> bool:
    """Runs parts one after the other, prints each and writes all so far to `out`; True if all ended well."""
    text, good = head, True
    print(head, flush=True)
    for part in parts.values():
        section, passed = run_part(part, dry_run)
        section, good = f"\n## {part.title}\n\n{section}\n", good and passed
        text += section
        print(section, flush=True)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text)
    return good


def main() -> int:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--dry-run", action="store_true", help="on a CPU, with small sizes")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; default: all")
    args = parser.parse_args()
    names = args.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}.")
    if not (args.dry_run or torch.cuda.is_available()):
        print("bench.gpu needs a CUDA GPU and a torch that sees it, and there is none; --dry-run needs none.", file=sys.stderr)
        return 2
    kind = "Dry run on a CPU: figures say nothing" if args.dry_run else "foremoe on one GPU"
    head = f"# {kind}\n\nMeasured on: {environment()}. Command: `python -m bench.gpu`.\n"
    return int(not run_parts({name: PARTS[name] for name in names}, head, args.out, args.dry_run))


if __name__ == "__main__":
    sys.exit(main())
