"""A third party's solver: a separate package, installed, named at the command line, and put through the conformance suite."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foremoe import row_solver
from foremoe.testing import SolverTests

PACKAGE = Path(__file__).parent / "third_party"
sys.path.insert(0, str(PACKAGE))

from hottest_neighbour import HottestNeighbour, halve_hottest  # noqa: E402


class TestHottestNeighbour(SolverTests):
    solver = HottestNeighbour(min_pairs=1)


class TestRowFunction(SolverTests):
    solver = row_solver(halve_hottest)


class TestRowFunctionInPython(SolverTests):
    solver = row_solver(halve_hottest, compiled=False)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the package installed."""
    pytest.importorskip("setuptools", reason="building the example package needs setuptools")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "hottest_neighbour.py"):
        shutil.copy(PACKAGE / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True)
    root = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), root])}


@pytest.mark.parametrize(
    "name", ["hottest-neighbour", "hottest-neighbour-row", "HottestNeighbour(min_pairs=4)", "hottest_neighbour:halve_hottest"]
)
def test_named_at_the_command_line(installed: dict[str, str], name: str) -> None:
    case = [
        "--synthetic",
        "gpt-oss-20b",
        "--ranks",
        "8",
        "--tokens-per-rank",
        "64",
        "--micro-steps",
        "2",
        "--objective",
        "balance",
    ]
    run = subprocess.run(
        [sys.executable, "-m", "foremoe", "compare", *case, "--solvers", f"static,{name}", "--json"],
        env=installed,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    static, mine = json.loads(run.stdout)["rows"]
    assert mine["solver"] == name
    assert mine["skew_mean"] < static["skew_mean"]
    assert mine["replicas_per_layer"] > 0
