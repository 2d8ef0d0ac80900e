"""``foremoe simulate``: rows, groups, pipelines, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import bad, good

from foremoe.cli.kinds import Rollout
from foremoe.plan.figures import FIGURES
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate import PARTS, Judge

MEMORY = ("peak_bytes", "peak_bytes_with_reforward", "fits", "host_bytes", "slots_per_rank")


def rows_of(arguments: list[str]) -> dict[str, dict[str, Any]]:
    payload = json.loads(good(["simulate", *arguments, "--json"]).stdout)
    return {row["solver"]: row for row in payload["rows"]}


def test_rows_have_compares_figures_and_the_parts_of_the_stage(trace: str, dealing: list[str]) -> None:
    rows = rows_of([trace, *dealing])
    assert list(rows) == [*(name for name in STRATEGIES if name != "exact"), "force-balanced"]
    compared = json.loads(good(["compare", trace, *dealing, "--planners", "static,quota,foremoe", "--json"]).stdout)["rows"]
    for row in rows.values():
        assert set(FIGURES) | set(PARTS) <= set(row)
        besides_s = row["moves_s"] + row["reduction_s"] + row["optimizer_s"]
        assert row["simulated_stage_s"] == pytest.approx(sum(row[part] for part in PARTS) + besides_s)
        assert row["share_of_balanced"] == pytest.approx(rows["force-balanced"]["simulated_stage_s"] / row["simulated_stage_s"])
        static_s, stage_s = rows["static"]["simulated_stage_s"], row["simulated_stage_s"]
        assert row["speedup_vs_static"] == pytest.approx(static_s / stage_s)
        assert row["step_speedup"] is None  # nobody said what lies outside the stages
        assert row["step_speedup_at"]["50"] == pytest.approx(2 * static_s / (static_s + stage_s))
    for other in compared:  # the same plans
        for key in (
            "skew_mean",
            "skew_max",
            "replicas_per_layer",
            "max_fanout",
            "bytes_by_link",
            "predicted_stage_s",
            *MEMORY,
            *Judge.FIGURES,
        ):
            assert rows[other["solver"]][key] == pytest.approx(other[key]), key
    assert rows["eplb-exact"]["moves_s"] > 0 and rows["foremoe"]["moves_s"] == 0
    assert rows["static"]["speedup_vs_static"] == 1.0
    assert (rows["static"]["slots_per_rank"], rows["quota"]["slots_per_rank"]) == (0, 1)


def test_a_strategy_that_refuses_the_group_is_left_out_with_its_reason() -> None:
    words = ["--synthetic", "gpt-oss-20b", "--ranks", "32", "--tokens-per-rank", "64", "--micro-steps", "1", "--layers", "0:1"]
    text = good(["simulate", *words, "--planners", "static,feplb"]).stdout
    line = next(line for line in text.splitlines() if line.startswith("feplb "))
    assert set(line.split()[1:]) == {"-"}
    assert "feplb: left out: Feplb is published for EP groups of at most 16 ranks; got 32" in text
    row = rows_of([*words, "--planners", "static,feplb"])["feplb"]
    assert row["simulated_stage_s"] is None and row["speedup_vs_static"] is None and row["n_solved"] == 0
    assert "no system plans these EP groups" in bad(["simulate", *words, "--planners", "feplb"])


# foremoe gains in this case.
GAINING = [
    "--synthetic", "gpt-oss-20b", "--ranks", "4", "--layers", "0:1", "--tokens-per-rank", "8192", "--micro-steps", "2",
    "--redundant", "1",
]  # fmt: skip


def test_the_step_depends_on_what_lies_outside_the_stages() -> None:
    words = [*GAINING, "--planners", "static,foremoe"]
    alone, slow = rows_of([*words, "--rollout-share", "0"]), rows_of([*words, "--rollout-share", "100s"])
    assert Rollout().convert("70%", None, None) == {"rollout_share": 0.7}
    assert alone["foremoe"]["step_speedup"] == alone["foremoe"]["speedup_vs_static"]
    assert slow["foremoe"]["step_speedup"] == pytest.approx(1.0, abs=1e-3)
    text = good(["simulate", *words, "--rollout-share", "0.25"]).stdout
    assert "step: gain of a training step of which 25% of static's lie outside the stages" in text
    assert "step" in text.splitlines()[next(i for i, line in enumerate(text.splitlines()) if "speed-up" in line)]
    gains = rows_of(words)["foremoe"]["step_speedup_at"]
    for command in ("simulate", "compare"):  # no single gain of a step where nobody said what lies outside
        lines = good([command, *words]).stdout.splitlines()
        assert "step" not in next(line for line in lines if "speed-up" in line)
        told = ", ".join(f"{gains[percent]:.3f} with {percent} %" for percent in ("50", "85", "95"))
        assert f"; a whole step gains less: {told} of it outside the stages" in " ".join(" ".join(lines).split())
    assert "neither a share from 0 to 0.999, such as 0.7 or 70%, nor" in bad(["simulate", *words, "--rollout-share", "1.5"])
    without = good(["simulate", *GAINING, "--planners", "foremoe"]).stdout
    assert "step: unknown; static and another" in without


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_the_fastest_that_an_engine_runs_is_named(command: str, trace: str, dealing: list[str]) -> None:
    words = [command, *GAINING, "--planners", "static,eplb-exact,foremoe"]
    assert "fastest that can be executed: foremoe; a whole step gains less: " in good(words).stdout
    assert "fastest that can be executed: foremoe; step: gain of " in good([*words, "--rollout-share", "0.5"]).stdout
    slow = [command, trace, *dealing, "--redundant", "0", "--planners", "eplb-exact,static"]
    assert "fastest that can be executed: static" in good(slow).stdout.splitlines()


def test_memory_has_a_verdict(tmp_path: Path) -> None:
    words = ["--synthetic", "qwen3-30b-a3b", "--ranks", "8", "--tokens-per-rank", "8192", "--micro-steps", "1"]
    lines = {name: good([name, *words, *more]).stdout for name, more in (
        ("simulate", ["--planners", "static,quota"]), ("compare", ["--planners", "static,quota"]),
        ("plan", ["--planner", "quota"]),
        ("report", ["--planner", "quota", "--planners", "none", "-o", str(tmp_path / "r.html")]),
    )}  # fmt: skip
    for name, text in lines.items():
        verdict = next(line for line in text.splitlines() if line.startswith("memory: "))
        parts = r"( \(weights .*\))?"
        assert re.search(rf"fit.*: 1\d\d of 80 GB{parts}; with activation recomputation \d\d GB", verdict), (name, verdict)
    assert re.search(r"does not fit: 1\d\d of 80 GB; with activation recomputation \d\d GB", (tmp_path / "r.html").read_text())
    small = [*words, "--planners", "static", "--schedule", "accumulate+reforward", "--data-parallel", "8"]
    assert "memory: every line fits: " in good(["simulate", *small]).stdout
    row = rows_of(small)["static"]
    assert row["fits"] and row["peak_bytes"] < 80e9 and row["peak_bytes_with_reforward"] is None and row["host_bytes"] == 0
    more = rows_of([*small, "--optimizer-bytes", "16"])["static"]
    assert more["peak_bytes"] > row["peak_bytes"]


def test_the_table_says_what_it_is(trace: str, dealing: list[str]) -> None:
    text = good(["simulate", trace, *dealing, "--planners", "static,foremoe,force-balanced"]).stdout
    assert "simulated; constants: uncalibrated, median error 12 %" in text
    assert "4 GPUs = EP 4 x DP 1 x PP 1" in text and "homes move" not in text
    first = [line.split()[0] for line in text.splitlines() if line.strip()]
    at = first.index("static")
    assert first[at : at + 3] == ["static", "foremoe", "force-balanced"]


def test_groups_share_the_ranks_and_the_slowest_is_the_stage(trace: str, dealing: list[str]) -> None:
    options = ["--planners", "static,foremoe,force-balanced"]
    whole, halves = rows_of([trace, *dealing, *options]), rows_of([trace, *dealing, *options, "--gpus", "4", "--ranks", "2"])
    assert halves["static"]["groups"] == 2 and whole["static"]["groups"] == 1
    assert halves["static"]["n_solved"] == 2 * whole["static"]["n_solved"]
    same = rows_of([trace, *dealing, *options, "--gpus", "4"])
    for row in (*same.values(), *whole.values()):
        del row["plan_us_per_layer"]
    assert same == whole


def test_gpus_are_those_of_all_groups_and_pipeline_ranks(trace: str, dealing: list[str]) -> None:
    at = dealing.index("--ranks")
    words = ["simulate", trace, *dealing[:at], *dealing[at + 2 :], "--planners", "static", "--pp", "3"]
    text = good([*words, "--gpus", "12", "--ranks", "2"]).stdout
    assert "12 GPUs = EP 2 x DP 2 x PP 3" in text
    assert text == good([*words, "--gpus", "12", "--data-parallel", "2"]).stdout
    assert "do not divide by PP 3 x EP 2; give --gpus a multiple of 6" in bad([*words, "--gpus", "13", "--ranks", "2"])
    assert "leave --data-parallel 3 out" in bad([*words, "--gpus", "12", "--ranks", "2", "--data-parallel", "3"])


def test_pipelines_have_bubbles(trace: str, dealing: list[str]) -> None:
    rows = rows_of([trace, *dealing, "--planners", "static,foremoe", "--pp", "3"])
    assert rows["static"]["bubble_s"] > 0.0
    assert rows_of([trace, *dealing, "--planners", "static"])["static"]["bubble_s"] == 0.0


def test_a_pipeline_with_recomputed_activations(trace: str, dealing: list[str]) -> None:
    words = [trace, *dealing, "--planners", "static", "--pp", "3"]
    plain, again = (rows_of([*words, *more])["static"] for more in ([], ["--schedule", "accumulate+reforward"]))
    assert again["peak_bytes"] < plain["peak_bytes"] and again["simulated_stage_s"] > plain["simulated_stage_s"]
    assert again["peak_bytes"] == plain["peak_bytes_with_reforward"]
    assert rows_of([*words, "--schedule", "accumulate"])["static"]["simulated_stage_s"] == plain["simulated_stage_s"]


def test_bad_input_is_one_sentence(trace: str, dealing: list[str]) -> None:
    assert "give --ranks one of" in bad(["simulate", trace, *dealing, "--ranks", "3"])
    assert "do not divide by PP 1 x EP 8" in bad(["simulate", trace, *dealing, "--gpus", "4", "--ranks", "8"])
    assert "leave --schedule out" in bad(["simulate", trace, *dealing, "--pp", "2", "--schedule", "1f1b:2,0"])
    assert "PP9 with VPP1 needs 9 layers" in bad(["simulate", trace, *dealing, "--pp", "9"])
    interleaved = ["--pp", "2", "--vpp", "2", "--micro-steps", "3"]
    assert "multiples of 2 ranks" in bad(["simulate", "--synthetic", "qwen3-30b-a3b", *interleaved])
