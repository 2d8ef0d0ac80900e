"""Every private name of veRL that foremoe relies on is there, or the test says which one is gone."""

import needs_verl  # noqa: F401, I001 (skips where veRL is missing, so it comes first)

import compatibility
import pytest


@pytest.mark.parametrize("row", compatibility.listed("verl"), ids=lambda row: f"{row[0]}:{row[1]}")
def test_the_name_is_there(row):
    assert not compatibility.fault_of(*row)


def test_the_page_lists_every_import():
    assert len(compatibility.listed("verl")) > 20 and not compatibility.unlisted("verl")
