"""``foremoe ablate``: lines of one plan are one line, limits leave a sentence, seeds have spreads, and what varies is named."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest
from cli_runs import bad, good

from foremoe.cli.ablated import lines_of
from foremoe.cli.tables import Look, render
from foremoe.planner.planner import Planner

CASE = ["--synthetic", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "64", "--layers", "0:2", "--micro-steps", "2"]


def rows_of(words: list[str]) -> list[dict[str, Any]]:
    return json.loads(good([*words, "--json"]).stdout)["rows"]  # type: ignore[no-any-return]


def lines(text: str) -> list[str]:
    """The table's lines, without the heading."""
    return text.split("\n\n")[1].splitlines()[1:-1]


def figures(line: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\d+\.\d+", line))


def test_a_level_has_a_line_with_its_difference_or_the_word_that_there_is_none(trace: str, dealing: list[str]) -> None:
    words = ["ablate", trace, *dealing[:-2], "--redundant", "0,1,2", "--foresight", "exact,previous", "--objective", "balance"]
    rows = rows_of(words)
    text = good(words).stdout
    table = lines(text)
    assert len(rows) == 3 * 2 * 5 and len(table) < len(rows)
    # R = 0 is static placement, whatever is foreseen.
    assert re.search(r"^all +0  exact, previous .* 1\.000", table[0]) and re.search(r"^without \S+ +0  .* = all$", table[1])
    assert "previous: micro-step 0 has no history and is static" in text


def row(levels: str, slots: int, view: str, plan: str | None, **figures: Any) -> dict[str, Any]:
    base = {"planner": "p", "ranks_per_node": 8, "seed": 0, "n_solved": 4, "fits": True, "bytes_by_link": {}}
    numbers = {"skew_mean": 1.0, "simulated_stage_s": 0.01, "speedup_vs_static": 1.0}
    return base | numbers | {"levels": levels, "redundant": slots, "foresight": view, "plan": plan} | figures


def test_cases_with_the_same_plans_share_their_lines() -> None:
    rows = [row(name, slots, view, plan, speedup_vs_static=gain) for name, slots, view, plan, gain in (
        ("all", 0, "exact", "a", 1.0), ("without x", 0, "exact", "a", 1.0), ("all", 0, "step", "a", 1.0),
        ("without x", 0, "step", "a", 1.0), ("all", 1, "exact", "b", 1.5), ("without x", 1, "exact", "a", 1.2),
    )]  # fmt: skip
    table, _ = lines_of(rows, {"p": Planner()})
    named = [tuple(line.get(key) for key in ("levels", "redundant", "foresight", "difference")) for line in table.lines]
    assert named == [
        ("all", "0", "exact, step", None), ("without x", "0", "exact, step", "= all"), ("all", "1", "exact", None),
        ("without x", "1", "exact", "-20.0%"),
    ]  # fmt: skip
    assert ["skew_mean" in line for line in table.lines] == [True, False, True, True]


def test_a_line_that_a_limit_left_without_figures_is_a_sentence(trace: str, dealing: list[str]) -> None:
    pytest.importorskip("pyscipopt", reason="Exact needs pyscipopt; foremoe[exact] installs it")
    words = [
        "ablate", trace, *dealing[:-2], "--objective", "balance", "--planners", "exact", "--redundant", "1", "--foresight",
        "exact",
    ]  # fmt: skip
    text = good([*words, "--exact-seconds", "0.000001"]).stdout
    table = lines(text)
    assert table and all(figures(line) for line in table if line.startswith("without Exact()"))
    assert not any(re.search(r" - +-", line) for line in table)
    assert re.search(r"all \(R = 1, exact\).*: left out: none of \d+ sampled rows was proven optimal within 1e-06 s", text)
    sampled = good([*words, "--objective", "balance", "--exact-seconds", "5"]).stdout
    assert re.search(r"^all \(\d+ rows?\)", sampled, re.MULTILINE)


def test_seeds_have_means_and_spreads() -> None:
    words = ["ablate", *CASE, "--redundant", "1", "--foresight", "exact"]
    rows = [one for one in rows_of([*words, "--seed", "0,1,2"]) if one["levels"] == "all"]
    assert [one["seed"] for one in rows] == [0, 1, 2] and len({one["skew_mean"] for one in rows}) == 3
    alone = next(one for one in rows_of([*words, "--seed", "2"]) if one["levels"] == "all")
    assert alone["skew_mean"] == rows[2]["skew_mean"]
    gains = [one["speedup_vs_static"] for one in rows]
    text = good([*words, "--seed", "0,1,2"]).stdout
    assert f"{statistics.fmean(gains):.3f} ± {statistics.stdev(gains):.3f}" in text and "seeds 0, 1, 2: means" in text


def test_planners_and_nodes_vary(trace: str, dealing: list[str]) -> None:
    words = [
        "ablate", *CASE, "--redundant", "1", "--foresight", "exact", "--planners", "quota,foremoe", "--ranks-per-node", "2,8",
    ]  # fmt: skip
    rows = rows_of(words)
    assert {(one["planner"], one["ranks_per_node"]) for one in rows} == {(p, n) for p in ("quota", "foremoe") for n in (2, 8)}
    text = good(words).stdout
    assert text.split("\n\n")[1].split()[:2] == ["planner", "node"] and "planner: Planner(" in text
    moving = good(["ablate", *CASE, "--redundant", "1", "--foresight", "exact", "--planners", "eplb-exact"]).stdout
    assert "speed-up" in moving.split("\n\n")[1]  # moves of weights are in the stage


def test_a_pack_level_is_left_out_too(trace: str, dealing: list[str]) -> None:
    words = [
        "ablate", trace, *dealing[:-2], "--redundant", "1", "--foresight", "exact", "--planners",
        "Planner(pack=ExpertAware())",
    ]  # fmt: skip
    assert {one["levels"] for one in rows_of(words)} > {"all", "without ExpertAware()"}


def test_what_cannot_be_asked_is_one_sentence(trace: str, dealing: list[str]) -> None:
    words = ["ablate", trace, *dealing]
    assert "give --seed one number" in bad([*words, "--seed", "0,1"])
    assert "--ranks-per-node" in bad([*words, "--ranks-per-node", "0"]) and "--seed" in bad([*words, "--seed", "x"])


def test_a_row_without_a_digest_is_a_line_of_its_own() -> None:
    table, _ = lines_of([row("all", 1, "exact", None), row("without x", 1, "exact", None)], {"p": Planner()})
    assert [line["levels"] for line in table.lines] == ["all (4 rows)", "without x (4 rows)"]
    assert "all (4 rows)" in render(table, Look())[1][0]
