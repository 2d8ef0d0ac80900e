"""Command lines of valid and odd words end with a result or one sentence, never with a traceback."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import click
import pytest
from cli_runs import run
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples

from foremoe.cli.main import main

ODD = (
    "", "0", "-1", "1", "2", "99", "1e9", "nan", "inf", "0.5", "-0.5", "1e-300", "32767", "9" * 30, "1:2", "2:1", "0:0", ":",
    "nope", "@", "'", "(", ",", "None", "[]", "1,2,3", "x=1", "é", "\x1b[31m", "a" * 3000, "Quota()", "Quota(1,2,3)", "Search(",
    "Planner(rank=())", "Search()", "static", "exact", "previous", "rerouted=2", "simulate",
    "1024", "1025", "1f1b:0,0", "interleaved:1,1,1", "accumulate+reforward", "forward", "balance", "node",
    "hot-rank", "8xh100", "t.npz", "p", "w", "tiny.toml", ".", "/dev/null", "../x",
)  # fmt: skip


@pytest.fixture(scope="module")
def cases(
    tmp_path_factory: pytest.TempPathFactory, trace: str, model: str, plan_and_workload: tuple[str, str]
) -> Iterator[dict[str, list[str]]]:
    """A valid command line of each command, in a folder of copies of its files."""
    folder, before = tmp_path_factory.mktemp("fuzz"), os.getcwd()
    for name, path in {"t.npz": trace, "tiny.toml": model, "p": plan_and_workload[0], "w": plan_and_workload[1]}.items():
        (folder / name).write_bytes(Path(path).read_bytes())
    os.chdir(folder)
    case = ["t.npz", "--model", "tiny.toml", "--ranks", "4", "--tokens-per-rank", "25"]
    yield {
        "inspect": ["t.npz"], "check": ["p", "--workload", "w"], "plan": case, "compare": [*case, "--planners", "static"],
        "simulate": [*case, "--planners", "static"], "solvers": [], "doctor": [],
        "report": ["--plan", "p", "t.npz", "-o", "r.html", "--planners", "none"],
    }  # fmt: skip
    os.chdir(before)


def changed(words: list[str], options: list[click.Option], rng: Random) -> list[str]:
    """One to three options more with odd values, words replaced, or words left out."""
    words = list(words)
    for _ in range(rng.randint(1, 3)):
        act = rng.random()
        if act < 0.75:
            option = rng.choice(options)
            words += [rng.choice(option.opts), *([] if option.is_flag else [rng.choice(ODD)])]
        elif words:
            at = rng.randrange(len(words))
            words[at : at + 1] = [rng.choice(ODD)] if act < 0.9 else []
    return words


@given(st.integers(0, 2**32 - 1))
@examples(200)
def test_no_command_line_ends_in_a_traceback(cases: dict[str, list[str]], seed: int) -> None:
    rng = Random(seed)
    name = rng.choice(list(cases))
    command = main.get_command(click.Context(main), name)
    assert command is not None
    words = [name, *changed(cases[name], [x for x in command.params if isinstance(x, click.Option)], rng)]
    result = run(words)
    assert result.exit_code in (0, 1, 2), (words, result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), (words, result.exception)
    assert "\x1b" not in result.stdout + result.stderr and "Traceback" not in result.stderr, words
