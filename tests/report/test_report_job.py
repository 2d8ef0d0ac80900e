"""A page of several EP groups and pipeline ranks: the slowest part first, each part's own figures, one verdict on the job."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from browser import WHY_NOT, Browser, chromium
from click.testing import CliRunner, Result
from report_case import arrays_of, facts_of

import foremoe
from foremoe.cli.main import main
from foremoe.report import plan_job
from foremoe.report.job import job_facts, job_gains, slowest_part
from foremoe.simulate import System, ep_groups, simulate_systems
from foremoe.solvers import Anneal

CASE = ["--synthetic", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "256", "--layers", "0:5"]
JOB = [*CASE, "--gpus", "16", "--ranks", "4", "--pp", "2", "--planners", "static,foremoe"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["report", *arguments])


@pytest.fixture(scope="module")
def job_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("job") / "job.html"
    result = run(*JOB, "-o", str(path))
    assert result.exit_code == 0, (result.stderr, result.exception)
    assert "Slowest of 4 parts: EP group " in " ".join(result.stdout.split())
    return path


def job_of(text: str) -> dict[str, Any]:
    return json.loads(re.search(r'id="job-facts">(.*?)</script>', text, re.DOTALL)[1])


def block_of(text: str, number: int) -> str:
    """One block of the page, under the names of the first."""
    name = f"-{number}" if number else ""
    parts = (
        re.search(rf'<script type="[a-z/]+" (id="{kind}){name}(">.*?</script>)', text, re.DOTALL) for kind in ("facts", "packed")
    )
    kinds = ("application/json", "text/plain")
    return "".join(f'<script type="{kind}" {part[1]}{part[2]}' for kind, part in zip(kinds, parts, strict=True))


@pytest.fixture(scope="module")
def groups() -> list[foremoe.Problem]:
    work = foremoe.synthetic_workload("gpt-oss-20b", num_ranks=8, tokens_per_rank=256, micro_steps=4, num_layers=5, regime="mid")
    cluster = foremoe.Cluster.preset("8xh100", num_ranks=4)
    return [foremoe.Problem.of(group, cluster, redundant=1) for group in ep_groups(work, 4)]


def test_the_job_gains_what_the_table_of_systems_says(groups):
    parts = plan_job(groups, foremoe.Planner(), pp=2)
    assert [(part.group, part.pipeline_rank) for part in parts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    systems = {"static": System(planner=foremoe.STRATEGIES["static"]), "foremoe": System(), "even": System(even=True)}
    rows = {row["solver"]: row for row in simulate_systems(groups, systems, pp=2)}
    gains = job_gains(parts)
    assert gains["static_s"] == pytest.approx(rows["static"]["simulated_stage_s"])
    assert gains["planned_s"] == pytest.approx(rows["foremoe"]["simulated_stage_s"])
    assert gains["share_of_balanced"] == pytest.approx(rows["foremoe"]["share_of_balanced"])
    slowest = parts[slowest_part(parts)]
    assert slowest.runs.gains()["planned_s"] == pytest.approx(gains["planned_s"])
    assert slowest.runs.planned.parts.bubble_s == pytest.approx(rows["foremoe"]["bubble_s"])
    assert [line["layers"] for line in job_facts(parts)["parts"]] == ["0 to 2", "3 to 4"] * 2


def test_chunks_of_a_pipeline_rank_are_named(groups):
    lines = job_facts(plan_job(groups[:1], foremoe.Planner(), pp=2, vpp=2))["parts"]
    assert [line["layers"] for line in lines] == ["0 to 1, 3", "2, 4"]


def test_homes_of_a_job_stay(groups):
    with pytest.raises(foremoe.InputError, match="leave the home level out"):
        plan_job(groups, foremoe.Planner(home=Anneal()))


def test_every_part_has_its_own_figures(job_page):
    text = job_page.read_text()
    job, blocks = job_of(text), [block_of(text, i) for i in range(4)]
    facts = [facts_of(block) for block in blocks]
    assert [one["moe_layer_L"] for one in facts] == [[0, 1, 2], [3, 4]] * 2
    assert len({json.dumps(one["verdict"]) for one in facts}) == 1
    loads = [arrays_of(block)["load_MLE"] for block in blocks]
    assert loads[0].shape == loads[2].shape == (4, 3, 32) and (loads[0] != loads[2]).any()
    for line, one in zip(job["parts"], facts, strict=True):
        assert line["skew_planned"] == pytest.approx(one["headline"]["after"]["mean"])
        assert sum(line["planned"].values()) == pytest.approx(one["simulated"]["gains"]["planned_s"])
    assert facts[0]["planner"] == "foremoe"


def test_one_plan_alone_has_no_parts(page):
    assert job_of(page.read_text()) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "3"], "give --ranks one of"),
        (["--pp", "6"], "PP6 with VPP1 needs 6 layers"),
        (["--pp", "2", "--schedule", "forward"], "leave --schedule out"),
        (["--pp", "2", "--plan", "plan.safetensors"], "leave out --plan"),
        (["--gpus", "8", "--ranks", "4", "--planner", "Planner(home=Anneal())"], "home level out"),
    ],
)
def test_what_a_job_cannot_have_is_one_sentence(arguments, words, tmp_path):
    result = run(*CASE, "--planners", "none", *arguments, "-o", str(tmp_path / "r.html"))
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exit_code == 2 and len(lines) == 1 and words in lines[0]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(chromium() is None, reason=WHY_NOT)
def test_the_reader_chooses_among_the_parts(job_page):
    try:
        browser = Browser()
    except (RuntimeError, BrokenPipeError) as error:
        pytest.skip(f"{chromium()} does not start here ({error}): the report is not looked at in a browser")
    try:
        browser.open(job_page)
        job = job_of(job_page.read_text())
        assert browser.js("shownPart") == job["slowest"] and browser.complaints() == []
        assert browser.js("document.querySelectorAll('#job-table tbody tr').length") == 4
        other = (job["slowest"] + 1) % 4
        choose = f"choice.value = '{other}'; choice.dispatchEvent(new Event('change'));"
        browser.reload_by(f"const choice = document.getElementById('choose-part'); {choose}")
        assert browser.js("shownPart") == other
        assert browser.js("facts.moe_layer_L") == facts_of(block_of(job_page.read_text(), other))["moe_layer_L"]
        browser.js("choose(1)")
        assert browser.js("location.hash") == f"#part={other}&row=0,1"
        assert f"pipeline rank {other % 2}" in browser.js("document.getElementById('title').textContent")
        assert browser.complaints() == []
    finally:
        browser.close()
