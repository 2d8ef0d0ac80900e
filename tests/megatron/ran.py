"""What of Megatron's suite ran, as a file: ``make test-megatron-newest RAN=bench/results/NAME_HARDWARE_DATE.md``."""

import os
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from stages import machine

OUTCOMES = ("passed", "failed", "error", "skipped")
PACKAGES = ("megatron-core", "torch", "triton")


def table(stats, installed):
    """Markdown: outcomes in all and by file.

    Args:
        stats: pytest's outcomes, each with its reports.   installed: (package, version) pairs.
    """
    found = Counter()
    for outcome in OUTCOMES:
        for report in stats.get(outcome, ()):
            found[report.nodeid.split("::")[0], outcome] += 1
    versions = ", ".join(f"{package} {number}" for package, number in installed)
    files = sorted({file for file, _ in found})
    row = lambda name, counts: f"| {name} | " + " | ".join(str(counts[o]) for o in OUTCOMES) + " |"  # noqa: E731
    total = {outcome: sum(found[file, outcome] for file in files) for outcome in OUTCOMES}
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in stats.get("skipped", ()))
    lines = [f"{versions}; {machine()}", "", f"| file | {' | '.join(OUTCOMES)} |", "| --- |" + " ---: |" * len(OUTCOMES)]
    lines += [row(f"`{file}`", {outcome: found[file, outcome] for outcome in OUTCOMES}) for file in files]
    lines += [row("in all", total), ""]
    lines += (
        ["| skipped | because |", "| ---: | --- |", *(f"| {num} | {why} |" for why, num in reasons.items())] if reasons else []
    )
    return "\n".join(lines) + "\n"


def installed():
    """(package, version) of what is there of `PACKAGES`."""
    import importlib.util

    return [
        (package, version(package))
        for package in PACKAGES
        if importlib.util.find_spec(package.replace("megatron-core", "megatron.core"))
    ]


def write(stats):
    """Writes the table to the file that the environment names."""
    path = os.environ.get("RAN")
    if path:
        Path(path).write_text(
            f"# What ran of tests/megatron\n\n`{os.environ.get('RAN_BY', 'pytest')}` on {table(stats, installed())}"
        )
