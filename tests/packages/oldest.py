"""Core tests on the lowest versions that pyproject.toml allows, without torch: `make test-oldest`."""

from __future__ import annotations

import os
import subprocess

from environments import ROOT, environment, lowest, require_oldest_python, requirements

STAGE = "test-oldest"
FOLDER = ROOT / ".venv-oldest"
# Of the extra `test`: what these tests need, without torch, and without tools that import nothing of ours.
NEEDED = ("pytest", "pytest-xdist", "hypothesis", "highspy", "setuptools")
# What numpy, numba, SCIP, safetensors, click and tomli-w do for us; two minutes on two cores, most of it compiling the planner.
TESTS = (
    "base/test_arrays.py", "base/test_compiled.py", "base/test_parallel.py", "base/test_strict_reading.py",
    "base/test_writing.py", "machine", "routing", "workload", "problem/test_cost.py", "plan/test_plan_format.py",
    "plan/test_plan_io.py", "solvers/test_published.py::test_equals_the_rule_written_plainly", "solvers/test_exact.py",
    "planner/test_strategies.py", "cli/test_cli_main.py", "cli/test_cli_plan.py", "cli/test_cli_errors.py",
)  # fmt: skip
# They compile what no test of another file here needs.
LONG = (
    "base/test_compiled.py::test_where_nothing_can_be_written_it_runs_without_a_cache",
    "cli/test_cli_errors.py::test_a_workload_file_is_dealt_already",
    "cli/test_cli_plan.py::test_check_prices_as_the_planner_did",
)  # fmt: skip


def needed() -> list[str]:
    """What the environment holds: core, SCIP, and what runs the tests."""
    test = [text for text in requirements("test") if text.startswith(NEEDED)]
    return lowest([*requirements("core"), *requirements("exact"), *test])


def main() -> int:
    """Installs and tests; returns the exit code."""
    if not require_oldest_python(STAGE):
        return 0
    python = environment(STAGE, FOLDER, needed())
    if python is None:
        return 0
    # Kernels of another numba: not beside the sources, where those of .venv are.
    here = {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(FOLDER / "kernels"), "HYPOTHESIS_PROFILE": "dev"}
    # Numpy 1 wraps whole numbers that a type cannot hold, where numpy 2 refuses them.
    strict = ["-W", "error:NumPy will stop allowing:DeprecationWarning"]
    # Compiled first, or each process would compile the same.
    if code := subprocess.run([python, "-m", "foremoe", "warm-up"], cwd=ROOT, env=os.environ | here).returncode:
        return code
    pytest = ["-m", "pytest", *strict, "-rs", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile", "--no-loadscope-reorder"]
    tests = [*(f"tests/{name}" for name in TESTS), *(f"--deselect=tests/{name}" for name in LONG)]
    return subprocess.run([python, *pytest, *tests], cwd=ROOT, env=os.environ | here).returncode


if __name__ == "__main__":
    raise SystemExit(main())
