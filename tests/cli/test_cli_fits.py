"""Cluster files whose fit misses what was measured by more than all of it decide nothing, unless they are accepted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from cli_runs import bad, good

from foremoe.machine.cluster import Cluster

CASE = ["--synthetic", "mixtral-8x7b", "--layers", "0:1", "--micro-steps", "1", "--tokens-per-rank", "16", "--ranks", "2"]
COMMANDS = {
    "plan": [*CASE], "compare": [*CASE, "--planners", "static"], "simulate": [*CASE, "--planners", "static"],
    "ablate": [*CASE, "--planners", "static"], "report": [*CASE], "calibrate": ["--model", "mixtral-8x7b"],
}  # fmt: skip
OUTPUT = {"plan": "p.safetensors", "report": "r.html", "calibrate": "new.toml"}


def fitted(folder: Path, residual: float | None) -> str:
    path = folder / "here.toml"
    cluster = dataclasses.replace(Cluster.preset("8xh100", 2), calibrated=False, residual=residual, source="made up")
    cluster.to_toml(path)
    return str(path)


def words(command: str, folder: Path, residual: float | None) -> list[str]:
    output = ["-o", str(folder / OUTPUT[command])] if command in OUTPUT else []
    return [command, *COMMANDS[command], "--cluster", fitted(folder, residual), *output]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_fit_that_is_off_by_more_than_all_is_refused_with_its_residual_and_the_cure(command: str, tmp_path: Path) -> None:
    told = bad(words(command, tmp_path, 12.58))
    assert "here.toml" in told and "residual of 1258%, above 100%" in told and "--accept-fit" in told
    assert "foremoe calibrate" in told and sorted(path.name for path in tmp_path.iterdir()) == ["here.toml"]


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"calibrate"}))
def test_an_accepted_fit_is_taken_and_keeps_its_label(command: str, tmp_path: Path) -> None:
    told = " ".join(good([*words(command, tmp_path, 12.58), "--accept-fit"]).stdout.split())
    assert "residual 1258%" in (told if command != "report" else (tmp_path / "r.html").read_text())


@pytest.mark.parametrize("residual", [None, 0.3, 1.0])
def test_better_fits_need_no_acceptance(residual: float | None, tmp_path: Path) -> None:
    good(words("compare", tmp_path, residual))
