"""What of Megatron's suite ran, as a file: ``make test-megatron-newest RAN=bench/results/NAME_HARDWARE_DATE.md``."""

import os
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stages import machine

OUTCOMES = ("passed", "failed", "error", "skipped")
PACKAGES = ("megatron-core", "torch", "triton")


def report(stats, command):
    """Markdown: outcomes by file and in all, and why tests were skipped.

    Args:
        stats: pytest's outcomes, each with its reports.
        command: what ran the tests.
    """
    of_file, reasons = {}, Counter()
    for outcome in OUTCOMES:
        for each in stats.get(outcome, ()):
            of_file.setdefault(each.nodeid.split("::")[0], Counter())[outcome] += 1
            if outcome == "skipped":
                reasons[str(each.longrepr[2]).removeprefix("Skipped: ")] += 1
    rows = [(f"`{file}`", of_file[file]) for file in sorted(of_file)] + [("in all", sum(of_file.values(), Counter()))]
    lines = ["# What ran of tests/megatron", "", f"`{command}` with {versions()}, on {machine()}", ""]
    lines += [f"| file | {' | '.join(OUTCOMES)} |", "|---|" + "---:|" * len(OUTCOMES)]
    lines += [f"| {name} | " + " | ".join(str(found[outcome]) for outcome in OUTCOMES) + " |" for name, found in rows]
    if reasons:
        lines += ["", "| skipped | because |", "|---:|---|", *(f"| {num} | {why} |" for why, num in reasons.items())]
    return "\n".join(lines) + "\n"


def versions():
    """Those of `PACKAGES` that are installed."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def write(stats):
    """Writes the report to the file that the environment names, if it does."""
    path = os.environ.get("RAN")
    if path:
        Path(path).write_text(report(stats, os.environ.get("RAN_BY", "pytest tests/megatron")))
