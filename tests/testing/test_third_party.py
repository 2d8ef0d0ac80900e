"""A third party's solver and transfer backend: a separate package, installed, named, and put through the conformance suites."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foremoe import row_solver
from foremoe.base.errors import InputError
from foremoe.testing import SolverTests, TransferTests
from foremoe.testing.samples import many_row_problem
from foremoe.transfer.backends import BACKENDS, backend_names, resolve_backend

PACKAGE = Path(__file__).parent / "third_party"
sys.path.insert(0, str(PACKAGE))

from file_backend import FileBackend  # noqa: E402
from hottest_neighbour import HottestNeighbour, halve_hottest  # noqa: E402


class TestHottestNeighbour(SolverTests):
    solver = HottestNeighbour(min_pairs=1)


class TestRowFunction(SolverTests):
    solver = row_solver(halve_hottest)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that the package is installed in."""
    pytest.importorskip("setuptools", reason="building the example package needs setuptools")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in ("pyproject.toml", "hottest_neighbour.py", "file_backend.py"):
        shutil.copy(PACKAGE / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(target), str(source)], check=True, capture_output=True)
    return str(target)


@pytest.fixture(scope="module")
def installed(site: str) -> dict[str, str]:
    """The environment of a process that has the package installed."""
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([site, root])}


@pytest.fixture
def installed_here(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and the ranks it runs, have the package installed."""
    monkeypatch.syspath_prepend(site)


class TestFileBackend(TransferTests):
    backend = FileBackend()


def test_a_backend_is_known_by_name_once_installed(installed_here: None) -> None:
    """Here, and on ranks that are processes."""
    assert "files" in backend_names()
    assert isinstance(resolve_backend("files"), FileBackend)
    by_name = type("ByName", (TransferTests,), {"backend": "files", "ranks": (1, 2)})()
    by_name.test_every_dtype_travels_bit_for_bit("float32")
    by_name.test_pulls_see_the_weights_of_the_last_publish()


def test_a_function_gives_the_same_in_plain_python() -> None:
    problem = many_row_problem(40)
    plain, compiled = (row_solver(halve_hottest, **options) for options in ({"compiled": False}, {}))
    assert plain.solve(problem, problem.static()).same_as(compiled.solve(problem, problem.static()))


def test_a_backend_is_unknown_before() -> None:
    with pytest.raises(InputError, match=f"no transfer backend 'files'; choose from {', '.join(BACKENDS)}"):
        resolve_backend("files")


def test_named_at_the_command_line(installed: dict[str, str]) -> None:
    names = ["hottest-neighbour", "hottest-neighbour-row", "HottestNeighbour(min_pairs=4)", "hottest_neighbour:halve_hottest"]
    case = [
        "--synthetic", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "64", "--micro-steps", "2", "--objective", "balance",
        "--redundant", "1",
    ]  # fmt: skip
    command = [sys.executable, "-m", "foremoe", "compare", *case, "--planners", ",".join(["static", *names]), "--json"]
    run = subprocess.run(command, env=installed, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    static, *theirs = json.loads(run.stdout)["rows"]
    assert sorted(row["solver"] for row in theirs) == sorted(names)
    for row in theirs:
        assert row["skew_mean"] < static["skew_mean"] and row["replicas_per_layer"] > 0, row["solver"]
