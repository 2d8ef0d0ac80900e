"""docs/tutorial.md: every block runs as it is printed, from top to bottom, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from foremoe.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "tutorial.md").read_text(), re.DOTALL)
SUITES = [text for _, text in BLOCKS if "SolverTests" in text]
PYTHON = [text for kind, text in BLOCKS if kind == "python" and text not in SUITES]
SHELL = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def test_every_block_is_run_somewhere() -> None:
    """The torchrun line in tests/megatron, what smoke-verl runs in tests/verl, the rest below."""
    assert {kind for kind, _ in BLOCKS} == {"python", "text", "bash"}
    assert {line.split()[0] for line in SHELL} == {"foremoe", "torchrun", "make"}
    assert len(SUITES) == 1


def test_the_page_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "tutorial"}
    for (kind, text), (following, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if kind == "python" and text in PYTHON:
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(text, names)
            assert printed.getvalue() == (shown if following == "text" else "")
        for line in text.splitlines() if kind == "bash" else ():
            if line.startswith("foremoe "):
                result = CliRunner().invoke(main, shlex.split(line)[1:])
                assert result.exit_code == 0, result.output
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_the_solver_and_the_backend_keep_their_laws(tmp_path: Path) -> None:
    definitions = [text for text in PYTHON if re.match(r"def |from foremoe.transfer", text)]
    (tmp_path / "test_mine.py").write_text("\n".join(["import foremoe", *definitions, *SUITES]))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_make_targets_are_there() -> None:
    for line in SHELL:
        if line.startswith("make "):
            run = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
            assert run.returncode == 0 and "examples/verl_cpu_smoke.py" in run.stdout
