"""The public surface: every documented name is there after ``import foremoe``, and stands in a literal `__all__`."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import foremoe

ROOT = Path(__file__).resolve().parents[1]
# Packages that document public names.
PACKAGES = sorted(
    ".".join(path.parent.relative_to(ROOT).parts)
    for path in (ROOT / "foremoe").rglob("__init__.py")
    if "__all__" in path.read_text()
)


def literal_all(package: str) -> list[str]:
    tree = ast.parse((ROOT.joinpath(*package.split(".")) / "__init__.py").read_text())
    (value,) = (
        node.value for node in tree.body if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__"
    )
    return list(ast.literal_eval(value))


@pytest.mark.parametrize("name", foremoe.__all__)
def test_a_fresh_import_reaches_every_public_name(name: str) -> None:
    """In this process other tests may have imported the submodules already, so the lazy way is asked itself."""
    assert foremoe.__getattr__(name) is getattr(foremoe, name)
    assert name in dir(foremoe)


def test_submodules_and_errors_are_attributes_in_a_new_process() -> None:
    code = (
        "import foremoe\n"
        "foremoe.simulate.simulate, foremoe.transfer.Engine, foremoe.runtime.Runtime, foremoe.report.write_report\n"
        "foremoe.calibrate.fit, foremoe.TransferError, foremoe.StaleWeights, foremoe.testing.SolverTests\n"
        "foremoe.distributed.TorchGroup, foremoe.levels.RankSolver, foremoe.workload.Dealt, foremoe.integrations\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_import_needs_no_torch_and_no_numba() -> None:
    code = "import sys, foremoe; print([name for name in ('torch', 'numba', 'safetensors') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_a_literal_that_names_what_is_there(package: str) -> None:
    names = literal_all(package)
    assert len(names) == len(set(names))
    for name in names if not package.startswith("foremoe.integrations") else ():  # those need the trainers
        assert hasattr(importlib.import_module(package), name), f"{package}.{name}"


def test_every_room_has_a_literal_all() -> None:
    """But `base`, which is private, and `cli`, whose surface is the command line."""
    rooms = {path.name for path in (ROOT / "foremoe").iterdir() if (path / "__init__.py").exists()}
    assert {f"foremoe.{room}" for room in rooms - {"base", "cli"}} <= set(PACKAGES)
