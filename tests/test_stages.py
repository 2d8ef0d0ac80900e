"""The stages of `.ci/run` exist, run in order, end at the first that fails, and leave a table."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import stages

ROOT = Path(__file__).resolve().parents[1]
# The second leaves a process behind and looks, as tests do, whether it has gone when it has ended.
MAKEFILE = """
first second broken last:
	@$(MAKE) --no-print-directory its-$@
its-first:
	@echo ran first
its-second:
	@(sleep 0.2 & echo $$! > orphan); while [ -e /proc/$$(cat orphan) ]; do sleep 0.05; done; echo ran second
its-broken:
	@exit 3
its-last:
	@echo ran last
"""


@pytest.fixture
def tree(tmp_path):
    """A tree with stages of its own; a function that runs some and gives exit code, output and the table."""
    (tmp_path / "tests").mkdir()
    shutil.copy(stages.__file__, tmp_path / "tests")
    (tmp_path / "Makefile").write_text(MAKEFILE)

    def run(*names):
        command = [sys.executable, tmp_path / "tests" / "stages.py", *names, "--out", tmp_path / "table.md"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        return done.returncode, re.findall(r"^ran (\w+)$", done.stdout, re.MULTILINE), (tmp_path / "table.md").read_text()

    return run


def rows(table):
    return re.findall(r"^\| ([\w+ ]+) \| [\d,]+ \| [\d,]+ \|$", table, re.MULTILINE)


def test_stages_run_in_order_and_leave_a_table(tree):
    code, ran, table = tree("second", "first+last")
    assert code == 0 and ran[0] == "second" and sorted(ran) == ["first", "last", "second"]
    assert rows(table) == ["second", "first+last", "in all"] and "commit" in table


def test_the_first_that_fails_ends_it(tree):
    code, ran, table = tree("first", "broken", "last")
    assert code != 0 and ran == ["first"] and rows(table) == ["first", "broken", "in all"]


def test_the_heaviest_tests_are_named():
    text = stages.table([stages.Stage("unit", tests={f"test_{n}": float(n) for n in range(20)})])
    assert re.findall(r"`(\w+)`", text) == [f"test_{n}" for n in range(19, 9, -1)]


def test_ci_runs_targets_of_the_makefile_and_all_that_test():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (listed,) = re.findall(r"^for stage in (.*); do$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    run = set(re.split(r"[ +]", listed))
    nightly = set(re.findall(r"^\t\$\(MAKE\) --no-print-directory ([\w-]+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert run <= targets and nightly <= targets
    assert run | nightly >= {name for name in targets if name.startswith("test-")} | {"lint", "types", "unit", "docs"}
