"""``foremoe report``: a page from a trace, a workload file, a plan file or nothing; one sentence where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from report_case import facts_of

from foremoe.cli.main import main

QUICK = ["--what-if", "none", "--solvers", "static,hierarchical"]
CASE = ["--synthetic", "gpt-oss-20b", "--ranks", "4", "--tokens-per-rank", "256", "--micro-steps", "2", "--layers", "0:3"]


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
    result = good(*CASE, "--what-if", "0,2", "-o", str(out))
    assert "MB)" in result.stdout and "skew:" in result.stdout
    facts = facts_of(out.read_text())
    assert (facts["M"], facts["L"], facts["G"]) == (2, 3, 4) and "synthetic gpt-oss-20b" in facts["source"]
    assert facts["timeline"]["kind"] == "simulated" and facts["planning"] is not None
    assert [row["redundant"] for row in facts["what_if"]] == [0, 2] and facts["what_if"][0]["simulated_stage_s"] > 0
    names = [row["name"] for row in facts["strategies"]["rows"]]
    assert names[0] == "static" and {"hierarchical", "force-balanced"} <= set(names) and "exact" not in names


def test_without_simulation(tmp_path):
    out = tmp_path / "r.html"
    good(*CASE, *QUICK, "--no-simulate", "-o", str(out))
    facts = facts_of(out.read_text())
    assert facts["timeline"] is None and facts["what_if"] is None
    assert [row["name"] for row in facts["strategies"]["rows"]] == ["static", "hierarchical"]
    assert "simulated" not in [column["heading"] for column in facts["strategies"]["columns"]]


def test_no_table_where_none_is_wanted(tmp_path):
    out = tmp_path / "r.html"
    good(*CASE, "--what-if", "none", "--solvers", "none", "--no-simulate", "-o", str(out))
    assert facts_of(out.read_text())["strategies"] is None


def test_a_plan_file_brings_its_machine_and_slots(planned, tmp_path):
    plan, work = planned
    for arguments in ([work], CASE):
        out = tmp_path / "r.html"
        good(*arguments, "--plan", plan, *QUICK, "-o", str(out))
        facts = facts_of(out.read_text())
        assert facts["R"] == 2 and facts["planning"] is None and facts["timeline"]["kind"] == "simulated"


def test_the_same_case_gives_the_same_page(planned, tmp_path):
    plan, work = planned
    for name in "ab":
        good(work, "--plan", plan, "--what-if", "1", "--solvers", "none", "-o", str(tmp_path / name))
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to plan"),
        ([*CASE, "--what-if", "1,x"], "whole numbers"),
        ([*CASE, "--what-if", "99"], "redundant slots per rank"),
        ([*CASE, "--solvers", "none,static"], "no strategy 'none'"),
        ([*CASE, "--solvers", "nobody"], "no strategy 'nobody'"),
        ([*CASE, "--planner", "nobody"], "no strategy 'nobody'"),
        ([*CASE, "--plan", "missing.safetensors"], "missing.safetensors"),
        (["missing.npz"], "missing.npz"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words, tmp_path):
    result = run(*arguments, *([] if "--solvers" in arguments else ["--solvers", "none"]), "-o", str(tmp_path / "r.html"))
    lines = [line for line in result.stderr.splitlines() if not line.startswith(("planning: ", "warning: "))]
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.exception
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]
    assert not (tmp_path / "r.html").exists()


def test_a_plan_of_another_case_is_refused(planned, tmp_path):
    plan, work = planned
    other = [word if word != "256" else "300" for word in CASE]
    result = run(*other, "--plan", plan, *QUICK, "-o", str(tmp_path / "r.html"))
    assert result.exit_code == 2 and "load differs" in result.stderr
    result = run(*CASE[:-2], "--plan", plan, *QUICK, "-o", str(tmp_path / "r.html"))
    assert result.exit_code == 2 and "give the options that it was planned with" in result.stderr
    result = run(work, "--plan", plan, "--micro-steps", "1", *QUICK, "-o", work)
    assert result.exit_code == 2 and "overwrite" in result.stderr


def test_where_it_cannot_write_it_says_so_first(tmp_path):
    result = run(*CASE, "-o", str(tmp_path / "none" / "r.html"))
    assert result.exit_code == 2 and "no directory" in result.stderr and "planning" not in result.stderr
    assert not list(Path(tmp_path).iterdir())
