"""The README's example prints exactly what the README shows, and the solver recipe works."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from page_blocks import blocks_of, run_blocks, run_pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = blocks_of("README.md")
RECIPE = [text for kind, text in blocks_of("docs/add-a-solver.md") if kind == "python"]


def test_the_example_prints_what_the_readme_shows():
    example = BLOCKS[:2]
    assert [kind for kind, _ in example] == ["python", "text"]
    run_blocks(example, lambda line: None)


@pytest.mark.heavy
def test_the_solver_recipe_passes_its_conformance_suite(tmp_path):
    """What a reader would do: put the solver and its three-line test into files and run pytest on them."""
    (tmp_path / "recipe.py").write_text(RECIPE[0])
    (tmp_path / "test_recipe.py").write_text("from recipe import HalveHottest\n" + RECIPE[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    run_pytest(tmp_path, env)
    case = [
        "--synthetic", "gpt-oss-20b", "--ranks", "8", "--tokens-per-rank", "256", "--micro-steps", "1", "--objective",
        "balance", "--ranks-per-node", "4", "--redundant", "1",
    ]  # fmt: skip
    both = "Planner(rank=(recipe:HalveHottest(), Search(effort=100)))"
    solvers = ["--planners", f"static,recipe:HalveHottest(min_pairs=2),Search(effort=100),{both}", "--json"]
    run = subprocess.run([sys.executable, "-m", "foremoe", "compare", *case, *solvers], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    static, mine, inside, composed = (line["skew_mean"] for line in json.loads(run.stdout)["rows"])
    assert composed <= inside < mine < static


def test_the_results_are_those_of_a_committed_run():
    results = [path.read_text() for path in sorted((ROOT / "bench" / "results").glob("*.md"))]
    shown = re.findall(r"(?:^\|.*\n)+", README.split("## What it gives\n")[1].split("\n## ")[0], re.MULTILINE)
    page = re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / "results.md").read_text(), re.MULTILINE)
    assert len(shown) == 1 and page
    for table in shown + page:
        assert any(table in result for result in results), table


def test_what_it_says_of_gpus_is_in_their_newest_results():
    """The column of one GPU: its devices have result files, and in the newest every named backend was right in every row."""
    names, *rows = [line.split("|")[1:-1] for line in README.splitlines() if line.count("|") == 5 and "---" not in line][:5]
    for device in re.findall(r"[A-Z]\d+", names[2]):
        assert sorted((ROOT / "bench/results").glob(f"gpu-right_{device.lower()}_*.md")), device
    result = max((ROOT / "bench/results").glob("gpu-right_*.md"), key=lambda path: path.stem.split("_")[-1]).read_text()
    for backend in re.findall(r"`(\w+)`", rows[-1][0]):
        last = [line.split("|")[-2].strip() for line in result.splitlines() if line.startswith(f"| {backend} |")]
        assert last and set(last) == {"right"}, backend
    for part in ("A layer in bf16 against float64", "Megatron-Core with two ranks on one GPU"):
        assert part in result
    assert "wrong" not in result
