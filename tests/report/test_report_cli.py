"""``foremoe report``: a page from a trace, a workload file, a plan file or nothing; one sentence where it cannot."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from report_case import arrays_of, facts_of

import foremoe
from foremoe.advice.changes import REDEALT
from foremoe.cli.main import main
from foremoe.plan.plan import Plan

QUICK = ["--planners", "static,foremoe"]
CASE = [
    "--synthetic", "gpt-oss-20b", "--ranks", "4", "--tokens-per-rank", "256", "--micro-steps", "2", "--layers", "0:3",
    "--redundant", "1",
]  # fmt: skip


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


def good(*arguments: str) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, (result.stderr, result.exception)
    return result


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> tuple[str, str]:
    """A plan file and the counts it was made from."""
    folder = tmp_path_factory.mktemp("planned")
    plan, work = str(folder / "plan.safetensors"), str(folder / "work.safetensors")
    result = CliRunner().invoke(main, ["plan", *CASE, "--redundant", "2", "-o", plan, "--save-workload", work])
    assert result.exit_code == 0, result.stderr
    return plan, work


def test_it_plans_simulates_and_writes(tmp_path):
    out = tmp_path / "r.html"
    result = good(*CASE, "-o", str(out))
    assert "MB)" in result.stdout and "skew:" in result.stdout
    facts = facts_of(out.read_text())
    assert (facts["M"], facts["L"], facts["G"]) == (2, 3, 4) and "synthetic gpt-oss-20b" in facts["source"]
    assert facts["simulated"] is not None and facts["planning"] is not None
    told = CliRunner().invoke(main, ["advise", *CASE, "--json", str(tmp_path / "advice.json")])
    found = json.loads((tmp_path / "advice.json").read_text())
    assert told.exit_code == 0 and facts["changes"] == [row for row in found["changes"] if row["cost"] not in REDEALT]
    names = [row["name"] for row in facts["strategies"]["rows"]]
    assert names[0] == "static" and {"foremoe", "force-balanced"} <= set(names) and "exact" not in names


def test_no_table_where_none_is_wanted(tmp_path):
    out = tmp_path / "r.html"
    good(*CASE, "--planners", "none", "-o", str(out))
    assert facts_of(out.read_text())["strategies"] is None


def test_a_plan_file_brings_its_machine_and_slots(planned, tmp_path):
    plan, work = planned
    for arguments in ([work], CASE):
        out = tmp_path / "r.html"
        good(*arguments, "--plan", plan, *QUICK, "-o", str(out))
        facts = facts_of(out.read_text())
        assert facts["R"] == 2 and facts["planning"] is None and facts["simulated"] is not None


def test_the_same_case_gives_the_same_page(planned, tmp_path):
    plan, work = planned
    out, pages = tmp_path / "r.html", []
    for _ in range(2):
        good(work, "--plan", plan, "--planners", "none", "-o", str(out))
        pages.append(out.read_text())
    assert pages[0] == pages[1]
    facts = facts_of(pages[0])
    assert facts["command"].startswith("foremoe report ") and f"--plan {plan}" in facts["command"] and facts["date"]
    assert facts["source"].endswith("seed 0")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to plan"),
        ([*CASE, "--planners", "none,static"], "no strategy 'none'"),
        ([*CASE, "--planners", "nobody"], "no strategy 'nobody'"),
        ([*CASE, "--planner", "nobody"], "no strategy 'nobody'"),
        ([*CASE, "--plan", "missing.safetensors"], "missing.safetensors"),
        (["missing.npz"], "missing.npz"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, tmp_path):
    result = run(*arguments, *([] if "--planners" in arguments else ["--planners", "none"]), "-o", str(tmp_path / "r.html"))
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("planning: ", "warning: "))]
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]
    assert not (tmp_path / "r.html").exists()


def test_a_plan_of_another_case_is_refused(planned, tmp_path):
    plan, work = planned
    other = [word if word != "256" else "300" for word in CASE]
    result = run(*other, "--plan", plan, *QUICK, "-o", str(tmp_path / "r.html"))
    assert result.exit_code == 2 and "load differs" in result.stderr
    result = run(*CASE[:-4], "--plan", plan, *QUICK, "-o", str(tmp_path / "r.html"))
    assert result.exit_code == 2 and "give the options that it was planned with" in result.stderr
    result = run(work, "--plan", plan, "--micro-steps", "1", *QUICK, "-o", work)
    assert result.exit_code == 2 and "overwrite" in result.stderr


def test_where_it_cannot_write_it_says_so_first(tmp_path):
    result = run(*CASE, "-o", str(tmp_path / "none" / "r.html"))
    assert result.exit_code == 2 and "no directory" in result.stderr and "planning" not in result.stderr
    assert not list(Path(tmp_path).iterdir())


def one_line(result: Result, words: str) -> None:
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert len(lines) == 1 and words in lines[0] and "planning" not in result.stderr


def with_planner_text(plan_file: str, text: str, folder: Path) -> str:
    plan = Plan.load(plan_file)
    path = str(folder / "told.safetensors")
    dataclasses.replace(plan, header=dataclasses.replace(plan.header, planner=text)).save(path)
    return path


@pytest.mark.parametrize("text", ["told_bomb:SOLVER", "Planner(rank=3)"])  # tests/planner/test_strategies.py has more texts
def test_a_plan_file_names_no_code_to_run(planned, tmp_path, monkeypatch, text):
    plan, work = planned
    (tmp_path / "told_bomb.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom foremoe.solvers import Quota as SOLVER\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    told = with_planner_text(plan, text, tmp_path)
    good(work, "--plan", told, "--planners", "none", "-o", "r.html")
    assert not (tmp_path / "ran").exists()


def test_moved_homes_have_their_price_and_static_keeps_its_homes(tmp_path):
    nodes = ["--objective", "balance", "--ranks-per-node", "2"]
    quick = [*CASE, *nodes, "--planners", "static"]
    home = ["--planner", "Planner(home=Anneal(move_price=0.0))"]
    plan = str(tmp_path / "plan.safetensors")
    good(*quick, "-o", str(tmp_path / "kept.html"))
    result = good(*quick, *home, "-o", str(tmp_path / "moved.html"))
    made = CliRunner().invoke(main, ["plan", *CASE, *nodes, *home, "-o", plan])
    assert made.exit_code == 0, made.stderr
    good(*quick, "--plan", plan, "-o", str(tmp_path / "file.html"))
    kept, moved, file = (facts_of((tmp_path / f"{name}.html").read_text()) for name in ("kept", "moved", "file"))
    assert kept["moves"] is None and moved["moves"] == file["moves"] and "homes: moved" in result.stdout
    assert moved["moves"]["experts"] > 0 and moved["moves"]["seconds"] > 0
    for facts in (moved, file):
        assert facts["headline"]["before"] == kept["headline"]["before"]
        assert facts["headline"]["static_s"] == kept["headline"]["static_s"]
        assert facts["simulated"]["gains"]["static_s"] == kept["simulated"]["gains"]["static_s"]
        assert facts["simulated"]["parts"]["planned"]["moves_s"] == facts["moves"]["seconds"]
    arrays = arrays_of((tmp_path / "moved.html").read_text())
    assert (arrays["posed_rank_LE"] != arrays["home_rank_LE"]).sum() == moved["moves"]["experts"]


def test_a_plan_that_breaks_its_laws_is_refused(planned, tmp_path):
    plan, work = planned
    good_plan = Plan.load(plan)
    quota_MLGS = good_plan.quota_MLGS.copy()
    quota_MLGS[0, 0, 0, 0] += 1
    broken = str(tmp_path / "broken.safetensors")
    dataclasses.replace(good_plan, quota_MLGS=quota_MLGS).save(broken)
    one_line(run(work, "--plan", broken, "-o", str(tmp_path / "r.html")), "`foremoe check` says more")


def test_counts_are_cut_to_what_was_planned(planned, tmp_path):
    _, work = planned
    plan, out = str(tmp_path / "part.safetensors"), tmp_path / "r.html"
    made = CliRunner().invoke(main, ["plan", work, "--layers", "1:3", "--micro-steps", "1", "-o", plan])
    assert made.exit_code == 0, made.stderr
    good(work, "--plan", plan, *QUICK, "-o", str(out))
    facts = facts_of(out.read_text())
    assert (facts["M"], facts["L"]) == (1, 2)


def test_history_goes_with_a_plan_file(planned, tmp_path):
    plan, work = planned
    good(work, "--plan", plan, "--history", work, "--planners", "eplb-history", "-o", str(tmp_path / "a"))
    good(work, "--plan", plan, "--planners", "eplb-history", "-o", str(tmp_path / "b"))
    with_history, without = (facts_of((tmp_path / name).read_text())["strategies"] for name in "ab")
    assert with_history != without


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--planners", "nosuch"], "no strategy 'nosuch'"),
        (["-o", "-"], "not to stdout"),
    ],
)
def test_it_is_refused_before_planning(planned, arguments, words, tmp_path, monkeypatch):
    plan, work = planned
    monkeypatch.chdir(tmp_path)
    for case in (CASE, [work, "--plan", plan]):
        one_line(run(*case, "-o", "r.html", *arguments), words)
    assert not list(tmp_path.iterdir())


def test_a_trace_and_synthetic_exclude_each_other_with_a_plan_too(planned, tmp_path):
    plan, work = planned
    one_line(run(work, *CASE, "--plan", plan, "-o", str(tmp_path / "r.html")), "exclude each other")
    one_line(run(work, "--regime", "mid", "--plan", plan, "-o", str(tmp_path / "r.html")), "--regime")


def test_the_plan_has_its_colour_if_sequences_are_shuffled(tmp_path):
    trace, out = str(tmp_path / "trace.npz"), tmp_path / "r.html"
    foremoe.synthetic_trace("gpt-oss-20b", num_sequences=8, num_layers=1).save(trace)
    case = [trace, "--ranks", "4", "--tokens-per-rank", "256", "--redundant", "1", "--shuffle", *QUICK]
    good(*case, "-o", str(out))
    facts = facts_of(out.read_text())
    assert facts["planner"] == "foremoe, sequences shuffled"
    assert facts["planner"].split(", ")[0] in [row["name"] for row in facts["strategies"]["rows"]]


def test_a_plan_file_says_that_it_has_no_options_of_the_trainer(planned, tmp_path):
    plan, work = planned
    words = [work, "--plan", plan, "--planners", "none", "-o", str(tmp_path / "r.html")]
    said = "note: a plan file holds no options of the trainer"
    assert said in good(*words).stdout and said not in good(*words, "--optimizer-bytes", "0").stdout
