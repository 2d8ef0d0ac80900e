"""The slot path of a Megatron-Core MoE layer: where routing is known before the stage, where it is not, and without foremoe.

    OMP_NUM_THREADS=1 python -m bench.megatron_slots

16 experts and one redundant slot on every CPU rank, 8192 tokens, top-8. Operations, sorts, gathers between ranks and host waits
are those of a layer's forward, permutations and messages with it, experts without. Milliseconds are CPU time of the calling
thread: of remap, counts and route in a layer, and of the share that a row has of making routes as a stage of 32 rows begins,
on that thread alone.
"""

from __future__ import annotations

import collections
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from bench.output import command_line, emit, hardware
from foremoe.testing.ranks import RankPool

ROOT = Path(__file__).resolve().parents[1]
ROUNDS, REPEATS = 3, 4

Seconds = dict[str, list[tuple[float, float]]]


def main() -> None:
    """Counts, measures and prints two tables."""
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests" / "megatron")]  # ranks look for modules where this process does
    import slot_path  # type: ignore[import-not-found]  # tests/megatron

    with RankPool(2) as pool:
        answers = pool.run(slot_path.counts, timeout_s=300.0)
    if not all(same for _, same in answers):
        sys.exit("the paths differ in their results")
    # Of the rank that has most to do: one has a replica, which comes and goes as a tensor of its own.
    counts = {path: map(max, zip(*(of[path] for of, _ in answers), strict=True)) for path in answers[0][0]}
    lines = ["# Slot path of a Megatron-Core MoE layer", "", f"{hardware()}, one thread a rank.", ""]
    lines += ["| slot path | operations | sorts | gathers between ranks | host waits |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {path} | {' | '.join(map(str, of))} |" for path, of in counts.items()]
    lines += ["", "| ranks x experts | slot path | ms in the layer | ms of the stage's begin |", "| --- | --- | --- | --- |"]
    for num_ranks in args.ranks:
        for path, (in_layer, in_begin) in _medians(num_ranks).items():
            lines.append(f"| {num_ranks} x 16 | {path} | {in_layer * 1e3:.2f} | {in_begin * 1e3:.2f} |")
    emit("\n".join(lines) + "\n", args.out)


def _medians(num_ranks: int) -> dict[str, tuple[float, float]]:
    """Path -> seconds in the layer and of the stage's begin, for a row."""
    found: dict[str, list[tuple[float, float]]] = collections.defaultdict(list)
    for _ in range(ROUNDS):
        for path, of in _seconds(num_ranks).items():
            found[path] += of
    return {path: (statistics.median(a for a, _ in of), statistics.median(b for _, b in of)) for path, of in found.items()}


def _seconds(num_ranks: int) -> Seconds:
    """Measures the seconds of every slot path in one process."""
    paths = [str(ROOT), str(ROOT / "tests" / "megatron")]
    command = [sys.executable, "-W", "ignore", "-c", "import slot_path; slot_path.main()", str(num_ranks), str(REPEATS)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: Seconds = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    main()
