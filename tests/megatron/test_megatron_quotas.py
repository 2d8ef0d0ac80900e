"""Tokens per slot, measured inside Megatron, where no plan knew some of them; `test_megatron_layouts` has the others."""

import compare
import numpy as np
import pytest
from layouts import Case
from program import Layout

CASES = (
    Case(2, Layout()),
    Case(4, Layout(ep=4, recompute="full"), nodes=2),
    Case(4, Layout(ep=2, tp=2, pp=2, num_layers=4, dense=(1,))),
)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("unplanned", [1, 6], ids=["last-row", "half"])
def test_pairs_that_no_plan_knew_are_served_at_home_and_counted(pool, case, unplanned):
    verdicts = pool.run(compare.one_step, case, "", unplanned // case.layout.tp or 1, num_ranks=case.num_ranks)
    for verdict in verdicts:
        assert verdict.equal and verdict.as_expected
    assert sum(verdict.drift for verdict in verdicts) > 0 and not all(verdict.served for verdict in verdicts)


@pytest.mark.parametrize("alike", [True, False])
def test_with_five_percent_unplanned_rows_skew_is_within_five_percent_of_the_plan(pool, alike):
    """Row by row where these rows choose as the others do, and in the mean where they have favourites of their own."""
    case = Case(4, Layout(ep=4, sequence=240, batch=4))
    verdicts = pool.run(compare.one_step, case, "", case.layout.sequence // 20, alike)
    assert all(verdict.equal and verdict.as_expected and verdict.drift > 0 for verdict in verdicts)
    load_GXML = np.stack([verdict.load_ML for verdict in verdicts])
    further_XML = load_GXML.max(axis=0) / load_GXML.mean(axis=0) / verdicts[0].skew_ML
    assert (further_XML.max() if alike else further_XML.mean()) <= 1.05
