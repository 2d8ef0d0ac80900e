"""Runs the demo and prints its figures as markdown.

    python -m bench.demo [--steps 12] [--out bench/results/demo_HARDWARE_DATE.md]

A result file names hardware, date and commit. All figures are measured on processes of one machine; run nothing beside it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.output import command_line, emit, hardware
from examples.grpo.arms import ARMS

MEASURES = {"s": "wall", "cpu_s": "expert CPU"}


def report(figures: dict[str, Any], command: str, total_s: float) -> str:
    """Markdown: the table of both stages, and what else is worth knowing."""
    lines = [
        "# `python -m examples.grpo`",
        "",
        f"`{command}`: {figures['ranks']} ranks, {figures['steps']} GRPO steps, {figures['redundant']} redundant slots per rank;"
        f" {total_s:.0f} s in all. Measured on: {hardware()}, torch {figures['versions']['torch']}.",
        "",
        "| stage | seconds per step | static | foremoe | force-balanced | recovered | skew |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for stage, of_stage in figures["stages"].items():
        skew = f"{of_stage['skew_before']:.2f} -> {of_stage['skew_after']:.2f}"
        for name, what in MEASURES.items():
            share = of_stage[f"recovery_{name}"]
            cells = [stage, what, *(_spread(of_stage, f"{arm}_{name}") for arm in ARMS)]
            lines.append("| " + " | ".join([*cells, "-" if share is None else f"{share:.0%}", skew]) + " |")
    moved = {stage: sum(of_stage["bytes_per_step"].values()) / 1e6 for stage, of_stage in figures["stages"].items()}
    exposed_ms = max(of_stage["exposed_s"] for of_stage in figures["stages"].values()) * 1e3
    lines += [
        "",
        f"* Reward: {' '.join(f'{reward:.2f}' for reward in figures['reward'])}.",
        f"* Losses with and without foremoe differ by at most {figures['max_rel_diff_loss']:.1e} (relative), the norm of expert"
        f" gradients by {figures['max_rel_diff_grad_norm']:.1e}.",
        f"* Planning: {figures['plan_s'] * 1e3:.0f} ms per step, {figures['plan_hidden_fraction']:.0%} of it beside the rewards.",
        "* Moved per step: " + ", ".join(f"{stage} {size:.1f} MB" for stage, size in moved.items()) + ";"
        f" exposed transfer {exposed_ms:.1f} ms.",
        "",
    ]
    return "\n".join(lines)


def _spread(figures: dict[str, Any], name: str) -> str:
    low, high = figures[f"{name}_quartiles"]
    return f"{figures[name]:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    """Runs the demo in processes of its own."""
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    words = ["-m", "examples.grpo", "--ranks", "2", "--steps", str(options.steps)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "demo.json")
        begin_s = time.monotonic()
        run = subprocess.run([sys.executable, *words, "--json", str(path)], stdout=sys.stderr, check=False)
        if run.returncode:
            sys.exit(1)
        text = report(json.loads(path.read_text()), f"python {' '.join(words)}", time.monotonic() - begin_s)
    emit(text, options.out)


if __name__ == "__main__":
    main()
