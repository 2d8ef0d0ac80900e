"""The demo as users start it: one tiny run of everything, bad options, and a rank that dies."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from examples.grpo.__main__ import main

COMMAND = [sys.executable, "-m", "examples.grpo", "--size", "tiny"]
ARMS = ("static", "foremoe", "balanced")


def children(pid):
    """Processes started by a process, and by those."""
    try:
        found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return found + [below for child in found for below in children(child)]


@pytest.mark.heavy
def test_a_tiny_run_reports_all_figures_and_losses_agree(tmp_path):
    file = tmp_path / "demo.json"
    run = subprocess.run(
        [*COMMAND, "--steps", "2", "--json", str(file), "--pages", str(tmp_path / "a/b")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    figures = json.loads(file.read_text())
    assert set(figures["stages"]) == {"recompute", "update"}
    for stage in figures["stages"].values():
        assert all(stage[f"{arm}_{name}"] > 0 for arm in ARMS for name in ("s", "cpu_s", "rank_cpu_s"))
        assert stage["skew_before"] >= stage["skew_after"] >= 1.0
        assert stage["drift"] == stage["fell_back"] == 0
    assert sum(figures["stages"]["update"]["bytes_per_step"].values()) > 0
    assert figures["max_rel_diff_loss"] < 1e-5 and figures["max_rel_diff_grad_norm"] < 1e-4
    assert figures["plan_s"] > 0 and 0 <= figures["plan_hidden_fraction"] <= 1
    assert figures["redundant"] >= 1 and figures["ranks"] == 2 and figures["steps"] == 2
    assert len(figures["reward"]) == 3 and all(0 <= value <= 1 for value in figures["reward"])
    assert f"{figures['redundant']} redundant slot" in run.stdout and "step 2/2" in run.stderr
    assert run.stderr.startswith("loading torch and foremoe\n") and "starting 2 ranks\n" in run.stderr
    assert "Traceback" not in run.stderr and "Warning" not in run.stderr
    assert "<html" in (tmp_path / "a/b/report.html").read_text()
    events = json.loads((tmp_path / "a/b/trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1} and any(event["ph"] == "X" for event in events)


@pytest.mark.heavy
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the ranks in /proc")
def test_a_rank_that_dies_ends_the_demo_in_one_sentence():
    with subprocess.Popen([*COMMAND, "--steps", "10000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        for line in demo.stderr:
            if line.startswith("step 1/"):
                break
        below = children(demo.pid)
        ranks = [pid for pid in below if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        begin = time.monotonic()
        out, err = demo.communicate(timeout=600)
    errors = [line for line in err.splitlines() if not line.startswith("step ")]
    assert demo.returncode == 1 and out == ""
    assert len(errors) == 1 and errors[0].startswith("error: rank 1 failed") and "SIGKILL" in errors[0]
    while time.monotonic() - begin < 600 and any(Path(f"/proc/{pid}").exists() for pid in below):
        time.sleep(0.1)  # the launcher's helper processes notice its end a moment later
    assert not [pid for pid in below if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--ranks", "3"], "32 experts do not divide over 3 ranks"),
        (["--ranks", "1"], "not in the range 2<=x"),
        (["--redundant", "17"], "up to 16"),
        (["--steps", "0"], "not in the range 1<=x"),
        (["--json=/nowhere/at/all.json"], "no directory"),
        ([f"--pages={__file__}/pages"], "cannot make"),
    ],
)
def test_bad_options_end_in_one_sentence(options, part):
    result = CliRunner().invoke(main, options)
    assert result.exit_code == 2 and result.stdout == ""
    assert part in result.stderr and result.stderr.count("\n") == 1


def test_the_first_line_does_not_wait_for_torch():
    code = "import sys; from examples.grpo.__main__ import main; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0


def test_without_torch_the_demo_says_how_to_get_it():
    code = "import sys; sys.modules['torch'] = None; from examples.grpo.__main__ import main; main([])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr == "error: the demo needs torch; pip install 'foremoe[torch]'.\n"
