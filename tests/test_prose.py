"""What people read keeps the rules of `tests.prose`; each rule finds what was planted."""

from __future__ import annotations

import pytest

from tests.prose import MOST_WORDS, faults, paragraphs, texts


def test_what_people_read_keeps_the_rules():
    found = [f"{place}: {fault}" for place, text in texts() for fault in faults(text)]
    assert not found, "\n".join(found)


def test_pages_help_and_the_report_are_read():
    places = {place for place, _ in texts()}
    assert {"README.md", "docs/verl.md", "foremoe plan --help", "foremoe simulate --foresight", "page.html"} <= places


@pytest.mark.parametrize(
    "text",
    [
        "One two. " + " ".join(["word"] * (MOST_WORDS + 1)) + ".",
        "The rank stands still for it.",
        "A hint is no plan.",
        "Figures stand beside it.",
    ],
)
def test_a_planted_fault_is_found(text: str):
    assert len(list(faults(text))) == 1


@pytest.mark.parametrize(
    "text",
    [" ".join(["word"] * MOST_WORDS) + "; " + " ".join(["word"] * MOST_WORDS), "There is no plan.", "It is no longer there."],
)
def test_what_is_right_is_left_alone(text: str):
    assert not list(faults(text))


def test_code_and_tables_are_no_prose():
    page = "# beside\n\nOne `anew` [word](beside.md).\n\n| anew |\n\n    beside\n\n```text\nanew\n```\n\n* item\n  goes on\n"
    assert list(paragraphs(page)) == ["One Code word.", "item goes on"]
