"""Measures the host time of the slot path in Megatron-Core's MoE layer, and of whole layers of Megatron-Core and the runtime.

    OMP_NUM_THREADS=1 python -m bench.megatron_slots [--beside CHECKOUT]

The slot path is measured with routing that is known before the stage, with routing that is not known, and without foremoe. Every
CPU rank has 16 experts, one redundant slot and 8192 tokens with top-8. The counts of operations, sorts, gathers between ranks and
host waits are those of a layer's forward pass. They include permutations and messages, but not the experts. Times are CPU
milliseconds of the calling thread. They cover the steps `remap`, `counts` and `route` in a layer. A second column shows the time
per row to create routes at the beginning of a stage with 32 rows.

Whole layers are measured on two ranks, each with 16 experts and one redundant slot, with top-8, forward and backward. Their times
are CPU microseconds of the calling thread without messages, for the fastest tenth of the runs with 64 tokens. Memory is measured
in bytes with 1,024 tokens of Qwen3-30B-A3B, and for the runtime's forward pass also with 8,192. With `--beside`, another checkout
is measured too, in alternation with this one.
"""

from __future__ import annotations

import collections
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.output import command_line, emit, hardware
from foremoe.testing.ranks import RankPool

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, REPEATS = 3, 4

Seconds = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Counts, measures and prints two tables."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--beside", type=Path, help="a checkout of another commit")
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests" / "megatron")]  # ranks look for modules where this process does
    import slot_path  # type: ignore[import-not-found]  # tests/megatron
    import whole_layer  # type: ignore[import-not-found]

    with RankPool(2) as pool:
        answers = pool.run(slot_path.counts, timeout_s=300.0)
        known, counted = (max(pool.run(whole_layer.forward_bytes, known, timeout_s=300.0)) / 1e6 for known in (True, False))
    if not all(same for _, same in answers):
        sys.exit("the paths differ in their results")
    # Of the rank that has most to do: one has a replica, which comes and goes as a tensor of its own.
    counts = {path: map(max, zip(*(of[path] for of, _ in answers), strict=True)) for path in answers[0][0]}
    lines = [
        "# What a layer takes of its host",
        "",
        f"{hardware()}, one thread a rank.",
        "",
        "## Slot path of a Megatron-Core MoE layer",
        "",
    ]
    lines += ["| slot path | operations | sorts | gathers between ranks | host waits |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {path} | {' | '.join(map(str, of))} |" for path, of in counts.items()]
    lines += ["", "| ranks x experts | slot path | ms in the layer | ms of the stage's begin |", "| --- | --- | --- | --- |"]
    for num_ranks in args.ranks:
        for path, (in_layer, in_begin) in _medians(num_ranks).items():
            lines.append(f"| {num_ranks} x 16 | {path} | {in_layer * 1e3:.2f} | {in_begin * 1e3:.2f} |")
    lines += [*_whole_layers(args.beside), ""]
    lines.append(
        f"With {whole_layer.MANY:,} tokens, launches of the runtime's forward pass read and write {known:,.0f} MB with known and "
        f"{counted:,.0f} MB with counted routing."
    )
    emit("\n".join(lines) + "\n", args.out)


def _whole_layers(beside: Path | None) -> list[str]:
    """Returns a table of whole layers, with each figure of `beside` before the one of this checkout."""
    checkouts = [ROOT] if beside is None else [beside.resolve(), ROOT]
    runs = [[_run("whole_layer", folder) for folder in checkouts] for _ in range(ROUNDS)]
    lines = ["", "## Whole layers", "", f"At commit {', then '.join(map(_commit, checkouts))}:", ""]
    lines += ["| layer | pass | launches | MB | host waits | host us |", "| --- | --- | --- | --- | --- | --- |"]
    for layer, passes in runs[0][0].items():
        for name in passes:
            counts = [run[layer][name] for run in runs[-1]]
            us = [1e6 * statistics.median(of[i][layer][name][3] for of in runs) for i in range(len(checkouts))]
            cells = [[of[0] for of in counts], [round(of[1] / 1e6) for of in counts], [of[2] for of in counts], [*map(round, us)]]
            lines.append(f"| {layer} | {name} | {' | '.join(map(_arrow, cells))} |")
    return lines


def _arrow(figures: list[int]) -> str:
    return str(figures[0]) if len(set(figures)) == 1 else " -> ".join(map(str, figures))


def _commit(checkout: Path) -> str:
    words = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(words, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()


def _medians(num_ranks: int) -> dict[str, tuple[float, float]]:
    """Path -> seconds in the layer and of the stage's begin, for a row."""
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for _ in range(ROUNDS):
        for path, of in _seconds(num_ranks).items():
            found[path] += of
    return {path: (statistics.median(a for a, _ in of), statistics.median(b for _, b in of)) for path, of in found.items()}


def _seconds(num_ranks: int) -> Seconds:
    """Measures the seconds of every slot path in one process."""
    found: Seconds = _run("slot_path", ROOT, str(num_ranks), str(REPEATS))
    return found


def _run(module: str, checkout: Path, *words: str) -> Any:
    """Runs a module of tests/megatron with the foremoe of a checkout and returns the JSON that it prints."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT / "tests" / "megatron")])}
    command = [sys.executable, "-W", "ignore", "-c", f"import {module}; {module}.main()", *words]
    done = subprocess.run(command, cwd=checkout, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
