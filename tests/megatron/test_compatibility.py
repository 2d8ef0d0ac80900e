"""Every private name of Megatron-Core that foremoe relies on is there, or the test says which one is gone."""

import types

import compatibility
import pytest
import ran


@pytest.mark.parametrize("row", compatibility.listed("megatron", "torch"), ids=lambda row: f"{row[0]}:{row[1]}")
def test_the_name_is_there(row):
    assert not compatibility.fault_of(*row)


def test_the_page_lists_every_import():
    assert len(compatibility.listed("megatron")) > 60 and not compatibility.unlisted("megatron")


def test_a_name_that_is_gone_is_named():
    module = "megatron.core.parallel_state"
    for row in ((module, "no_such", "", "a test", ""), (f"{module}s", "no_such", "", "a test", "")):
        assert ":no_such is gone from megatron-core" in compatibility.fault_of(*row)
    row = ("megatron.core.transformer.moe.moe_layer", "MoELayer.preprocess", "other", "a test", "")
    assert compatibility.fault_of(*row).endswith("it takes no other")
    assert "is gone" in compatibility.fault_of("megatron.core.transformer.moe.moe_layer", "MoELayer.no_such", "", "a test", "")


def test_what_ran_is_counted_by_file_and_why_not():
    test = lambda name, reason="": types.SimpleNamespace(nodeid=name, longrepr=("", 0, f"Skipped: {reason}"))  # noqa: E731
    stats = {"passed": [test("a.py::one"), test("a.py::two"), test("b.py::three")], "skipped": [test("b.py::four", "no GPU")]}
    text = ran.report(stats, "make test")
    assert "`make test` with megatron-core " in text and "| in all | 3 | 0 | 0 | 1 |" in text
    assert "| `a.py` | 2 | 0 | 0 | 0 |" in text and text.endswith("| 1 | no GPU |\n")
