"""docs/tutorial.md: every block runs as it is printed, from top to bottom, and prints what the page shows."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from page_blocks import ROOT, blocks_of, is_suite, run_blocks, run_suites

from foremoe.cli.main import main

BLOCKS = blocks_of("docs/tutorial.md")
SHELL = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def run_shell(line: str) -> None:
    if line.startswith("foremoe "):
        result = CliRunner().invoke(main, shlex.split(line)[1:])
        assert result.exit_code == 0, result.output


def test_every_block_is_run_somewhere() -> None:
    """The torchrun line in tests/megatron, what smoke-verl runs in tests/verl, the rest below."""
    assert {kind for kind, _ in BLOCKS} == {"python", "text", "bash"}
    assert {line.split()[0] for line in SHELL} == {"foremoe", "torchrun", "make"}
    assert sum(is_suite(text) for _, text in BLOCKS) == 1


def test_the_page_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_blocks(BLOCKS, run_shell)
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.heavy
def test_the_solver_and_the_backend_keep_their_laws(tmp_path: Path) -> None:
    run_suites(BLOCKS, tmp_path, r"def |from foremoe.transfer")


def test_the_make_targets_are_there() -> None:
    for line in SHELL:
        if line.startswith("make "):
            run = subprocess.run([*shlex.split(line), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
            assert run.returncode == 0 and "examples/verl_cpu_smoke.py" in run.stdout
