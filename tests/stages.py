"""Runs make's targets, says what each took, and ends with a table: ``python3 tests/stages.py lint types+dist unit``.

Targets run one after the other; those with a + between them at the same time. The first that fails ends it. Seconds are those
of all processes that a stage started, also of those whose parent ended before them. No package is needed, since none may be
installed yet.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import json
import os
import platform
import re
import resource
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ADOPT = 36  # PR_SET_CHILD_SUBREAPER
PATIENCE_S = 10.0  # for processes that outlive their stage
HEAVIEST = 10


@dataclass
class Stage:
    """What a stage took.

    Attributes:
        tests: CPU seconds of its tests, by name.
    """

    name: str
    wall_s: float = 0.0
    cpu_s: float = 0.0
    code: int = 0
    tests: dict[str, float] = field(default_factory=dict)


def run(name: str) -> Stage:
    """Runs a stage to its end."""
    begin_s, before_s = time.monotonic(), spent_s()
    targets = name.split("+")
    together = [f"--jobs={len(targets)}", "--output-sync=target"] if len(targets) > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        command = ["make", "--no-print-directory", *together, *targets]
        code = bury(subprocess.Popen(command, cwd=ROOT, env=os.environ | {"CPU_TIMES": folder}))
        tests = {key: value for file in Path(folder).iterdir() for key, value in json.loads(file.read_text()).items()}
    return Stage(name, time.monotonic() - begin_s, spent_s() - before_s, code, tests)


def spent_s() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def adopt() -> None:
    """Makes this process the parent of those below it whose own has ended, where the system can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)


def bury(process: subprocess.Popen[bytes]) -> int:
    """Exit code of a process, at its end; waits for all that were adopted meanwhile, too, so that their seconds count."""
    while process.returncode is None:
        pid, status = os.waitpid(-1, 0)
        if pid == process.pid:
            process.returncode = os.waitstatus_to_exitcode(status)
    until_s = time.monotonic() + PATIENCE_S
    with contextlib.suppress(ChildProcessError):
        while time.monotonic() < until_s:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
    return process.returncode


def table(stages: list[Stage]) -> str:
    """Markdown: what every stage took, and the heaviest tests."""
    total = Stage("in all", sum(stage.wall_s for stage in stages), sum(stage.cpu_s for stage in stages))
    lines = ["| stage | seconds | CPU seconds |", "|---|---:|---:|"]
    lines += [f"| {stage.name} | {stage.wall_s:,.0f} | {stage.cpu_s:,.0f} |" for stage in [*stages, total]]
    tests = {key: value for stage in stages for key, value in stage.tests.items()}
    if tests:
        lines += ["", "| heaviest tests | CPU seconds |", "|---|---:|"]
        heaviest = sorted(tests, key=lambda name: -tests[name])[:HEAVIEST]
        lines += [f"| `{name}` | {tests[name]:.1f} |" for name in heaviest]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """One line on what it ran on, and the commit."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    cpu = found[1] if found else platform.machine()
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = head.stdout.strip() or "unknown"
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}; {datetime.date.today()}, commit {commit}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", help="targets of the Makefile; with + between them, at the same time")
    parser.add_argument("--out", type=Path, help="write the table to this markdown file, too")
    asked = parser.parse_args()
    adopt()
    stages: list[Stage] = []
    for name in asked.stages:
        print(f"== {name}", flush=True)
        stages.append(run(name))
        print(f"== {name}: {stages[-1].wall_s:.0f} s, {stages[-1].cpu_s:.0f} CPU s", flush=True)
        if stages[-1].code:
            break
    text = table(stages)
    print(text, flush=True)
    if asked.out:
        command = " ".join(["python3 tests/stages.py", *asked.stages])
        asked.out.write_text(f"# What the stages take\n\n`{command}` on {machine()}\n\n{text}")
    return stages[-1].code


if __name__ == "__main__":
    raise SystemExit(main())
