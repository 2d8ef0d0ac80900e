"""What people see on a terminal of 80 columns: lines that fit, numbers that are whole, colour if it is wanted."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from cli_runs import bad, good

from foremoe.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
# Every command in one process, as typed; a mark stands before each.
PROGRAM = """
import json, sys
from foremoe.cli.main import main
for words in json.load(open(sys.argv[1])):
    print("MARK", flush=True)
    try:
        main(words)
    except SystemExit:
        sys.stdout.flush()
"""
NUMBER = re.compile(r"\d[\d.,]*")


def commands(trace: str, plan: str, folder: Path) -> list[list[str]]:
    case = ["--synthetic", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "4096", "--layers", "0:2", "--micro-steps", "2"]
    few = ["--planners", "static,quota,eplb-exact,foremoe"]
    long = "Planner(rank=(LeastLoaded(min_pairs=64, threshold=1.0), Search(effort=1000)), split=ExactSplit(), guard=False)"
    return [
        ["compare", *case, *few],
        ["compare", *case, "--planners", f"static,{long}", "--wide", "--cluster", "gb200-nvl72"],
        ["simulate", *case, *few, "--rollout-share", "0.5"],
        ["simulate", *case, "--foresight", "exact,previous,none"],
        ["ablate", *case, "--redundant", "0,1", "--seed", "0,1", "--planners", "quota,foremoe"],
        ["advise", *case],
        ["plan", *case, "-o", str(folder / "p.safetensors")],
        ["report", *case, *few, "-o", str(folder / "r.html")],
        ["report", *case, *few, "--gpus", "16", "--ranks", "4", "--pp", "2", "-o", str(folder / "job.html")],
        ["calibrate", "--ranks", "0"],
        ["warm-up", "--nothing"],
        ["import", trace, "-o", str(folder / "t.npz")],
        ["inspect", trace, "--ranks", "4"],
        ["inspect", plan, "--explain", "1,2"],
        ["check", plan, "--trace", trace],
        ["solvers"],
        ["doctor"],
        ["comapre"],
        [],
        ["--help"],
        *([name, "--help"] for name in COMMANDS),
    ]


def on_terminal(words: list[list[str]], folder: Path, width: int = 80, **environment: str) -> str:
    """What a pseudo-terminal of that width gets from the commands, on stdout and stderr."""
    file = folder / "commands.json"
    file.write_text(json.dumps(words))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    env |= {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | environment
    command = [sys.executable, "-c", PROGRAM, str(file)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, cwd=ROOT) as process:
        os.close(theirs)
        parts = []
        while True:
            try:
                part = os.read(ours, 2**16)
            except OSError:  # the other side is closed
                break
            if not part:
                break
            parts.append(part)
        process.wait()
    os.close(ours)
    return b"".join(parts).decode().replace("\r\n", "\n")


def visible(text: str) -> list[str]:
    """Lines as they stay on the terminal."""
    return [line.rpartition("\r")[2] for line in re.sub(r"\033\[[0-9;?]*[A-Za-z]", "", text).split("\n")]


def shapes(text: str) -> set[str]:
    """The numbers of a text, any digit as 9."""
    return {re.sub(r"\d", "9", number) for number in NUMBER.findall(text)}


@pytest.fixture(scope="module")
def typed(trace: str, plan_and_workload: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("typed")
    words = commands(trace, plan_and_workload[0], folder)
    texts = on_terminal(words, folder).split("MARK\n")[1:]
    return {shlex.join(word): text for word, text in zip(words, texts, strict=True)}


@pytest.mark.heavy
def test_no_line_of_any_command_is_wider_than_the_terminal(typed: dict[str, str]) -> None:
    for words, text in typed.items():
        assert "Traceback" not in text, text
        for line in visible(text):
            # A word is never cut: the name of a file may be longer than the terminal.
            assert len(line) <= 80 or len(line.split()) == 1, (words, line)


@pytest.mark.heavy
def test_every_command_is_typed(typed: dict[str, str]) -> None:
    """What takes minutes (calibrate, warm-up) is typed wrongly, and with --help."""
    assert {words.split()[0] for words in typed if "--help" not in words and words} >= set(COMMANDS)


@pytest.mark.heavy
def test_numbers_are_whole(typed: dict[str, str]) -> None:
    """Each number of a narrow terminal is one that a pipe gets; times of planning differ from run to run."""
    for words, text in typed.items():
        name = words.partition(" ")[0]
        if name not in ("compare", "simulate", "inspect", "check"):
            continue
        wide = ["--wide"] if name in ("compare", "simulate") and "--wide" not in words else []
        told = good([*shlex.split(words), *wide]).stdout
        left_out = ("more column", "kernels", "of the stage exposed")  # the last is a share of time measured here
        shown = "\n".join(line for line in visible(text) if not any(part in line for part in left_out))
        for number in sorted(shapes(shown) - shapes(told)):
            assert re.fullmatch(r"[9,]+\.9", number), (words, number)  # microseconds of planning


def test_life_comes_before_numpy(typed: dict[str, str]) -> None:
    first = typed[next(iter(typed))]
    assert first.startswith("loading\r") and "elapsed" in first and "of 5)" in first


def test_the_best_line_has_a_colour_unless_nobody_wants_one(typed: dict[str, str], tmp_path: Path) -> None:
    words = next(iter(typed))
    coloured = [line for line in typed[words].split("\n") if "\033[32m" in line]
    assert len(coloured) == 1 and coloured[0].startswith(("\033[32mquota", "\033[32mforemoe"))
    plain = on_terminal([shlex.split(words)], tmp_path, NO_COLOR="1")
    assert "foremoe" in plain and "\033[3" not in plain
    dumb = on_terminal([shlex.split(words)], tmp_path, TERM="dumb")
    assert "\033[3" not in dumb


def test_every_table_has_csv_and_columns(trace: str, dealing: list[str]) -> None:
    for name, more in (("compare", ["--planners", "static,quota"]), ("simulate", ["--planners", "static,quota"]), ("ablate", [])):
        words = [name, trace, *dealing, *more, *(["--redundant", "1", "--foresight", "exact"] if name == "ablate" else [])]
        read = list(csv.DictReader(io.StringIO(good([*words, "--csv"]).stdout)))
        rows = json.loads(good([*words, "--json"]).stdout)["rows"]
        assert len(read) == len(rows) and {key for key in rows[0] if not isinstance(rows[0][key], dict)} <= set(read[0])
        for line, row in zip(read, rows, strict=True):
            assert float(line["skew_mean"]) == row["skew_mean"] and float(line["peak_bytes"]) == row["peak_bytes"]
            assert float(line["bytes_by_link.peer"]) == row["bytes_by_link"]["peer"]
        two = good([*words, "--csv", "--columns", "peak_bytes,skew_mean"]).stdout.splitlines()
        assert two[0] == "peak_bytes,skew_mean" and len(two) == len(rows) + 1
        table = good([*words, "--columns", "peak_bytes,skew_mean"]).stdout
        assert re.search(r"^\S.*  peak GB  skew mean$", table, re.MULTILINE) and "more column" not in table
        assert "more column" in good(words).stdout and "more column" not in good([*words, "--wide"]).stdout
        said = bad([*words, "--columns", "skew_maen"])
        assert "did you mean 'skew_mean'" in said and "peak_bytes" in said
        assert "would both write to stdout" in bad([*words, "--csv", "--json"])


def test_csv_and_a_json_file_go_together(trace: str, dealing: list[str], tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    text = good(["compare", trace, *dealing, "--planners", "static", "--csv", f"--json={target}"]).stdout
    assert text.startswith("solver,") and json.loads(target.read_text())["rows"][0]["solver"] == "static"
    assert good(["solvers", "--csv", "--columns", "name"]).stdout.splitlines()[:2] == ["name", "static"]
    knowledge = ["simulate", trace, *dealing, "--foresight", "exact,none"]
    assert good([*knowledge, "--csv"]).stdout.startswith("foresight,")
    assert "net_speedup_vs_static" in bad([*knowledge, "--columns", "solver"])
