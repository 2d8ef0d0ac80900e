"""Examples run as their first lines say."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.heavy
def test_plain_torch():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run([*launch, "examples/plain_torch.py"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    at_home, by_plan = (float(line.rsplit(" ", 1)[1]) for line in run.stdout.strip().splitlines()[-2:])
    assert at_home > 1.3 and by_plan < 1.02
