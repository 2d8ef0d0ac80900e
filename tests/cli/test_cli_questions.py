"""``foremoe simulate`` with a question: which knowledge pays, and what if."""

from __future__ import annotations

import json

import pytest
from cli_runs import bad, good

from foremoe.cli.tables import Look, Table, render
from foremoe.cli.what_if import add_turns, turn_lines
from foremoe.machine.trainer import Trainer


def test_knowledge_has_a_row_for_every_kind(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--foresight", "exact,rerouted=0.1,previous,step,none"]
    payload = json.loads(good([*words, "--json"]).stdout)
    rows = {row["foresight"]: row for row in payload["rows"]}
    assert list(rows) == ["exact", "rerouted=0.1", "previous", "step", "none"] and payload["planner"] == "foremoe"
    for row in rows.values():
        assert row["net_speedup_vs_static"] <= row["speedup_vs_static"] + 1e-12
    compared = json.loads(good(["simulate", trace, *dealing, "--planners", "static,foremoe", "--json"]).stdout)["rows"]
    for name, row in zip(("none", "exact"), compared, strict=True):
        assert rows[name]["simulated_stage_s"] == pytest.approx(row["simulated_stage_s"])
    lines = good(words).stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("foresight "))
    assert [line.split()[0] for line in lines[head + 1 : head + 6]] == list(rows)
    assert max(map(len, lines[head : head + 6])) <= 80
    best = max(rows.values(), key=lambda row: row["speedup_vs_static"])
    assert best["foresight"] == "exact" and any(line.startswith("pays most: ") for line in lines)
    assert any("no history" in line for line in lines)
    assert "no history" not in good([*words, "--history", trace]).stdout


def test_knowledge_of_another_planner(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--foresight", "exact,none", "--json"]
    rows = {name: json.loads(good([*words, "--planners", name]).stdout)["rows"] for name in ("foremoe", "quota")}
    assert rows["quota"][0]["simulated_stage_s"] != rows["foremoe"][0]["simulated_stage_s"]
    assert rows["quota"][1]["simulated_stage_s"] == rows["foremoe"][1]["simulated_stage_s"]


def test_bad_knowledge_is_one_sentence(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--foresight"]
    assert "needs a number" in bad([*words, "exact,rerouted="])
    assert "foresight must be" in bad([*words, "nothing"])
    assert "one planner" in bad([*words, "exact", "--planners", "static,quota"])
    assert "one planner" in bad([*words, "exact", "--planners", "force-balanced"])


def test_a_planner_that_refuses_the_case_says_so() -> None:
    words = ["simulate", "--synthetic", "gpt-oss-20b", "--ranks", "32", "--layers", "0:1", "--micro-steps", "1", "--planners"]
    assert "16 ranks" in bad([*words, "feplb", "--foresight", "exact"])
    rows = json.loads(good([*words, "static,feplb", "--what-if", "multiplex=2", "--rollout-share", "0.5", "--json"]).stdout)[
        "rows"
    ]
    assert set(rows[1]["multiplex"].values()) == {None} and rows[0]["multiplex"]["vs_static"] == 1.0


def test_low_precision_is_a_line_that_changes_numerics(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--planners", "static,foremoe", "--what-if", "low-precision=2"]
    payload = json.loads(good([*words, "--json"]).stdout)
    rows = {row["solver"]: row for row in payload["rows"]}
    assert {name: row["changes_numerics"] for name, row in rows.items()} == {
        "static": False, "foremoe": False, "low-precision=2": True,
    }  # fmt: skip
    assert rows["low-precision=2"]["compute_s"] < rows["static"]["compute_s"]
    assert rows["low-precision=2"]["speedup_vs_static"] > 1.0 and payload["what_if"]["low_precision"] == 2.0
    text = good(words).stdout
    assert "low-precision=2 *" in text and "* changes numerics" in text
    assert "changes numerics" not in good(words[:-2]).stdout


def test_jobs_in_turns_have_a_table_of_their_own(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--planners", "static,foremoe", "--what-if", "multiplex=3"]
    rows = json.loads(good([*words, "--rollout-share", "0.25", "--json"]).stdout)["rows"]
    static_s = rows[0]["simulated_stage_s"]
    for row in rows:
        turns, stage_s = row["multiplex"], row["simulated_stage_s"]
        alone_s = static_s / 3 + row["plan_exposed_s"] + stage_s
        assert turns["alone_s"] == pytest.approx(alone_s)
        assert turns["round_s"] == pytest.approx(max(alone_s, static_s, 3 * stage_s))
        assert turns["vs_static"] == pytest.approx(rows[0]["multiplex"]["round_s"] / turns["round_s"])
    assert rows[0]["plan_exposed_s"] == 0.0 < rows[1]["plan_exposed_s"]
    assert "give --rollout-share" in bad(words)
    words += ["--rollout-share", "0.5"]
    lines = good(words).stdout.splitlines()
    head = next(i for i, line in enumerate(lines) if "alone ms" in line)
    assert "what if 3 such jobs took turns" in lines[head - 2] and max(map(len, lines[head : head + 3])) <= 80
    some = good([*words, "--columns", "skew_mean,multiplex.gain"]).stdout
    assert "solver   skew mean\n" in some and "solver   gain\n" in some
    seconds = json.loads(good([*words, "--planners", "foremoe", "--rollout-share", "9s", "--json"]).stdout)["rows"]
    assert seconds[0]["multiplex"]["round_s"] == pytest.approx(27.0)


def test_bad_what_ifs_are_one_sentence(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--planners", "foremoe", "--what-if"]
    assert "at least 1" in bad([*words, "low-precision=0.5"])
    assert "needs a number" in bad([*words, "low-precision"])
    assert "is unknown" in bad([*words, "nothing=1"])
    for jobs in ("0", "1.5", "nan", "inf", "1e9"):
        assert "whole number of jobs" in bad([*words, f"multiplex={jobs}"])
    assert "add static to --planners" in bad([*words, "multiplex=2", "--rollout-share", "0.5"])
    assert "one at a time" in bad([*words, "multiplex=2", "--foresight", "exact"])


def test_a_line_without_figures_takes_no_turns() -> None:
    rows = [{"solver": "refuses", "n_solved": 0, "simulated_stage_s": None, "changes_numerics": None}]
    add_turns(rows, {}, [], Trainer(rollout_s=1.0), 2)
    assert set(rows[0]["multiplex"].values()) == {None}  # type: ignore[attr-defined]
    table = turn_lines(rows, Trainer(rollout_s=1.0), 2)[2]
    assert isinstance(table, Table)
    assert render(table, Look(wide=True))[1][0].split() == ["refuses", *"-" * 7]


def test_history_is_asked_for_and_what_no_engine_runs_is_marked_in_both_tables(trace: str, dealing: list[str]) -> None:
    turns = ["--what-if", "multiplex=2", "--rollout-share", "0.5"]
    words = ["simulate", trace, *dealing, "--planners", "static,eplb-history", *turns]
    lines = good(words).stdout.splitlines()
    assert sum(line.startswith("eplb-history +") for line in lines) == 2
    said = "eplb-history: micro-step 0 has no history and is static; give --history TRACE"
    assert said in lines and said not in good([*words, "--history", trace]).stdout
