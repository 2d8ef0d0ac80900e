"""A container with a random user id: neither the package nor the home can be written, and foremoe imports and plans."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installation import read_only_copy
from test_compiled import COMPILING, RUN_KERNEL

PACKAGE = Path(__file__).parents[2] / "foremoe"
OBEY = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-dac_override"]


@pytest.fixture
def installed(tmp_path):
    """A copy of the package, a home and a temporary folder, all read-only."""
    with read_only_copy(PACKAGE, tmp_path, "home", "tmp") as root:
        yield root


def run(root, code, **environment):
    """Lines that a process prints for which permissions hold; for root they do not."""
    obey = OBEY if os.getuid() == 0 else []
    if obey and (
        not shutil.which("setpriv") or subprocess.run([*obey, "touch", root / "x"], capture_output=True).returncode == 0
    ):
        pytest.skip("root may write anywhere, and setpriv cannot take that away here")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_", "XDG_"))}
    here = {"HOME": str(root / "home"), "TMPDIR": str(root / "tmp"), "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [*obey, sys.executable, "-c", code], env=kept | here | environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


def test_one_warning_names_the_cure_and_it_runs(installed):
    (installed / "tmp").chmod(0o755)
    lines = run(installed, RUN_KERNEL)
    assert len(lines) == 4 and f"is cached in {installed / 'tmp' / f'foremoe-{os.getuid()}'}" in lines[0]
    assert "set NUMBA_CACHE_DIR to a folder of your own" in lines[0]
    assert lines[1:] == [COMPILING, "[[0, -1]]", "0"] and list((installed / "tmp").rglob("*.nbi"))


def test_numba_switched_off_imports_and_plans(installed):
    code = "import foremoe.solvers as s, foremoe, foremoe.simulate; from foremoe.testing.samples import many_row_problem; "
    code += "print(foremoe.Planner(rank=(s.Greedy(),)).plan(many_row_problem(4))[0].checked)"
    assert run(installed, code, NUMBA_DISABLE_JIT="1") == ["True"]
