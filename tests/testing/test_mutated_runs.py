"""A few of the runs of tests/mutated_runs.py: no crash, no foreign exception, no wrong result."""

import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
CASES = 60


def test_mutated_plans_placements_and_answers_are_refused_or_change_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS, TESTS / "transfer")))}
    command = [sys.executable, "-W", "ignore", "-m", "mutated_runs", "--cases", str(CASES), "--out", str(tmp_path / "runs.md")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    text = (tmp_path / "runs.md").read_text()
    assert text in done.stdout and f"{CASES} cases, 0 faults." in text
    refused, equal, *bad = (sum(map(int, numbers)) for numbers in zip(*re.findall(r"\| (\d+) " * 5, text), strict=True))
    assert refused and equal and refused + equal == CASES and not any(bad)
