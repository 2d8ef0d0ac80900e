"""`make results`: every result file is of a known table, and a table is made again only where its code has changed."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from bench import results
from bench.results import TABLES, Table

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = """
import sys
from pathlib import Path
from lib.code import figure
out = Path(sys.argv[sys.argv.index("--out") + 1])
out.parent.mkdir(exist_ok=True)
out.write_text(f"{figure()}, commit {sys.argv[1]}")
"""


def test_every_file_is_of_one_table_and_every_table_has_a_file() -> None:
    assert sorted(path for table in TABLES for path in table.files()) == sorted((ROOT / "bench" / "results").iterdir())
    assert all(len(table.files()) == 1 or (table.made_elsewhere and table.files()) for table in TABLES)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_table_names_what_is_there(table: Table) -> None:
    assert table.code and all((ROOT / path).exists() for path in table.code)
    module = table.command.split()[0]
    if table.made_elsewhere:
        return
    assert importlib.util.find_spec(module) or (ROOT / "tests" / f"{module}.py").exists()
    assert table.paths()[0] == f"{module.replace('.', '/')}.py" or module in ("mutated_runs", "tests.fuzz")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a program, the code that it measures, and no result yet."""
    for path, text in {
        ".gitignore": "__pycache__\n", "bench/results/.keep": "",
        "lib/code.py": 'def figure():\n    """One."""\n    return 1  # a figure\n',
        "lib/data.bin": "x", "program.py": PROGRAM, "README.md": "shows twice_amd-2core_2020-01-01.md",
    }.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    monkeypatch.setattr(results, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=tree, capture_output=True, text=True, check=True).stdout.strip()


def commit(tree: Path) -> str:
    results._differs.cache_clear()
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "--allow-empty", "-m", "change")
    return git(tree, "rev-parse", "--short", "HEAD")


def a_table(tree: Path, name: str = "once") -> Table:
    return Table(name, f"program {git(tree, 'rev-parse', '--short', 'HEAD')}", ("lib",), 1)


def test_a_table_is_current_until_its_code_changes(tree: Path) -> None:
    table = a_table(tree)
    assert table.why() == "no file"
    assert results.make(table) and not table.why()
    (tree / "lib/code.py").write_text('def figure():\n    """A figure."""\n    return 1\n')
    (tree / "other.py").write_text("figure = 3\n")
    commit(tree)
    assert not table.why()
    (tree / "lib/code.py").write_text("def figure():\n    return 2\n")
    results._differs.cache_clear()
    assert table.why() == "lib/code.py changed"
    commit(tree)
    (tree / "lib/data.bin").write_text("y")
    results._differs.cache_clear()
    assert table.why() == "lib/code.py changed, with 1 more"


def test_what_a_message_says_is_no_code() -> None:
    before = 'def f(x):\n    if x:\n        raise ValueError(f"one {x} too many; give less")\n    return "kind"\n'
    assert results._code("a.py", before) == results._code("a.py", before.replace("too many; give less", "is too much"))
    for other in (before.replace("kind", "sort"), before.replace("{x}", "{x + 1}"), before.replace("if x", "if not x")):
        assert results._code("a.py", before) != results._code("a.py", other)


def test_a_file_of_code_that_was_not_committed_is_old(tree: Path) -> None:
    table = a_table(tree)
    for said, why in (
        ("0123456+", "its commit is not known"),
        (git(tree, "rev-parse", "--short", "HEAD") + "+", "not committed"),
    ):
        results.target(table).write_text(f"commit {said}")
        assert why in table.why()


def test_the_old_file_goes_and_the_page_that_shows_it_is_named(tree: Path, capfd: pytest.CaptureFixture[str]) -> None:
    table, old = a_table(tree, "twice"), tree / "bench/results/twice_amd-2core_2020-01-01.md"
    old.write_text("commit 0123456")
    assert results.make(table) and not old.exists() and table.files() == [results.target(table)]
    assert "README.md shows twice_amd-2core_2020-01-01.md" in capfd.readouterr().err


def test_an_interrupted_run_goes_on_where_it_stopped(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, broken = a_table(tree, "first"), Table("broken", "no_such_program", ("lib",), 2)
    monkeypatch.setattr(results, "TABLES", (broken, first))
    monkeypatch.setattr("sys.argv", ["bench.results"])
    with pytest.raises(SystemExit, match="not made: broken"):
        results.main()
    made = results.target(first).stat().st_mtime_ns
    with pytest.raises(SystemExit, match="not made: broken"):
        results.main()
    assert results.target(first).stat().st_mtime_ns == made
    assert re.search(r"broken +- days +no file; 2 min\nfirst", results.listing()) is None
    assert re.search(r"first +0 days +current\nbroken +- days +no file; 2 min", results.listing())


def test_a_table_of_another_machine_is_named_and_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench.results", "gpu-fast"])
    with pytest.raises(SystemExit):
        results.main()
    assert "there is no table gpu-fast to make here" in capsys.readouterr().err
