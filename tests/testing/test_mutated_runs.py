"""A few of the runs of tests/mutated_runs.py: no crash, no foreign exception, no wrong result."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = 60


def test_mutated_plans_placements_and_answers_are_refused_or_change_nothing() -> None:
    folders = [TESTS.parent, TESTS, TESTS / "transfer"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    command = [sys.executable, "-W", "ignore", "-m", "mutated_runs", "--cases", str(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{CASES} cases: " in done.stdout and "equal" in done.stdout and "refused" in done.stdout
