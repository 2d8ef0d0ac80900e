"""Commands of the pages that need no file run as they stand, on two layers of two micro-steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from foremoe.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
# `compare` and `simulate` on artificial routing, in an indented line or between backticks; a comment may follow.
COMMAND = re.compile(r"(?:^    |`)foremoe ((?:compare|simulate) --synthetic [^`#\n]*)", re.MULTILINE)
COMMANDS = sorted({found.strip() for page in PAGES for found in COMMAND.findall(page.read_text()) if "..." not in found})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_pages_runs(command: str) -> None:
    small = [*([] if "--layers" in command else ["--layers", "0:2"]), "--micro-steps", "2"]
    small += ["--exact-seconds", "1"] if command.startswith("compare") else []
    result = CliRunner().invoke(main, [*shlex.split(command), *small, "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["rows"]


def test_the_case_file_of_the_pages_gives_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "simulator.md").read_text()
    file = re.search(r"^    # case\.toml\n((?:    .*\n)+)", page, re.MULTILINE)
    command = re.search(r"`foremoe (.* --case .*)`", page)
    assert file is not None and command is not None
    monkeypatch.chdir(tmp_path)
    Path("case.toml").write_text(file[1].replace("    ", ""))
    small = ["--layers", "0:2", "--micro-steps", "2", "--planners", "static", "--json"]
    result = CliRunner().invoke(main, [*shlex.split(command[1]), *small])
    assert result.exit_code == 0, result.stderr
    case = json.loads(result.stdout)["case"]
    assert (case["synthetic"], case["groups"], case["tokens"]) == ("qwen3-30b-a3b", 4, 2 * 16 * 8192)


def test_the_commands_that_ask_a_question_are_among_them() -> None:
    asked = (
        "--foresight exact,rerouted=0.1,previous,step,none",
        "--regime hot-rank",
    )
    for words in asked:
        assert any(words in command for command in COMMANDS), words
