"""``--case FILE.toml``: options of a case from a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_runs import bad, good

from foremoe.cli.options import _CASE, _TRAINER

CASE = """
synthetic = "gpt-oss-20b"
ranks = 4
layers = "0:1"
tokens-per-rank = 256
micro-steps = 2
redundant = 1
seed = 3
host-store = true
rollout-share = 0.5
optimizer-bytes = 0
"""


@pytest.fixture
def case(tmp_path: Path) -> str:
    path = tmp_path / "case.toml"
    path.write_text(CASE)
    return str(path)


def record(*words: str) -> dict[str, object]:
    return json.loads(good([*words, "--json"]).stdout)["case"]  # type: ignore[no-any-return]


def test_a_file_says_what_the_options_say_and_they_override_it(case: str) -> None:
    told = [
        "--synthetic", "gpt-oss-20b", "--ranks", "4", "--layers", "0:1", "--tokens-per-rank", "256", "--micro-steps", "2",
        "--redundant", "1", "--seed", "3", "--host-store", "--rollout-share", "0.5", "--optimizer-bytes", "0",
    ]  # fmt: skip
    words = ["compare", "--planners", "static,foremoe", "--csv", "--columns", "step_speedup,peak_bytes,skew_mean"]
    assert good([*words, "--case", case]).stdout == good([*words, *told]).stdout
    assert record("plan", "--case", case) == record("plan", *told)
    assert record("plan", "--case", case, "--ranks", "2", "--seed", "0") == record("plan", *told, "--ranks", "2", "--seed", "0")


def test_commands_with_lists_and_other_options_share_the_file(case: str) -> None:
    found = record("ablate", "--case", case, "--foresight", "exact", "--redundant", "1")
    assert (found["seeds"], found["redundant"], found["ranks"]) == ([3], [1], 4)
    assert record("ablate", "--case", case, "--foresight", "exact")["redundant"] == [1]


def test_a_file_names_traces(tmp_path: Path, trace: str, other_trace: str, model: str) -> None:
    path = tmp_path / "case.toml"
    for traces in ([trace], [trace, other_trace]):
        path.write_text(f"traces = {json.dumps(traces)}\nmodel = {model!r}\nranks = 4\ntokens-per-rank = 25\nredundant = 0\n")
        assert record("plan", "--case", str(path))["traces"] == [Path(name).name for name in traces]
    assert record("plan", other_trace, "--case", str(path))["traces"] == [Path(other_trace).name]


def test_every_option_of_a_case_has_its_key(tmp_path: Path) -> None:
    names = [name.replace("_", "-") for name in (*_CASE, *_TRAINER) if name != "case"]
    path = tmp_path / "case.toml"
    path.write_text("nope = 1")
    said = bad(["plan", "--case", str(path)])
    assert f"of its {len(names)} keys" in said
    for command in ("plan", "compare", "simulate", "advise", "report"):
        text = good([command, "--help"]).stdout
        assert all(f"--{name}" in text for name in names if name != "traces"), command


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("rank = 4", "has the unknown key 'rank'"),
        ("output = 'p.safetensors'", "has the unknown key 'output'"),
        ("case = 'case.toml'", "has the unknown key 'case'"),
        ("ranks = 16.5", "--ranks"),
        ("ranks = true", "--ranks"),
        ("ranks = [4]", "ranks in"),
        ("stage = 2026-01-01", "got a date"),
        ("seed = 0x" + 40 * "f", "got a number of 160 bits"),
        ("shuffle = 'maybe'", "--shuffle"),
        ("regime = 'nope'", "--regime"),
        ("traces = [1, [2]]", "traces in"),
        ("ranks = ", "not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_is_one_sentence(line: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "case.toml"
    path.write_text(line)
    assert said in bad(["plan", "--case", str(path)])


def test_no_output_replaces_the_file(case: str) -> None:
    assert "there is no file" in bad(["compare", "--case", "nowhere.toml"])
    assert "overwrite" in bad(["compare", "--case", case, f"--json={case}"])
    assert Path(case).read_text() == CASE
