"""`python -m bench.gpu`: every part runs dry, and what was measured is kept whatever becomes of the rest."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu import megatron
from bench.gpu.__main__ import COMMANDS, FAST, Part, run_parts

ROOT = Path(__file__).resolve().parents[1]


def test_parts_that_fail_or_do_not_end_cost_no_result(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("print('42 GB/s')")
    (tmp_path / "broken.py").write_text("print('half of it'); raise SystemExit(3)")
    (tmp_path / "slow.py").write_text(
        f"print(open({str(tmp_path / 'out.md')!r}).read().count('42 GB/s'))\nimport time; time.sleep(99)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    parts = {name: Part(name, name, 2.0 if name == "slow" else 60.0) for name in ("good", "broken", "slow")}
    assert not run_parts(parts, "# head\n", tmp_path / "out.md", dry_run=False)
    text = (tmp_path / "out.md").read_text()
    assert text.startswith("# head\n\n## good\n\n42 GB/s\n")
    assert "half of it\n\nFAILED: exit code 3." in text
    assert "## slow\n\n1\n\nFAILED: stopped after 2 s." in text  # it read the result of the first part


def test_a_rank_that_waits_for_ever_does_not_hide_the_error_of_another(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n[ $RANK = 0 ] && echo 'no memory' && exit 1\nexec sleep 99\n")
    python.chmod(0o755)
    monkeypatch.setattr(megatron.sys, "executable", str(python))
    monkeypatch.setattr(megatron, "LIMIT_S", 2.0)
    with pytest.raises(RuntimeError, match=r"no memory\n(?s:.*)stopped after 2 s"):
        megatron.run(megatron.LAYOUTS["EP2"])


def test_a_command_takes_at_most_eight_minutes():
    assert sum(part.limit_s for part in FAST.values()) <= 480
    assert all(part.limit_s <= 480 for parts in COMMANDS.values() for part in parts.values())


@pytest.mark.heavy
@pytest.mark.parametrize("command", COMMANDS)
def test_every_part_runs_dry(command, tmp_path):
    out = tmp_path / "dry.md"
    line = [sys.executable, "-m", "bench.gpu", command, "--dry-run", "--out", str(out)]
    run = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    assert all(f"## {part.title}\n" in out.read_text() for part in COMMANDS[command].values())
