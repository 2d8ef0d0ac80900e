"""``foremoe simulate`` with a question: which knowledge pays; and ``foremoe advise``."""

from __future__ import annotations

import json

import pytest
from cli_runs import bad, good


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
    assert "there is no foresight 'nothing'" in bad([*words, "nothing"])
    assert "one planner" in bad([*words, "exact", "--planners", "static,quota"])
    assert "one planner" in bad([*words, "exact", "--planners", "force-balanced"])


def test_a_planner_that_refuses_the_case_says_so() -> None:
    words = ["simulate", "--synthetic", "gpt-oss-20b", "--ranks", "32", "--layers", "0:1", "--micro-steps", "1", "--planners"]
    assert "16 ranks" in bad([*words, "feplb", "--foresight", "exact"])


def test_history_is_asked_for_and_what_no_engine_runs_is_marked(trace: str, dealing: list[str]) -> None:
    words = ["simulate", trace, *dealing, "--planners", "static,eplb-history"]
    lines = good(words).stdout.splitlines()
    assert sum(line.startswith("eplb-history +") for line in lines) == 1
    said = "eplb-history: micro-step 0 has no history and is static; give history (--history TRACE)"
    assert said in lines and said not in good([*words, "--history", trace]).stdout


def test_advice_from_few_micro_steps_says_so() -> None:
    case = ["--synthetic", "gpt-oss-20b", "--ranks", "4", "--layers", "0:1", "--tokens-per-rank", "256"]
    few, many = (good(["advise", *case, "--micro-steps", number]).stdout for number in ("1", "4"))
    assert "the trace has 1 micro-step; a training step usually has more" in few and "usually has more" not in many


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [("8", {"EP 4 x DP 2", "EP 2 x DP 4", "EP 4 x PP 2"}), ("4", {"EP 2 x DP 2", "EP 2 x PP 2"}), ("2", set())],
)
def test_advice_compares_layouts(ranks: str, layouts: set[str]) -> None:
    case = ["--synthetic", "gpt-oss-20b", "--ranks", ranks, "--layers", "0:2", "--tokens-per-rank", "256", "--micro-steps", "2"]
    tried = {row["change"] for row in json.loads(good(["advise", *case, "--json"]).stdout)["changes"]}
    assert {name.partition(",")[0] for name in tried if name.startswith("EP ")} == layouts


def test_layouts_of_a_pipeline_are_compared_as_the_simulator_does() -> None:
    job = ["--synthetic", "qwen3-30b-a3b", "--gpus", "16", "--tokens-per-rank", "4096", "--layers", "0:8", "--redundant", "1"]
    rows = json.loads(good(["advise", *job, "--pp", "2", "--micro-steps", "6", "--json"]).stdout)["changes"]
    gain = {row["change"]: row["speedup"] for row in rows}
    assert {"EP 16 x PP 1", "EP 4 x PP 4", "EP 4 x DP 2 x PP 2"} <= set(gain)

    def stage_s(pp: int, micro_steps: int) -> float:
        words = ["simulate", *job, "--pp", str(pp), "--micro-steps", str(micro_steps), "--planners", "static,foremoe", "--json"]
        found: float = json.loads(good(words).stdout)["rows"][1]["simulated_stage_s"]
        return found

    now_s = stage_s(2, 6)
    assert gain["EP 16 x PP 1"] == pytest.approx(now_s / stage_s(1, 3), rel=0.02)
    assert gain["EP 4 x PP 4"] == pytest.approx(now_s / stage_s(4, 12), rel=0.03)


def test_gpus_are_shared_by_all_groups_and_one_rank_of_a_pipeline_is_not_split_again() -> None:
    case = ["--synthetic", "gpt-oss-20b", "--layers", "0:2", "--tokens-per-rank", "256", "--micro-steps", "2", "--redundant", "0"]
    said = good(["advise", *case, "--gpus", "16", "--pp", "2", "--data-parallel", "2"])
    assert "16 GPUs = EP 4 x DP 2 x PP 2" in said.stdout and "there are only" not in said.stderr
    assert "give --gpus a multiple of 4" in bad(["advise", *case, "--gpus", "6", "--pp", "2", "--data-parallel", "2"])
    rows = json.loads(good(["advise", *case, "--ranks", "8", "--schedule", "1f1b:4,0", "--json"]).stdout)["changes"]
    assert not any("PP" in row["change"] for row in rows)


def test_no_strategy_that_no_engine_runs_is_called_the_fastest() -> None:
    case = ["--synthetic", "gpt-oss-20b", "--ranks", "4", "--layers", "0:1", "--tokens-per-rank", "256", "--redundant", "1"]
    said = good(["compare", *case, "--planners", "eplb-step"]).stdout
    assert "fastest that can be executed" not in said and "no strategy of the table can be executed" in said


def test_advice_is_on_the_default_planner_whatever_was_planned() -> None:
    case = ["--synthetic", "gpt-oss-20b", "--ranks", "4", "--layers", "0:1", "--tokens-per-rank", "8192", "--micro-steps", "4"]
    text = good(["plan", *case, "--redundant", "1", "--planner", "static"]).stdout
    assert "simulated stage: 1.00x" in text and "do not use foremoe" not in text


def test_compare_says_where_even_routing_stands(trace: str, dealing: list[str]) -> None:
    said = bad(["compare", trace, *dealing, "--planners", "static,force-balanced"])
    assert "is even routing, not a strategy" in said and "foremoe simulate" in said
