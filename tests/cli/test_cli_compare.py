"""``foremoe compare`` and ``foremoe ablate``: rows, notes, JSON, and the cases at the edge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import EXPERTS, LAYERS, TOPK, bad, good

from foremoe.machine.model import Model
from foremoe.plan.figures import FIGURES
from foremoe.planner.strategies import STRATEGIES
from foremoe.workload.workload import Workload

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
QUICK = "static,quota,greedy,foremoe"


def no_constant(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def parsed(text: str) -> dict[str, Any]:
    """Strict: no NaN, no Infinity."""
    return json.loads(text, parse_constant=no_constant)  # type: ignore[no-any-return]


def rows_of(result: Any) -> dict[str, dict[str, Any]]:
    return {row["solver"]: row for row in parsed(result.stdout)["rows"]}


@pytest.mark.heavy
def test_one_row_per_strategy_in_the_table_order(trace: str, dealing: list[str]) -> None:
    result = good(["compare", trace, *dealing])
    lines = result.stdout.splitlines()
    assert lines[0].startswith("case: first.npz: 256 tokens, 3 micro-steps x 3 layers, top-2 of 8 experts, 4 ranks on 2 nodes")
    names = [
        line.split()[0] for line in lines[3:] if line.split() and line.split()[0] in STRATEGIES and ":" not in line.split()[0]
    ]
    assert names == [name for name in STRATEGIES if name != "exact"]
    assert "uncalibrated, median error 12 %" in result.stdout
    static = "micro-step 0 has no history and is static; give history (--history TRACE)"
    assert f"eplb-history, laer: {static}" in result.stdout
    assert "homes move" in result.stdout


def test_json_alone_is_only_json_and_matches_the_table(trace: str, dealing: list[str]) -> None:
    arguments = ["compare", trace, *dealing, "--planners", QUICK]
    payload = parsed(good([*arguments, "--json"]).stdout)
    assert set(payload) == {
        "rows", "case", "objective", "cost_model", "residual", "foremoe_version", "static_stage_s",
        "trainer", "advice",
    }  # fmt: skip
    assert [row["solver"] for row in payload["rows"]] == QUICK.split(",")
    assert all(set(FIGURES) <= set(row) for row in payload["rows"])
    assert payload["cost_model"] == "uncalibrated" and payload["objective"] == "time"
    case = payload["case"]
    assert (case["tokens"], case["micro_steps"], case["layers"], case["experts"]) == (256, 3, LAYERS, EXPERTS)
    assert (case["topk"], case["ranks"], case["nodes"], case["redundant"]) == (TOPK, 4, 2, 1)
    table = good(arguments).stdout
    for row in payload["rows"]:
        line = next(line for line in table.splitlines() if line.startswith(row["solver"]))
        assert line.split()[1] == f"{row['skew_mean']:.3f}"


def test_json_before_a_trace_leaves_the_trace_alone(trace: str, dealing: list[str]) -> None:
    assert parsed(good(["compare", "--json", trace, *dealing, "--planners", "static"]).stdout)["case"]["traces"] == ["first.npz"]


@pytest.mark.parametrize("form", [["--json={}"], ["--json", "{}"]])
def test_a_json_file_leaves_the_table_on_stdout(form: list[str], trace: str, dealing: list[str], tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    result = good(["compare", trace, *dealing, "--planners", "static", *(part.format(target) for part in form)])
    assert result.stdout.startswith("case: ")
    assert parsed(target.read_text())["rows"][0]["solver"] == "static"


def test_solver_texts_are_split_at_top_level_commas_and_ordered(trace: str, dealing: list[str]) -> None:
    chosen = ["--planners", "LeastLoaded(min_pairs=64, threshold=1.0),greedy", "--planners", "static"]
    assert list(rows_of(good(["compare", trace, *dealing, *chosen, "--json"]))) == [
        "static", "greedy", "LeastLoaded(min_pairs=64, threshold=1.0)",
    ]  # fmt: skip


def test_static_is_named_where_it_has_no_row(trace: str, dealing: list[str]) -> None:
    static = rows_of(good(["compare", trace, *dealing, "--planners", "static", "--json"]))["static"]
    text = good(["compare", trace, *dealing, "--planners", "quota"]).stdout
    assert f"static ({static['simulated_stage_s'] * 1e3:.1f} ms): simulated" in text


def test_history_counts_the_first_micro_step(trace: str, other_trace: str, dealing: list[str], tmp_path: Path) -> None:
    arguments = ["compare", trace, *dealing, "--planners", "static,eplb-history", "--json"]
    without = good(arguments)
    given = good([*arguments, "--history", other_trace])
    simulated = ["simulate", *arguments[1:]]
    for told in (without, given, good(simulated)):
        assert rows_of(told)["static"]["n_solved"] == 3 * LAYERS
    assert rows_of(good(simulated))["eplb-history"]["skew_mean"] == rows_of(without)["eplb-history"]["skew_mean"]
    # A workload file of the same step gives the same history as its trace.
    counts = str(tmp_path / "other.safetensors")
    good(["plan", other_trace, *dealing, "--planner", "static", "--save-workload", counts])
    from_counts = good([*arguments, "--history", counts])
    figures = [{k: v for k, v in rows_of(r)["eplb-history"].items() if k != "plan_us_per_layer"} for r in (given, from_counts)]
    assert figures[0] == figures[1]


def test_several_traces_are_one_workload(trace: str, other_trace: str, dealing: list[str]) -> None:
    case = parsed(good(["compare", trace, other_trace, *dealing, "--planners", "static", "--json"]).stdout)["case"]
    assert case["traces"] == ["first.npz", "second.npz"] and case["tokens"] == 512


def test_micro_steps_cap_a_trace_and_say_what_is_missing(trace: str, dealing: list[str]) -> None:
    case = parsed(good(["compare", trace, *dealing, "--micro-steps", "1", "--planners", "static", "--json"]).stdout)["case"]
    assert case["micro_steps"] == 1 and case["left_out_micro_steps"] == 2
    result = good(["compare", trace, *dealing, "--micro-steps", "9", "--planners", "static"])
    assert "warning: --micro-steps 9: there are only 3." in result.stderr


def test_a_sequence_over_budget_is_named(trace: str, model: str) -> None:
    result = good(["compare", trace, "--model", model, "--ranks", "2", "--tokens-per-rank", "20", "--planners", "static"])
    assert "longer than a micro-step's budget of 40 tokens" in result.stderr


def test_shuffling_is_a_function_of_the_seed(trace: str, dealing: list[str]) -> None:
    arguments = ["compare", trace, *dealing, "--shuffle", "--planners", "static", "--json"]
    first, again, other = (good([*arguments, "--seed", seed]).stdout for seed in ("3", "3", "5"))
    skews = [parsed(text)["rows"][0]["skew_mean"] for text in (first, again, other)]
    assert skews[0] == skews[1] != skews[2]


def test_every_option_of_the_problem_reaches_it(trace: str, dealing: list[str]) -> None:
    options = {"objective": "balance", "schedule": "1f1b:2,0+reforward", "replicas": "node"}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    words += ["--redundant", "2", "--slot-depth", "4"]
    case = parsed(good(["compare", trace, *dealing, *words, "--planners", "greedy", "--json"]).stdout)["case"]
    assert case.items() >= options.items() and (case["redundant"], case["slot_depth"]) == (2, 4)
    recompute = ["--stage", "recompute", "--layers", "1:3", "--planners", "static", "--json"]
    case = parsed(good(["compare", trace, *dealing, *recompute]).stdout)["case"]
    assert (case["stage"], case["schedule"], case["layers"]) == ("recompute", "forward", 2)


def test_synthetic_routing_by_preset_and_by_file(model: str) -> None:
    words = ["--ranks", "4", "--tokens-per-rank", "32", "--planners", "static", "--json"]
    case = parsed(good(["compare", "--synthetic", model, "--regime", "skew", "--micro-steps", "2", *words]).stdout)["case"]
    assert (case["micro_steps"], case["tokens"], case["regime"]) == (2, 2 * 4 * 32, "skew")
    case = parsed(good(["compare", "--synthetic", "mixtral-8x7b", "--layers", "0:2", *words]).stdout)["case"]
    assert (case["micro_steps"], case["layers"], case["model"]) == (4, 2, "mixtral-8x7b")


def test_one_rank_and_rows_without_load(trace: str, model: str, tmp_path: Path) -> None:
    rows = rows_of(good(["compare", trace, "--model", model, "--ranks", "1", "--planners", QUICK + ",eplb-history", "--json"]))
    assert all(row["skew_mean"] == 1.0 for row in rows.values())
    load_MLGE = np.zeros((2, LAYERS, 4, EXPERTS), np.int32)
    load_MLGE[1, 0] = 3
    path = str(tmp_path / "zeros.safetensors")
    Workload.from_counts(load_MLGE, num_topk=TOPK).save(path)
    for objective in ("time", "balance"):
        rows = rows_of(good(["compare", path, "--model", model, "--objective", objective, "--planners", QUICK, "--json"]))
        assert rows["static"]["skew_mean"] == 1.0 and rows["foremoe"]["replicas_per_layer"] == 0
    np.testing.assert_equal(Workload.load(path).load_MLGE, load_MLGE)
    Workload.from_counts(np.zeros_like(load_MLGE), num_topk=TOPK).save(path)
    good(["compare", path, "--model", model, "--planners", QUICK])


def test_a_cluster_file_keeps_its_own_ranks_and_nodes(trace: str, model: str, tmp_path: Path) -> None:
    from foremoe.machine.cluster import Cluster

    path = str(tmp_path / "box.toml")
    Cluster.from_dict(
        {k: v for k, v in Cluster.preset("8xa100").to_dict().items() if k not in ("num_ranks", "ranks_per_node")}
        | {"node_of_rank": [0, 1, 0, 1], "calibrated": True}
    ).to_toml(path)
    words = ["compare", trace, "--model", model, "--cluster", path, "--planners", "static", "--json"]
    payload = parsed(good(words).stdout)
    assert (payload["case"]["ranks"], payload["case"]["nodes"], payload["cost_model"]) == (4, 2, "calibrated")
    payload = parsed(good([*words, "--ranks", "2", "--ranks-per-node", "1"]).stdout)
    assert (payload["case"]["ranks"], payload["case"]["nodes"]) == (2, 2)


def test_the_model_is_told_from_a_unique_shape(tmp_path: Path) -> None:
    lite = Model.preset("deepseek-v2-lite")
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((12, lite.num_layers, lite.num_experts)), axis=2)[:, :, : lite.num_topk].astype(np.uint8)
    path, plan = str(tmp_path / "lite.npz"), str(tmp_path / "p.safetensors")
    np.savez(path, topk_ids=ids, seq_len=np.array([12]), num_experts=lite.num_experts)
    case = parsed(good(["compare", path, "--ranks", "2", "--planners", "static", "--json"]).stdout)["case"]
    assert case["model"] == lite.name
    # Told from its shape or named: the same plan, with the model's own layer numbers.
    for more in ([], ["--model", lite.name]):
        good(["plan", path, "--ranks", "2", "-o", plan, *more])
        shown = parsed(good(["inspect", plan, "--explain", "0,0", "--json"]).stdout)
        assert f"model layer {lite.first_moe_layer}" in shown["explain"][0]
        good(["check", plan, "--trace", path])


def test_a_sampled_row_shows_another_planner_on_the_same_rows(trace: str, dealing: list[str]) -> None:
    pytest.importorskip("pyscipopt", reason="Exact needs pyscipopt; foremoe[exact] installs it")
    words = ["compare", trace, *dealing, "--objective", "balance", "--exact-seconds", "5", "--planners"]
    lines = good([*words, "static,foremoe,exact"]).stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("exact ("))
    assert "row" in lines[at] and lines[at + 1].split(",")[0].strip() == "foremoe"
    exact, same = float(lines[at].split(")")[1].split()[0]), float(lines[at + 1].split()[-1])
    assert exact <= same + 1e-3
    assert "same rows" in good([*words, "static,exact"]).stdout


def test_a_missing_package_is_a_note_not_an_error(trace: str, dealing: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "pyscipopt" else find(name, *a))
    text = good(["compare", trace, *dealing, "--planners", "static,exact"]).stdout
    assert "exact: left out: needs pyscipopt" in text


@pytest.mark.shared
@pytest.mark.skipif(not (SHARED / "esft_law.npz").exists(), reason="the recorded traces are not beside the checkout")
def test_a_recorded_trace(tmp_path: Path) -> None:
    paths = [str(SHARED / f"esft_{task}.npz") for task in ("law", "intent")]
    words = [*paths, "--ranks", "8", "--micro-steps", "2", "--shuffle", "--seed", "1"]
    payload = parsed(good(["compare", *words, "--planners", "static,quota,foremoe", "--json"]).stdout)
    rows = {row["solver"]: row for row in payload["rows"]}
    assert payload["case"]["model"] == "deepseek-v2-lite" and payload["case"]["layers"] == 26
    assert rows["quota"]["skew_mean"] < rows["static"]["skew_mean"]
    assert rows["foremoe"]["speedup_vs_static"] >= 1.0
    plan = str(tmp_path / "plan.safetensors")
    good(["plan", *words, "-o", plan])
    good(["check", plan, "--trace", paths[0], "--trace", paths[1]])


def test_an_exact_line_without_proven_rows_is_left_out_in_one_line(trace: str, dealing: list[str]) -> None:
    text = good(
        ["compare", trace, *dealing, "--planners", "static,exact", "--objective", "balance", "--exact-seconds", "0.000001"]
    ).stdout
    assert [line.split()[0] for line in text.splitlines() if line.startswith(("static", "exact"))] == ["static", "exact:"]
    assert "exact: left out: " in text


def test_levels_that_compare_would_ignore_are_refused(trace: str, dealing: list[str]) -> None:
    assert "pack level" in bad(["compare", trace, *dealing, "--planners", "static,Planner(pack=ExpertAware())"])
