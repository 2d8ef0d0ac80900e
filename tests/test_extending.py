"""docs/extending.md: its blocks print what the page shows, and its solvers pass the suites that it names."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_blocks import blocks_of, is_suite, run_blocks, run_suites

BLOCKS = blocks_of("docs/extending.md")


def test_the_page_prints_what_it_shows() -> None:
    assert {kind for kind, _ in BLOCKS} == {"python", "text"} and sum(is_suite(text) for _, text in BLOCKS) == 1
    run_blocks(BLOCKS, lambda line: None)


@pytest.mark.heavy
def test_its_solvers_keep_their_laws(tmp_path: Path) -> None:
    run_suites(BLOCKS, tmp_path, r"import dataclasses|from foremoe.(levels|plan)")
