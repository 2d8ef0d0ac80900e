"""The public surface after ``import foremoe`` alone; tests/test_tree.py holds that every `__all__` is whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import foremoe

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", foremoe.__all__)
def test_every_public_name_is_found_on_demand(name: str) -> None:
    """Asks the lazy way itself: other tests of this process may have imported the submodules already."""
    assert foremoe.__getattr__(name) is getattr(foremoe, name)
    assert name in dir(foremoe)


def test_rooms_and_errors_are_attributes_in_a_new_process() -> None:
    code = (
        "import foremoe\n"
        "foremoe.simulate.simulate, foremoe.transfer.Engine, foremoe.runtime.Runtime, foremoe.report.write_report\n"
        "foremoe.calibrate.fit, foremoe.TransferError, foremoe.StaleWeights, foremoe.testing.SolverTests\n"
        "foremoe.distributed.TorchGroup, foremoe.levels.RankSolver, foremoe.workload.Dealt, foremoe.integrations\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_import_needs_neither_torch_nor_numba() -> None:
    code = "import sys, foremoe; print([name for name in ('torch', 'numba', 'safetensors') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
