"""Ranks with different values hear which differs, all of them alike; equal values are equal in every process."""

from __future__ import annotations

import dataclasses
from unittest.mock import patch

import pytest

from foremoe.base.errors import InputError
from foremoe.distributed import agreement
from foremoe.distributed.agreement import require_same, texts
from foremoe.distributed.group import Group
from foremoe.planner.planner import Planner
from foremoe.planner.strategies import resolve
from foremoe.problem.cost import CostModel
from foremoe.solvers import Quota
from foremoe.testing.ranks import get_pool, run_threads


def said(group: Group, values_G: list[dict[str, str]]) -> str:
    """What a rank hears."""
    try:
        require_same(group, values_G[group.rank])
    except InputError as error:
        return str(error)
    return ""


def said_with(group: Group, name: str, value_G: list[int]) -> str:
    """The same where a constant of the module differs: between processes."""
    with patch.object(agreement, name, value_G[group.rank]):
        return said(group, [{"a": "1"}] * group.size)


def test_equal_values_say_nothing_and_the_first_difference_is_named_to_all() -> None:
    same = {"a": "1", "b": "x" * 5000}
    assert run_threads(said, 3, [same] * 3) == [""] * 3
    for text in run_threads(said, 3, [same, same, {"a": "1", "b": "y"}]):
        assert text.startswith("rank 2 has b=y, rank 0 has b=xxx")
    for text in run_threads(said, 2, [{"a": "1"}, {"a": "1", "c": "2"}]):
        assert text == "rank 1 has c=2, rank 0 has c=nothing; give all ranks the same."


@pytest.mark.parametrize(("name", "shown"), [("__version__", "foremoe.__version__"), ("FORMAT_VERSION", "plan format")])
def test_other_versions_of_foremoe_or_its_plans_are_named_before_all_else(name: str, shown: str) -> None:
    for text in get_pool(2).run(said_with, name, [3, 4], num_ranks=2):
        assert text == f"rank 1 has {shown}=4, rank 0 has {shown}=3; give all ranks the same."


@dataclasses.dataclass(frozen=True)
class PricedOtherwise(CostModel):
    """With the fields of a `CostModel`."""


def test_texts_name_every_field_and_no_address() -> None:
    assert texts("cost", CostModel(overlap=0.5)) == {"cost": "CostModel", "cost.objective": "'time'", "cost.overlap": "0.5"}
    assert texts("cost", PricedOtherwise()) != texts("cost", CostModel())
    assert texts("planner", Planner(rank=(Quota(),)))["planner.rank"] == "(Quota(min_pairs=0),)"

    class Theirs:
        """The repr that objects have by default."""

    one, other = Theirs(), Theirs()
    assert repr(one) != repr(other) and texts("a", one) == texts("a", other) and "Theirs object>" in texts("a", one)["a"]
    assert texts("planner", resolve("foremoe")) == texts("planner", Planner())
