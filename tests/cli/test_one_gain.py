"""One plan has one gain, whoever is asked: commands, page and library."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import good
from click.testing import CliRunner

import foremoe
from foremoe.cli.main import main
from foremoe.simulate import System, simulate_systems
from foremoe.synthetic import synthetic_workload

CASE = ["--synthetic", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "1024", "--micro-steps", "2", "--layers", "0:3"]
CASE += ["--redundant", "1", "--ranks-per-node", "4"]


def row_of(command: str, *words: str) -> dict[str, Any]:
    rows = json.loads(good([command, *CASE, *words, "--json"]).stdout)["rows"]
    return next(row for row in rows if row.get("solver") == "foremoe" or row.get("levels") == "all")


@pytest.fixture(scope="module")
def gain() -> foremoe.Gain:
    """What the library says."""
    work = synthetic_workload("gpt-oss-20b", num_ranks=8, tokens_per_rank=1024, micro_steps=2, seed=0)
    cluster = foremoe.Cluster.preset("8xh100", 8, ranks_per_node=4)
    problem = foremoe.Problem.of(work.layers([0, 1, 2]), cluster, redundant=1)
    return foremoe.gain(problem, foremoe.Planner().plan(problem)[0])


def test_every_command_says_what_the_library_says(gain: foremoe.Gain) -> None:
    planned = json.loads(good(["plan", *CASE, "--json"]).stdout)["gain"]
    assert planned["speedup"] == pytest.approx(gain.speedup) and planned["planned_s"] == pytest.approx(gain.planned_s)
    for command, words in (
        ("compare", ["--planners", "static,foremoe"]), ("simulate", ["--planners", "static,foremoe,force-balanced"]),
        ("ablate", ["--redundant", "1", "--foresight", "exact"]),
    ):  # fmt: skip
        if command == "ablate":
            at = CASE.index("--redundant")
            nodes = CASE.index("--ranks-per-node")
            case = [*CASE[:at], *CASE[at + 2 : nodes], *CASE[nodes:], *words, "--json"]
            row = json.loads(good([command, *case]).stdout)["rows"][0]
        else:
            row = row_of(command, *words)
        assert row["speedup_vs_static"] == pytest.approx(gain.speedup), command
        assert row["simulated_stage_s"] == pytest.approx(gain.planned_s), command
        assert row["share_of_balanced"] == pytest.approx(gain.share_of_balanced), command


def test_texts_say_it_too(gain: foremoe.Gain, tmp_path: Path) -> None:
    said = f"simulated stage: {gain.speedup:.2f}x"
    assert str(gain).startswith(said) and "uncalibrated, median error 12 %" in str(gain)
    assert said in good(["plan", *CASE]).stdout
    page = tmp_path / "r.html"
    made = CliRunner().invoke(main, ["report", *CASE, "--planners", "none", "-o", str(page)])
    assert made.exit_code == 0, made.stderr
    assert str(gain) in made.stdout and "\nadvice: " in made.stdout
    assert f"{gain.speedup:.2f}x as fast as with experts at home" in page.read_text()
    # A plan file and a plan's own text give no seconds: they come from the planner's estimate of rows.
    assert not re.search(r"\d m?s\b", foremoe.resolve("static").plan(_small())[0].summary())


def test_what_replaces_experts_has_one_gain_as_well() -> None:
    compared = json.loads(good(["compare", *CASE, "--planners", "static,eplb-step,foremoe-homes", "--json"]).stdout)["rows"]
    simulated = json.loads(good(["simulate", *CASE, "--planners", "static,eplb-step,foremoe-homes", "--json"]).stdout)["rows"]
    for one, other in zip(compared, simulated, strict=True):
        assert one["speedup_vs_static"] == pytest.approx(other["speedup_vs_static"]), one["solver"]


def test_typical_error_is_that_of_the_published_rows() -> None:
    root = Path(__file__).resolve().parents[2] / "bench" / "results"
    newest = max(root.glob("published_*.md"), key=lambda path: path.stem[-10:]).read_text()
    found = re.search(r"\*\*check\*\*: .*?median error ([\d.]+)%", newest)
    assert found is not None
    assert round(float(found[1])) == round(100 * foremoe.machine.cluster.TYPICAL_ERROR)


def _small() -> foremoe.Problem:
    work = synthetic_workload("gpt-oss-20b", num_ranks=4, tokens_per_rank=64, micro_steps=1, num_layers=1, regime="mid", seed=0)
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 4), redundant=1)
    assert simulate_systems([problem], {"static": System(planner=foremoe.resolve("static"))})[0]["simulated_stage_s"] > 0
    return problem
