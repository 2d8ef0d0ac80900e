"""``foremoe simulate``: rows, groups, pipelines, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cli_runs import bad, good

from foremoe.plan.figures import FIGURES
from foremoe.planner.strategies import STRATEGIES
from foremoe.simulate import PARTS


def rows_of(arguments: list[str]) -> dict[str, dict[str, Any]]:
    payload = json.loads(good(["simulate", *arguments, "--json"]).stdout)
    return {row["solver"]: row for row in payload["rows"]}


def test_rows_have_compares_figures_and_the_parts_of_the_stage(trace: str, dealing: list[str]) -> None:
    rows = rows_of([trace, *dealing])
    assert list(rows) == [*(name for name in STRATEGIES if name != "exact"), "foremoe", "force-balanced"]
    compared = json.loads(good(["compare", trace, *dealing, "--solvers", "static,quota,hierarchical", "--json"]).stdout)["rows"]
    for row in rows.values():
        assert set(FIGURES) | set(PARTS) <= set(row)
        assert row["stage_s"] == pytest.approx(sum(row[part] for part in PARTS) + row["moves_s"])
        assert row["share_of_balanced"] == pytest.approx(rows["force-balanced"]["stage_s"] / row["stage_s"])
    for other in compared:  # the same plans
        for key in ("skew_mean", "skew_max", "replicas_per_layer", "max_fanout", "bytes_by_link", "predicted_stage_s"):
            assert rows[other["solver"]][key] == pytest.approx(other[key]), key
    assert rows["eplb-exact"]["apart_s"] > 0 and rows["hierarchical"]["apart_s"] == 0
    assert rows["static"]["stage_speedup_vs_static"] == 1.0


def test_the_table_says_what_it_is(trace: str, dealing: list[str]) -> None:
    text = good(["simulate", trace, *dealing, "--solvers", "static,hierarchical,force-balanced"]).stdout
    assert "simulated; constants: model, uncalibrated" in text
    assert "1 EP group of 4" in text and "apart:" not in text
    assert [line.split()[0] for line in text.splitlines()[4:7]] == ["static", "hierarchical", "force-balanced"]


def test_groups_share_the_ranks_and_the_slowest_is_the_stage(trace: str, dealing: list[str]) -> None:
    options = ["--solvers", "static,foremoe,force-balanced"]
    whole, halves = rows_of([trace, *dealing, *options]), rows_of([trace, *dealing, *options, "--ep", "2"])
    assert halves["static"]["groups"] == 2 and whole["static"]["groups"] == 1
    assert halves["static"]["n_solved"] == 2 * whole["static"]["n_solved"]
    same = rows_of([trace, *dealing, *options, "--ep", "4"])
    for row in (*same.values(), *whole.values()):
        del row["plan_us_per_layer"]
    assert same == whole


def test_pipelines_have_bubbles(trace: str, dealing: list[str]) -> None:
    rows = rows_of([trace, *dealing, "--solvers", "static,hierarchical", "--pp", "3"])
    assert rows["static"]["bubble_s"] > 0.0
    assert rows_of([trace, *dealing, "--solvers", "static"])["static"]["bubble_s"] == 0.0


def test_bad_input_is_one_sentence(trace: str, dealing: list[str]) -> None:
    assert "give --ep one of" in bad(["simulate", trace, *dealing, "--ep", "3"])
    assert "do not divide into EP groups of 8" in bad(["simulate", trace, *dealing, "--ep", "8"])
    assert "leave --schedule out" in bad(["simulate", trace, *dealing, "--pp", "2", "--schedule", "1f1b:2,0"])
    assert "pipeline ranks" in bad(["simulate", trace, *dealing, "--pp", "9"])
    interleaved = ["--pp", "2", "--vpp", "2", "--micro-steps", "3"]
    assert "multiples of 2 ranks" in bad(["simulate", "--synthetic", "qwen3-30b-a3b", *interleaved])
