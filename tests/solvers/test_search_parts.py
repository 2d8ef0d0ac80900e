"""Parts of the search: each has a line in the newest committed ablation that says what it is worth."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import foremoe
from foremoe.solvers import Search
from foremoe.solvers.search.parts import PARTS, without

ROOT = Path(__file__).resolve().parents[2]
TABLE = max((ROOT / "bench" / "results").glob("ablation-parts_*.md"), key=lambda path: path.stem.split("_")[-1])
# A part stays that makes stages shorter by this share on average, or a stage by this, under either dispatch.
LEAST_MEAN, LEAST_WORST = 1.002, 1.01


def lines() -> dict[str, list[float]]:
    """The figures of every part: mean and worst under pairs dispatch, under node dispatch, and planning."""
    rows = re.findall(r"^\| (.+?) \| (\d[^|]*(?:\| \d[^|]*)+)\|$", TABLE.read_text(), re.MULTILINE)
    return {name: [float(cell) for cell in cells.split("|")] for name, cells in rows}


def test_every_part_has_a_line_and_every_line_a_part() -> None:
    assert tuple(lines()) == PARTS


def test_the_table_says_which_commit_it_is_of_and_the_page_has_its_figures() -> None:
    text, page = TABLE.read_text(), (ROOT / "docs" / "planner.md").read_text()
    commit = re.search(r"commit ([0-9a-f]{7,}\+?)\.", text)
    assert commit and TABLE.stem in page and commit[1] in page
    for line in re.findall(r"^\| .*\d \|$", text, re.MULTILINE):
        assert line in page, line


@pytest.mark.parametrize("part", PARTS)
def test_a_part_stays_only_where_it_shortens_stages(part: str) -> None:
    pairs_mean, pairs_worst, node_mean, node_worst, _ = lines()[part]
    assert max(pairs_mean, node_mean) >= LEAST_MEAN or max(pairs_worst, node_worst) >= LEAST_WORST


@pytest.mark.parametrize("part", PARTS)
def test_a_search_without_a_part_keeps_the_laws(part: str) -> None:
    work = foremoe.synthetic_workload(
        "gpt-oss-20b", num_ranks=16, tokens_per_rank=512, micro_steps=1, num_layers=2, seed=1, regime="mid"
    )
    problem = foremoe.Problem.of(work, foremoe.Cluster.preset("8xh100", 16), redundant=1)
    planner = foremoe.Planner(rank=(Search(effort=50, without=(part,)),), guard=False)
    plan, _ = planner.plan(problem)
    plan.check(problem)
    home_s = foremoe.price(problem, problem.static()).total_s
    assert (plan.cost_ML.total_s.ravel() <= home_s * (1 + 1e-12)).all()


def test_what_is_no_part_is_refused() -> None:
    with pytest.raises(foremoe.InputError, match="no part 'luck'; its parts are nearest"):
        Search(without=("luck",))
    assert without(()) == (1 << len(PARTS)) - 1
    assert np.binary_repr(without(PARTS)) == "0"
