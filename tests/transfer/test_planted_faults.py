"""Every fault of planted_faults.toml is caught by the test that it names."""

import importlib.util
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FAULTS = tomllib.loads((HERE / "planted_faults.toml").read_text())["fault"]


@pytest.mark.heavy
def test_every_planted_fault_is_caught():
    are_caught([fault for fault in FAULTS if not fault.get("kernel")], {})


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="make test-triton runs it: faults in Triton's kernels")
def test_every_fault_in_a_kernel_is_caught():
    are_caught([fault for fault in FAULTS if fault.get("kernel")], {"TRITON_INTERPRET": "1"})


def are_caught(faults, env):
    sound = {**faults[0], "fault": faults[0]["text"]}
    for fault in faults:
        num = (HERE.parents[1] / fault["file"]).read_text().count(fault["text"])
        assert num == 1, f"{fault['name']}: the text is in {fault['file']} {num} times; write the fault anew"
    path = os.pathsep.join([str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "HYPOTHESIS_PROFILE": "ci"} | env
    asked = json.dumps([sound, *faults])
    run = subprocess.run([sys.executable, str(HERE / "plant.py")], input=asked, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    (passed, text), *results = json.loads(run.stdout)
    assert passed == 0, text
    survived = [f"{fault['name']}: {text}" for fault, (code, text) in zip(faults, results, strict=True) if code != 1]
    assert not survived, "\n".join(survived)
