"""The smoke run that anyone starts with one command."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import subprocess
import sys
from pathlib import Path


def test_the_smoke_run_prints_its_table():
    script = Path(__file__).parents[2] / "examples" / "verl_cpu_smoke.py"
    done = subprocess.run([sys.executable, "-W", "ignore", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {
        cells[1]: cells[2:5]
        for cells in ([c.strip() for c in line.split("|")] for line in done.stdout.splitlines())
        if len(cells) > 4
    }
    assert rows["update: unplanned"] == ["-", "0", "0"] and float(rows["update: replicas"][1]) > 0
    for stage in ("recompute", "update"):
        assert float(rows[f"{stage}: skew_after"][1]) < float(rows[f"{stage}: skew_before"][1])
    assert done.stdout.endswith("Results are the same.\n")
