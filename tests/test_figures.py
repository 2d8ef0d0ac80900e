"""Figures of README and docs are those of the result files that the same paragraph, list or table links to."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULT = re.compile(r"\]\((?:\.\./)?(bench/results/[^)]+)\)")
NUMBER = r"(?<![\w.,/^])\d[\d,]*(?:\.\d+)?(?![\d.]*\w)"
UNIT = r" ?(?:%|ms|us|s|x|MB|GB|GB/s|times)(?![\w/])"
# Numbers before one unit, such as "1.2, 1.9 and 3 %", and any number with a fraction.
FIGURE = re.compile(rf"(?:{NUMBER}(?:,| to| and| or|, and) )*{NUMBER}{UNIT}|(?<![\w.])\d[\d,]*\.\d+(?![\d.]*\w)")
# Figures beside a link that are from elsewhere: a preset; a number that the file has in other units.
OTHERS = {"gpu.md": {"0.05", "0.16", "17.5"}}


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Paragraphs, lists and tables without code, and their result files; lists and tables share those of the text above."""
    files: list[str] = []
    for block in re.split(r"\n\s*\n", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL)):
        linked = RESULT.findall(block)
        files = linked or (files if re.match(r"\||\* |\d\. ", block) else [])
        yield re.sub(r"\]\([^)]*\)", "]", block), files


def figures(block: str) -> Iterator[str]:
    """Numbers that somebody measured or simulated, as they are printed."""
    for found in FIGURE.finditer(block):
        yield from re.findall(r"\d[\d,]*(?:\.\d+)?", found[0])


def is_in(figure: str, values: list[float]) -> bool:
    """Whether one of the values rounds to it: as it is, or as what it is above or below 1, in percent."""
    printed, digits = float(figure.replace(",", "")), len(figure.partition(".")[2])
    forms = (lambda x: x, lambda x: 100 * x, lambda x: 100 * (x - 1))
    return any(abs(abs(form(value)) - printed) <= 0.501 * 10**-digits for value in values for form in forms)


def missing(text: str) -> Iterator[str]:
    """Figures that no linked file has."""
    for block, files in blocks(text):
        if files:
            source = "\n".join((ROOT / name).read_text() for name in files)
            values = [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", source)]
            yield from (figure for figure in figures(block) if not is_in(figure, values))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_figures_are_those_of_the_linked_files(page: Path) -> None:
    assert set(missing(page.read_text())) <= OTHERS.get(page.name, set())


def test_a_changed_figure_is_found() -> None:
    text = (ROOT / "docs" / "running-a-plan.md").read_text()
    assert "0.995" in text and not list(missing("No file: 12.3 %."))
    assert "0.9931" in set(missing(text.replace("0.995", "0.9931")))


def test_the_readme_says_in_prose_what_a_slot_takes_in_its_example() -> None:
    text = (ROOT / "README.md").read_text()
    size = re.search(r"; ([\d.]+) GB per slot\)", text)
    assert size and f"slot for copies of Qwen3-30B-A3B takes {1e3 * float(size[1]):.0f} MB" in text
