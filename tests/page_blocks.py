"""Blocks of a page of the docs: run as they are printed, with what they print."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONPATH = {**os.environ, "PYTHONPATH": str(ROOT)}


def blocks_of(page: str) -> list[tuple[str, str]]:
    """Kind and text of every fenced block."""
    return re.findall(r"```(\w+)\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def is_suite(text: str) -> bool:
    """A block that belongs into a test file."""
    return "Tests):" in text


def run_blocks(blocks: list[tuple[str, str]], shell: Callable[[str], None]) -> None:
    """Runs Python from top to bottom against the output shown below it, and gives every line of shell to `shell`."""
    names: dict[str, object] = {"__name__": "page"}
    for (kind, text), (following, shown) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "python" and not is_suite(text):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text, names)
            assert printed.getvalue() == (shown if following == "text" else "")
        for line in text.splitlines() if kind == "bash" else ():
            shell(line)


def run_pytest(folder: Path, environment: dict[str, str]) -> None:
    """Runs the test files in `folder` in pytest; with few examples, as all solvers that the pages build on run with many."""
    profile = 'settings.register_profile("few", max_examples=15)\nsettings.load_profile("few")\n'
    (folder / "conftest.py").write_text(f"from hypothesis import settings\n\n{profile}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    run = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr


def run_suites(blocks: list[tuple[str, str]], folder: Path, definitions: str) -> None:
    """Runs the page's suites in pytest, below its imports and the blocks whose first line matches `definitions`."""
    kept = [text for kind, text in blocks if kind == "python" and (is_suite(text) or re.match(definitions, text))]
    (folder / "test_mine.py").write_text("\n".join(["import foremoe", *kept]))
    run_pytest(folder, PYTHONPATH)
