"""``foremoe plan``, ``check`` and ``inspect``: a plan's way through files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from cli_runs import EXPERTS, LAYERS, bad, good, run, write_trace

import foremoe
from foremoe.plan.plan import Plan
from foremoe.workload.workload import Workload


def test_a_plan_prints_its_summary_and_is_the_same_file_again(
    plan_and_workload: tuple[str, str], trace: str, dealing: list[str], tmp_path: Path
) -> None:
    plan = Plan.load(plan_and_workload[0])
    target = tmp_path / "again.safetensors"
    result = good(["plan", trace, *dealing, "--threads", "2", "-o", str(target)])
    assert plan.summary() in result.stdout and "planned in " in result.stdout and "planning: foremoe" in result.stderr
    assert target.read_bytes() == Path(plan_and_workload[0]).read_bytes()


def test_plan_json(trace: str, dealing: list[str]) -> None:
    payload = json.loads(good(["plan", trace, *dealing, "--planner", "Quota(min_pairs=2)", "--json"]).stdout)
    assert set(payload) == {"plan", "gain", "advice", "report", "case", "output", "foremoe_version"}
    assert "Quota(min_pairs=2" in payload["plan"]["planner"] and payload["plan"]["micro_steps"] == 3
    assert payload["report"]["rows"] == 3 * LAYERS and payload["output"] is None
    assert payload["plan"]["skew"]["mean"] <= payload["plan"]["static_skew"]["mean"]


def test_check_accepts_a_plan_with_its_own_loads(plan_and_workload: tuple[str, str], trace: str) -> None:
    plan, work = plan_and_workload
    for more in ([], ["--trace", trace], ["--workload", work]):
        result = good(["check", plan, *more])
        assert result.stdout.startswith("plan.safetensors: valid")
    payload = json.loads(good(["check", plan, "--trace", trace, "--json"]).stdout)
    assert payload["valid"] is True and payload["violations"] == [] and len(payload["checked"]) == 2


def test_check_deals_capped_shuffled_and_selected_plans_again(
    trace: str, other_trace: str, dealing: list[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "part.safetensors")
    good(["plan", trace, other_trace, *dealing, "--shuffle", "--seed", "7", "--micro-steps", "2", "--layers", "1:3", "-o", path])
    good(["check", path, "--trace", trace, "--trace", other_trace])
    assert run(["check", path, "--trace", other_trace, "--trace", trace]).exit_code == 1


def test_check_finds_other_loads(
    plan_and_workload: tuple[str, str], other_trace: str, dealing: list[str], tmp_path: Path
) -> None:
    plan, _ = plan_and_workload
    result = run(["check", plan, "--trace", other_trace])
    assert result.exit_code == 1 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[-1] == "plan.safetensors: keeps its laws, but was made for other loads than those of the trace" and all(
        line.startswith("[load] ") for line in lines[:-1]
    )
    capped = str(tmp_path / "capped.safetensors")
    good(["plan", other_trace, *dealing, "--micro-steps", "1", "--save-workload", capped])
    payload = json.loads(run(["check", plan, "--workload", capped, "--json"]).stdout)
    assert payload["valid"] is False and "[1, 3, 4, 8]" in payload["violations"][0]["message"]


def test_check_and_report_tell_the_number_of_experts(plan_and_workload: tuple[str, str], folder: Path) -> None:
    other, sentence = write_trace(folder / "more.npz", num_experts=9), "the plan was made for tiny (8 experts); this trace has 9"
    result = run(["check", plan_and_workload[0], "--trace", other])
    assert result.exit_code == 1 and result.stdout.startswith(
        f"[load] {sentence}\nplan.safetensors: keeps its laws, but was made"
    )
    page = str(folder / "page.html")
    assert (
        bad(["report", other, "--plan", plan_and_workload[0], "-o", page])
        == f"error: {sentence}; give the trace that was planned."
    )


def test_check_lists_every_broken_law(plan_and_workload: tuple[str, str], tmp_path: Path) -> None:
    plan = Plan.load(plan_and_workload[0])
    quota_MLGS = plan.quota_MLGS.copy()
    quota_MLGS[0, 0, 0, 0] += 1
    path = str(tmp_path / "broken.safetensors")
    dataclasses.replace(plan, quota_MLGS=quota_MLGS).save(path)
    result = run(["check", path, "--workload", plan_and_workload[1]])
    assert result.exit_code == 1
    assert any(line.startswith("[tokens] micro-step 0, layer 0") for line in result.stdout.splitlines())


def test_check_finds_other_prices_and_another_trace(plan_and_workload: tuple[str, str], trace: str, tmp_path: Path) -> None:
    """They break no law of the plan alone."""
    plan, path = Plan.load(plan_and_workload[0]), str(tmp_path / "changed.safetensors")
    dearer = dataclasses.replace(plan, cost_ML=plan.cost_ML.each(lambda x: x * 1000))
    other = dataclasses.replace(plan, header=dataclasses.replace(plan.header, trace_id="another"))
    for changed, text in ((dearer, "[cost] micro-step 0, layer 0"), (other, "[problem] the plan was made for trace_id another")):
        changed.save(path)
        good(["check", path])
        for source in (["--trace", trace], ["--workload", plan_and_workload[1]]):
            result = run(["check", path, *source])
            assert result.exit_code == 1 and result.stdout.startswith(text)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "options",
    [
        "--stage recompute --dispatch node --ranks-per-node 2",
        "--planner eplb-history --objective balance --redundant 2",
        "--slot-depth 1 --host-store",
        "--planner Planner(pack=AsGiven(shuffle=True),home=Anneal()) --schedule 1f1b:2,0+reforward --replicas node --seed 4 "
        "--objective balance",
    ],
)
def test_check_prices_as_the_planner_did(options: str, trace: str, dealing: list[str], tmp_path: Path) -> None:
    path = str(tmp_path / "plan.safetensors")
    good(["plan", trace, *dealing, *options.split(), "-o", path])
    good(["check", path, "--trace", trace])
    if "pack=" in options:
        assert (Plan.load(path).home_LE != np.arange(EXPERTS)).any()
        assert Plan.load(path).header.dealt.packer == "AsGiven(shuffle=True)"  # type: ignore[union-attr]


def test_check_finds_shares_that_do_not_add_up(plan_and_workload: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Plan.rows_for

    def short(self: Plan, workload: Workload, rank: int) -> np.ndarray:
        share_MLP = whole(self, workload, rank).copy()
        if rank == 1:
            share_MLP[1, 2, np.argmax(share_MLP[1, 2])] -= 1
        return share_MLP

    monkeypatch.setattr(Plan, "rows_for", short)
    result = run(["check", plan_and_workload[0], "--workload", plan_and_workload[1]])
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].startswith("[split] micro-step 1, layer 2, rank 1: sends") and lines[1].startswith(
        "[split] micro-step 1, layer 2, rank"
    )


def test_check_needs_to_know_how_counts_were_dealt(model: str, trace: str, tmp_path: Path) -> None:
    path = str(tmp_path / "synthetic.safetensors")
    good(["plan", "--synthetic", model, "--ranks", "4", "--tokens-per-rank", "16", "-o", path])
    good(["check", path])
    assert "--workload" in bad(["check", path, "--trace", trace])


def test_inspect_a_trace(trace: str, tmp_path: Path) -> None:
    text = good(["inspect", trace, "--ranks", "4", "--tokens-per-rank", "25"]).stdout
    assert text.startswith("first.npz: trace: 256 tokens in 6 sequences, 3 layers, top-2 of 8 experts")
    assert "25 to 60 tokens" in text and "3 micro-steps; static skew" in text
    payload = json.loads(good(["inspect", trace, "--ranks", "4", "--json"]).stdout)
    assert payload["kind"] == "trace" and payload["sequence_length"]["max"] == 60 and payload["dealt"]["micro_steps"] == 1
    assert payload["popularity"]["hottest_over_mean"]["max"] >= payload["popularity"]["hottest_over_mean"]["mean"] >= 1
    hottest = payload["popularity"]["hottest"][0]
    with np.load(trace) as recorded:
        counts = np.bincount(recorded["topk_ids"][:, hottest["layer"]].ravel(), minlength=EXPERTS)
    assert counts.max() == counts[hottest["expert"]] and hottest["over_mean"] == pytest.approx(counts.max() / counts.mean())


def test_inspect_a_trace_that_lacks_the_number_of_experts(model: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "bare.npz", num_experts=None)
    assert "--model" in bad(["inspect", path])
    assert json.loads(good(["inspect", path, "--model", model, "--json"]).stdout)["experts"] == EXPERTS


def test_even_loads_have_no_correlation(tmp_path: Path) -> None:
    work = str(tmp_path / "even.safetensors")
    Workload.from_counts(np.ones((2, 1, 2, 4), int), num_topk=2).save(work)
    text = good(["inspect", work]).stdout
    assert "mean 1.000" in text and "correlate" not in text
    assert json.loads(good(["inspect", work, "--json"]).stdout)["step_correlation"] is None


def test_inspect_a_workload_and_a_plan(plan_and_workload: tuple[str, str]) -> None:
    plan, work = plan_and_workload
    text = good(["inspect", work]).stdout
    assert text.startswith("work.safetensors: workload: update of ") and "3 micro-steps x 3 layers, 4 source ranks" in text
    payload = json.loads(good(["inspect", work, "--json"]).stdout)
    assert payload["kind"] == "workload" and payload["tokens"] == 256 and payload["pairs"] == 256 * 2 * LAYERS
    text = good(["inspect", plan, "--explain", "1,2"]).stdout
    assert Plan.load(plan).explain(1, 2) in text and "25 tokens per rank" in text
    payload = json.loads(good(["inspect", plan, "--json"]).stdout)
    assert payload["kind"] == "plan" and payload["key"]["stage"] == "update" and payload["static_skew"]["mean"] >= 1


def test_inspect_a_workload_without_load(tmp_path: Path) -> None:
    path = str(tmp_path / "zeros.safetensors")
    Workload.from_counts(np.zeros((1, 2, 4, 8), np.int32), num_topk=2).save(path)
    assert json.loads(good(["inspect", path, "--json"]).stdout)["static_skew"] == {"mean": 1.0, "p99": 1.0}
    Workload.from_counts(np.zeros((2, 2, 3, 8), np.int32), num_topk=2).save(path)
    assert "do not" in good(["inspect", path]).stdout


def test_a_case_says_what_it_assumes(tmp_path: Path) -> None:
    few = [
        "--synthetic", "gpt-oss-20b", "--ranks", "16", "--tokens-per-rank", "256", "--micro-steps", "1", "--layers", "0:1",
        "--redundant", "1",
    ]  # fmt: skip
    assumed = "note: a plain all-to-all is assumed"
    assert assumed in good(["plan", *few]).stdout and assumed not in good(["plan", *few, "--dispatch", "node"]).stdout
    trace = tmp_path / "short.npz"
    foremoe.synthetic_trace("gpt-oss-20b", num_sequences=8, mean_length=50.0, num_layers=1, seed=0, regime="mid").save(trace)
    dealt = ["plan", str(trace), "--model", "gpt-oss-20b", "--ranks", "8", "--redundant", "1", "--tokens-per-rank"]
    assert "of one micro-step of 8 x 1,024 tokens; record more" in good([*dealt, "1024"]).stdout
    assert "record more" not in good([*dealt, "16"]).stdout


def test_a_node_that_is_not_full_is_a_note(trace: str, dealing: list[str]) -> None:
    words = ["plan", trace, *dealing, "--planner", "static"]
    noted = "note: node 1 has only 1 rank of 3; a --ranks-per-node that divides 4 makes nodes equal"
    assert noted in good([*words, "--ranks-per-node", "3"]).stdout.splitlines()
    assert "has only" not in good(words).stdout
