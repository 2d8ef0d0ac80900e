"""Shared functions of all benchmarks: the command line, a description of the machine, and writing of markdown."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import numpy as np

# What a figure may depend on: a result says with a `+` after its commit that some of this was not committed.
MEASURED = (":/foremoe", ":/bench", ":/examples", ":/tests", ":!/bench/results")


def command_line(about: str | None) -> argparse.ArgumentParser:
    """A parser that shows `about`, the module's docstring, and has `--out`."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the results to this markdown file")
    return parser


def hardware() -> str:
    """One line on what the timings were taken on, and the commit."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), cpu)
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        commit += "+" if subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *MEASURED], check=False).returncode else ""
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    date = datetime.date.today().isoformat()
    return f"{cpu}, {cores} cores, no GPU; Python {platform.python_version()}, numpy {np.__version__}; {date}, commit {commit}"


def markdown(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table."""
    head = list(header)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows))


def emit(text: str, out: Path | None) -> None:
    """Prints `text` and, where `--out` was given, writes it there; missing folders are made."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text)
